"""The invariants of the spec, and how it is stated in JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FEATURES, attention_specs

from mha_export.errors import InputError, SpecError
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    JointSpec,
    LatentSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotaryScaling,
    RotarySpec,
)

ZERO = EmptyRow.ZERO


def make_spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 8, **changes})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_spec(q_heads=0), "q_heads is 0"),
        (lambda: make_spec(kv_heads=-1), "kv_heads is -1"),
        (lambda: make_spec(head_dim=0), "head_dim is 0"),
        (lambda: make_spec(q_heads=6, kv_heads=4), r"kv_heads may be one of \[1, 2, 3, 6\]"),
        (lambda: make_spec(v_head_dim=0), "v_head_dim is 0"),
        (lambda: make_spec(softcap=0.0), "softcap is 0.0"),
        (lambda: make_spec(softcap=-1.0), "leave it out for no softcap"),
        (lambda: make_spec(scale=math.inf), "scale is inf"),
        (lambda: make_spec(scale=math.nan), "scale is nan"),
        (lambda: make_spec(rotary=RotarySpec(dim=10)), "rotary.dim 10 is above head_dim 8"),
        (lambda: make_spec(mask=MaskSpec(alibi_slopes=(1.0,))), "alibi_slopes has 1 values"),
        (lambda: make_spec(cross=True, cache=CacheSpec()), "does not grow a cache by concat"),
        (lambda: make_spec(value_source="key_prefix", v_head_dim=9), "v_head_dim 9 <= head_dim 8"),
        (
            lambda: make_spec(combine="mean", projections=ProjectionSpec(d_model=8)),
            "not followed by an output projection",
        ),
        (lambda: MaskSpec(left_window=-1), "mask.left_window is -1"),
        (lambda: MaskSpec(right_window=-2), "mask.right_window is -2"),
        (lambda: MaskSpec(block=0), "mask.block is 0"),
        (lambda: MaskSpec(keep=(), empty_row=ZERO), "mask.keep has rank 0"),
        (lambda: MaskSpec(bias=(1, 2, 3, 4, 5)), "mask.bias has rank 5"),
        (lambda: MaskSpec(fill=-math.inf), "'-inf'"),
        (lambda: MaskSpec(padding=True), "state empty_row"),
        (lambda: MaskSpec(lengths=True), "state empty_row"),
        (lambda: MaskSpec(keep=("t",)), "state empty_row"),
        (lambda: RotarySpec(dim=3), "positive even number"),
        (lambda: RotarySpec(dim=0), "rotary.dim is 0"),
        (lambda: RotaryScaling(kind="linear", factor=0.0), "factor is 0.0"),
        (lambda: RotaryScaling(kind="yarn", factor=2.0), "yarn needs original_max_positions"),
        (lambda: RotaryScaling(kind="llama3", factor=2.0), "llama3 needs original_max_positions"),
        (lambda: ProjectionSpec(d_model=0), "d_model is 0"),
        (
            lambda: ProjectionSpec(d_model=8, kv_d_model=4, packing="packed"),
            "packed projections read one input",
        ),
    ],
)
def test_contradictions_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        make()
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_what_is_not_stated_differs_from_the_default() -> None:
    assert make_spec() != make_spec(scale=1 / math.sqrt(8))
    assert make_spec().effective_scale == make_spec(scale=1 / math.sqrt(8)).effective_scale
    resolved = make_spec().resolved()
    assert resolved.scale == 1 / math.sqrt(8)
    assert resolved.v_head_dim == 8
    assert resolved.softmax_dtype is DType.FP32
    assert resolved == resolved.resolved()
    stated = make_spec(softmax_dtype=DType.FP32, io_dtype=DType.FP16)
    assert stated.effective_softmax_dtype is DType.FP32


def test_derived_widths() -> None:
    spec = make_spec(q_heads=6, v_head_dim=3)
    assert (spec.group, spec.value_dim, make_spec().value_dim) == (3, 3, 8)


def test_rotated_channels_of_latent_attention_are_the_last() -> None:
    rotary, latent = RotarySpec(dim=2), LatentSpec(kv_rank=6, nope_dim=6, rope_dim=2)
    assert make_spec(rotary=rotary).rotary_offset == 0
    assert make_spec(latent=latent).rotary_offset == 0
    assert make_spec(rotary=rotary, latent=latent).rotary_offset == 6


@pytest.mark.parametrize(
    ("cache", "mask", "uses"),
    [
        (None, MaskSpec(), False),
        (None, MaskSpec(lengths=True, empty_row=ZERO), True),
        (CacheSpec(), MaskSpec(), False),
        (CacheSpec(growth="static"), MaskSpec(), True),
        (CacheSpec(growth="shared_buffer"), MaskSpec(), True),
    ],
)
def test_static_caches_imply_lengths(cache: CacheSpec | None, mask: MaskSpec, uses: bool) -> None:
    assert make_spec(cache=cache, mask=mask).uses_lengths is uses


@pytest.mark.parametrize(
    ("mask", "hides", "may_empty", "parts"),
    [
        (MaskSpec(), False, False, ()),
        (MaskSpec(causal=CausalAlignment.TOP_LEFT), True, False, ()),
        (MaskSpec(left_window=0), True, False, ()),
        (MaskSpec(right_window=0), True, False, ()),
        (MaskSpec(keep=("t",), empty_row=ZERO), True, True, ("keep",)),
        (MaskSpec(bias=("t",)), False, False, ("bias",)),
        (MaskSpec(padding=True, empty_row=ZERO), True, True, ("padding",)),
        (MaskSpec(lengths=True, empty_row=ZERO), True, True, ("lengths",)),
        (MaskSpec(prefix=True), False, False, ("prefix",)),
        (MaskSpec(block=2), True, False, ("block",)),
        (MaskSpec(documents=True), True, False, ("block",)),
        (MaskSpec(alibi_slopes=(1.0,)), False, False, ("alibi",)),
    ],
)
def test_what_a_mask_does(
    mask: MaskSpec, hides: bool, may_empty: bool, parts: tuple[str, ...]
) -> None:
    assert (mask.hides_keys, mask.may_empty_a_row, mask.parts) == (hides, may_empty, parts)


def test_json_of_everything() -> None:
    spec = make_spec(
        softcap=30.0,
        sinks=True,
        mask=MaskSpec(
            causal=CausalAlignment.BOTTOM_RIGHT, left_window=3, padding=True, empty_row=ZERO
        ),
        rotary=RotarySpec(dim=4, theta=1e4),
        qk_norm=QkNormSpec(kind="rms"),
        cache=CacheSpec(growth="shared_buffer"),
        io_dtype=DType.FP16,
        batch=2,
    )
    stated = json.loads(json.dumps(spec.to_json()))
    assert stated == {
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "scale": 1 / math.sqrt(8),
        "softcap": 30.0,
        "causal": "bottom_right",
        "left_window": 3,
        "right_window": None,
        "mask": ["padding"],
        "fill": "-inf",
        "empty_row": "zero",
        "rotary": {"style": "half", "dim": 4},
        "qk_norm": "rms",
        "sinks": True,
        "cross": False,
        "cache": "static",
        "kv_source": "own",
        "combine": "concat",
        "io_dtype": "fp16",
        "softmax_dtype": "fp16",
        "dims": {"batch": 2, "q_len": "q_len", "kv_len": "kv_len"},
    }


def test_json_of_nothing() -> None:
    stated = make_spec().to_json()
    assert stated["fill"] is stated["rotary"] is stated["qk_norm"] is stated["cache"] is None
    assert make_spec(cache=CacheSpec()).to_json()["cache"] == "concat"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(attention_specs())
def test_drawn_specs_are_valid_and_hashable(spec: AttentionSpec) -> None:
    assert spec.replace() == spec
    assert hash(spec) == hash(spec.replace())
    json.dumps(spec.to_json())


@settings(derandomize=True, max_examples=40, deadline=None)
@given(attention_specs(without=FEATURES))
def test_features_can_be_left_out_of_drawn_specs(spec: AttentionSpec) -> None:
    plain = AttentionSpec(q_heads=spec.q_heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
    assert spec == plain.replace(q_len=spec.q_len, kv_len=spec.kv_len)


@settings(derandomize=True, max_examples=1)
@given(st.data())
def test_unknown_features_cannot_be_left_out(data: st.DataObject) -> None:
    with pytest.raises(ValueError, match="unknown features"):
        data.draw(attention_specs(without=("softcup",)))


def _joint(**fields: Any) -> ProjectionSpec:
    return ProjectionSpec(**{"d_model": 8, "joint": JointSpec(lengths=("a", "b"))} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cross": True}, "cross"),
        ({"cache": CacheSpec()}, "cache"),
        ({"qk_norm": QkNormSpec(kind="rms")}, "qk_norm"),
        ({"value_source": "key_prefix"}, "key_prefix"),
        ({"kv_len": "t"}, "kv_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_two_streams_do_not_go_with(fields: dict[str, Any], words: str) -> None:
    joint = {"projections": _joint(), "q_len": "s", "kv_len": "s"}
    assert make_spec(**joint).projections == _joint()
    with pytest.raises(SpecError, match=words):
        make_spec(**joint | fields)


def test_two_streams_have_two_lengths_and_weights_apart() -> None:
    with pytest.raises(SpecError, match="3 entries"):
        JointSpec(lengths=("a", "b", "c"))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="expected separate"):
        _joint(packing="packed")
    mean = _joint(output=False)
    with pytest.raises(SpecError, match="combine: mean"):
        make_spec(projections=mean, q_len="s", kv_len="s", combine="mean")


ABSORBED: dict[str, Any] = {
    "kv_heads": 1,
    "head_dim": 14,
    "v_head_dim": 10,
    "value_source": "key_prefix",
    "latent": LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, absorbed=True),
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q_heads": 2, "kv_heads": 2}, "kv_heads is 2; absorbed latent attention has 1"),
        ({"head_dim": 12}, "head_dim is 12; absorbed latent attention has 14"),
        ({"v_head_dim": 8}, "v_head_dim is 8; absorbed latent attention has 10"),
        ({"value_source": "own"}, "value_source is own"),
        ({"latent": LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4)}, "materialised .* has 12"),
        ({"rotary": RotarySpec(dim=6)}, "above latent.rope_dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_widths_of_latent_attention_fit_each_other(fields: dict[str, Any], words: str) -> None:
    make_spec(**ABSORBED)
    with pytest.raises(SpecError, match=words):
        make_spec(**ABSORBED | fields)
