"""The right graphs that faults are planted in: small layers of every kind, in every form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.forms import Form, FormParams, all_forms, build_model
from mha_export.forms._weights import random_weights
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
    RotaryStyle,
)

PLAIN_OPSET = 18
FUSED_OPSETS = (23, 24, 25)

_BIASED: dict[str, Any] = {"q_bias": True, "k_bias": True, "v_bias": True, "output_bias": True}
_CAUSAL = CausalAlignment.BOTTOM_RIGHT
_SELF: dict[str, Any] = {"q_len": "seq", "kv_len": "seq"}
_CACHED: dict[str, Any] = {"q_len": "seq", "kv_len": "total_len", "cache": CacheSpec()}
_MHA: dict[str, Any] = {"q_heads": 4, "kv_heads": 4, "head_dim": 8}
_GQA: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}


@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """One right layer: what it states and its weights."""

    name: str
    spec: AttentionSpec
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)


def _layer(packing: Any = "separate", **biases: Any) -> ProjectionSpec:
    return ProjectionSpec(d_model=32, packing=packing, **biases)


def _spec(**stated: Any) -> AttentionSpec:
    return AttentionSpec(**{"projections": _layer(), **stated})


def _rotary(**stated: Any) -> RotarySpec:
    return RotarySpec(**{"dim": 8, "theta": 100.0, "max_positions": 64, **stated})


_PADDED: dict[str, Any] = {"padding": True, "fill": "min", "empty_row": EmptyRow.UNIFORM}

_SPECS: dict[str, AttentionSpec] = {
    "encoder, padded": _spec(
        **_MHA, **_SELF, mask=MaskSpec(**_PADDED), projections=_layer(**_BIASED)
    ),
    "encoder, packed": _spec(**_MHA, **_SELF, projections=_layer("packed", **_BIASED)),
    "encoder, two windows": _spec(
        **_MHA,
        **_SELF,
        mask=MaskSpec(left_window=2, right_window=2, **_PADDED),
        rotary=_rotary(),
        projections=_layer("packed"),
    ),
    "encoder, keep mask": _spec(
        **_MHA,
        **_SELF,
        mask=MaskSpec(keep=("batch", 1, "seq", "seq"), empty_row=EmptyRow.ZERO),
    ),
    "encoder, lengths": _spec(
        **_GQA, **_SELF, mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)
    ),
    "encoder, relative bias": _spec(
        **_MHA, **_SELF, scale=1.0, mask=MaskSpec(bias=(1, 4, "seq", "seq"))
    ),
    "decoder, packed, cache": _spec(
        **_MHA, **_CACHED, mask=MaskSpec(causal=_CAUSAL), projections=_layer("packed", **_BIASED)
    ),
    "decoder, grouped, rotary, cache": _spec(
        **_GQA, **_CACHED, mask=MaskSpec(causal=_CAUSAL), rotary=_rotary()
    ),
    "decoder, grouped, rotary, padded, cache": _spec(
        **_GQA,
        **_CACHED,
        mask=MaskSpec(causal=_CAUSAL, **_PADDED),
        rotary=_rotary(positions="input"),
    ),
    "decoder, one key head, window": _spec(
        q_heads=4,
        kv_heads=1,
        head_dim=8,
        **_SELF,
        mask=MaskSpec(causal=_CAUSAL, left_window=3),
        rotary=_rotary(),
    ),
    "decoder, softcap, window, cache": _spec(
        **_GQA,
        **_CACHED,
        scale=0.3,
        softcap=2.0,
        mask=MaskSpec(causal=_CAUSAL, left_window=3),
        rotary=_rotary(),
    ),
    "decoder, interleaved rotary": _spec(
        **_MHA,
        **_SELF,
        mask=MaskSpec(causal=_CAUSAL),
        rotary=_rotary(style=RotaryStyle.INTERLEAVED, dim=4),
    ),
    "decoder, normalised": _spec(
        **_GQA,
        **_SELF,
        mask=MaskSpec(causal=_CAUSAL),
        rotary=_rotary(),
        qk_norm=QkNormSpec(kind="rms"),
    ),
    "decoder, sinks, window": _spec(
        **_GQA,
        **_SELF,
        sinks=True,
        mask=MaskSpec(causal=_CAUSAL, left_window=3),
        rotary=_rotary(),
        projections=_layer(**_BIASED),
    ),
    "decoder, alibi": _spec(
        **_MHA,
        **_SELF,
        mask=MaskSpec(causal=_CAUSAL, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
        projections=_layer("interleaved", **_BIASED),
    ),
    "decoder, static cache": _spec(
        **_GQA,
        q_len="seq",
        kv_len=11,
        cache=CacheSpec(growth="static", max_length=11),
        mask=MaskSpec(causal=_CAUSAL),
        rotary=_rotary(),
    ),
    "decoder, prefix": _spec(**_MHA, **_SELF, mask=MaskSpec(causal=_CAUSAL, prefix=True)),
    "decoder, chunks": _spec(**_GQA, **_SELF, mask=MaskSpec(causal=_CAUSAL, block=3)),
    "decoder, documents": _spec(**_MHA, **_SELF, mask=MaskSpec(causal=_CAUSAL, documents=True)),
    "cross, biased": _spec(
        **_MHA,
        q_len="seq",
        kv_len="enc_len",
        cross=True,
        projections=_layer(q_bias=True, v_bias=True, output_bias=True),
    ),
    "cross, causal from the top left": _spec(
        **_GQA,
        q_len="seq",
        kv_len="enc_len",
        cross=True,
        mask=MaskSpec(causal=CausalAlignment.TOP_LEFT),
    ),
}


def bases(names: Mapping[str, object] | tuple[str, ...] = ()) -> tuple[Base, ...]:
    """Every base, or those named, with seeded weights."""
    chosen = {name: spec for name, spec in _SPECS.items() if not names or name in names}
    return tuple(
        Base(name=name, spec=spec, weights=random_weights(spec, seed=0))
        for name, spec in chosen.items()
    )


def graph_of(
    form: Form,
    params: FormParams,
    spec: AttentionSpec,
    weights: Mapping[str, np.ndarray],
) -> ir.Model:
    """The layer in a form."""
    return build_model(form, spec, params, weights=weights)


def ways_to_state(spec: AttentionSpec) -> Iterator[tuple[Form, FormParams]]:
    """Every form that supports ``spec``, at the least opset it is seen to."""
    for form in all_forms().values():
        opsets = (PLAIN_OPSET, *FUSED_OPSETS)
        for opset in (o for o in opsets if o >= form.min_opset):
            params = FormParams(opset=opset)
            if form.supports(spec, params):
                yield form, params
                break
