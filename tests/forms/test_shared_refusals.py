"""What all forms refuse, and what fused forms leave to nodes around them, at each limit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mha_export.forms import FormParams, Supported, Unsupported, form_named
from mha_export.forms._support import (
    common_refusal,
    first_refusal,
    means_around,
    means_of_softmax,
    verdict,
)
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    DType,
    EmptyRow,
    LatentSpec,
    MaskSpec,
    QkNormSpec,
    RotarySpec,
)

PRIMITIVE = form_named("primitive")


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 2, "kv_heads": 2, "head_dim": 16} | fields)


def _filled(fill: Any, policy: EmptyRow = EmptyRow.FINITE, **fields: Any) -> AttentionSpec:
    return _spec(mask=MaskSpec(padding=True, fill=fill, empty_row=policy), **fields)


LARGEST = {
    DType.FP32: float(np.finfo(np.float32).max),
    DType.FP16: 65504.0,
    DType.BF16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
}
REFUSED = [
    # opset, spec, the feature that no form can state
    (13, _spec(), None),
    (12, _spec(), "opset"),
    (14, _spec(), None),
    *[(13, _filled(-fill, io_dtype=dtype), None) for dtype, fill in LARGEST.items()],
    *[(13, _filled(-fill * 1.01, io_dtype=dtype), "fill") for dtype, fill in LARGEST.items()],
    *[(13, _filled(fill * 1.01, io_dtype=dtype), "fill") for dtype, fill in LARGEST.items()],
    (13, _filled("-inf"), "empty_row"),
    (13, _filled("min"), None),
    (13, _filled(-9.0), None),
    *[(13, _filled("-inf", policy), None) for policy in EmptyRow if policy.value in "zeronan"],
]


@pytest.mark.parametrize(("opset", "spec", "feature"), REFUSED)
def test_what_no_form_can_state(opset: int, spec: AttentionSpec, feature: str | None) -> None:
    refusal = common_refusal(PRIMITIVE, spec, FormParams(opset=opset))
    assert (None if refusal is None else refusal.feature) == feature


def test_the_first_refusal_is_the_answer() -> None:
    one, two = (Unsupported(feature=name, needs="more") for name in ("one", "two"))
    assert first_refusal() is None
    assert first_refusal(None, None) is None
    assert first_refusal(None, one, two) is one
    params = FormParams(opset=13)
    assert verdict(PRIMITIVE, _spec(), params, None, two) is two
    supported = verdict(PRIMITIVE, _spec(), params, None, means=lambda: {"a": "b"})
    assert isinstance(supported, Supported)
    assert supported.by_other_means == {"a": "b"}


PLAIN = "plain ops before the op"
LATENT: dict[str, Any] = {
    "latent": LatentSpec(kv_rank=8, nope_dim=12, rope_dim=4),
    "rotary": RotarySpec(dim=4),
}
AROUND = [
    # spec, opset, whether the op keeps the cache, what is said around it
    (_spec(), 23, True, {}),
    (_spec(qk_norm=QkNormSpec(kind="rms")), 22, True, {"qk_norm": PLAIN}),
    (_spec(qk_norm=QkNormSpec(kind="rms")), 23, True, {"qk_norm": "RMSNormalization"}),
    (_spec(qk_norm=QkNormSpec(kind="rms", bias=True)), 24, True, {"qk_norm": PLAIN}),
    (_spec(qk_norm=QkNormSpec(kind="layer")), 24, True, {"qk_norm": PLAIN}),
    (_spec(rotary=RotarySpec(dim=16)), 22, True, {"rotary": PLAIN}),
    (_spec(rotary=RotarySpec(dim=16)), 23, True, {"rotary": "RotaryEmbedding"}),
    (_spec(rotary=RotarySpec(dim=8, offset=1)), 24, True, {"rotary": PLAIN}),
    (_spec(rotary=RotarySpec(dim=8, offset=8)), 24, True, {"rotary": PLAIN}),
    (_spec(**LATENT), 24, True, {"rotary": PLAIN}),
    (_spec(cache=CacheSpec()), 24, True, {}),
    (_spec(cache=CacheSpec()), 24, False, {"cache": "Concat"}),
    (_spec(cache=CacheSpec(growth="static")), 23, False, {"cache": "ScatterElements"}),
    (_spec(cache=CacheSpec(growth="static")), 24, False, {"cache": "TensorScatter"}),
    (_spec(cache=CacheSpec(growth="shared_buffer")), 25, False, {"cache": "TensorScatter"}),
    (_spec(cache=CacheSpec(growth="static")), 24, True, {}),
    (_spec(v_head_dim=8), 24, False, {}),
    (_spec(value_source="key_prefix"), 24, False, {}),
    (_spec(value_source="key_prefix", v_head_dim=8), 24, False,
     {"value_source": "Slice of the keys"}),
    (_spec(combine="mean"), 24, False, {"combine": "ReduceMean after the op"}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "opset", "cache_in_op", "means"), AROUND)
def test_what_is_said_around_an_op(
    spec: AttentionSpec, opset: int, cache_in_op: bool, means: dict[str, str]
) -> None:
    assert means_around(spec, FormParams(opset=opset), cache_in_op=cache_in_op) == means


def test_the_precision_of_softmax_is_said_where_it_is_another() -> None:
    assert means_of_softmax(_spec()) == {}
    assert means_of_softmax(_spec(softmax_dtype=DType.FP32)) == {}
    narrow = _spec(io_dtype=DType.FP16, softmax_dtype=DType.FP32)
    assert means_of_softmax(narrow) == {"softmax_dtype": "the op's own precision"}
