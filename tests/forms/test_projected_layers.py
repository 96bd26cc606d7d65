"""Canonical graphs with projections, against the oracle's layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import check_layer

from mha_export.errors import InputError
from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.forms._weights import random_weights, weight_shapes
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
    RotarySpec,
    RotaryStyle,
)

CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
BIASED: dict[str, Any] = {"q_bias": True, "k_bias": True, "v_bias": True, "output_bias": True}


def _spec(projections: ProjectionSpec, **fields: Any) -> AttentionSpec:
    return AttentionSpec(
        **{"q_heads": 4, "kv_heads": 2, "head_dim": 8, "projections": projections} | fields
    )


LAYERS = {
    "separate": _spec(ProjectionSpec(d_model=24)),
    "separate-biases": _spec(ProjectionSpec(d_model=24, **BIASED)),
    "whisper-biases": _spec(ProjectionSpec(d_model=24, q_bias=True, v_bias=True), kv_heads=4),
    "packed": _spec(ProjectionSpec(d_model=24, packing="packed")),
    "packed-some-biases": _spec(ProjectionSpec(d_model=24, packing="packed", v_bias=True)),
    "interleaved": _spec(ProjectionSpec(d_model=24, packing="interleaved", **BIASED)),
    "interleaved-one-bias": _spec(
        ProjectionSpec(d_model=24, packing="interleaved", k_bias=True), kv_heads=4
    ),
    "v-head-dim": _spec(ProjectionSpec(d_model=24, packing="packed"), v_head_dim=6, kv_heads=4),
    "interleaved-v-head-dim": _spec(
        ProjectionSpec(d_model=24, packing="interleaved"), v_head_dim=6
    ),
    "cross": _spec(ProjectionSpec(d_model=24, kv_d_model=20, **BIASED), cross=True),
    "no-output": _spec(ProjectionSpec(d_model=24, output=False)),
    "mean": _spec(ProjectionSpec(d_model=24, output=False), combine="mean", kv_heads=4),
    "key-prefix": _spec(
        ProjectionSpec(d_model=24), value_source="key_prefix", v_head_dim=4, kv_heads=1
    ),
    "bert": _spec(
        ProjectionSpec(d_model=24, **BIASED),
        kv_heads=4,
        mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
        q_len="s",
        kv_len="s",
    ),
    "bert-uniform": _spec(
        ProjectionSpec(d_model=24, **BIASED),
        kv_heads=4,
        mask=MaskSpec(padding=True, empty_row=EmptyRow.UNIFORM),
        q_len="s",
        kv_len="s",
    ),
    "gpt2": _spec(ProjectionSpec(d_model=24, packing="packed", **BIASED), kv_heads=4, mask=CAUSAL),
    "llama": _spec(
        ProjectionSpec(d_model=24),
        mask=CAUSAL,
        cache=CacheSpec(),
        rotary=RotarySpec(dim=8, theta=1e4, max_positions=64),
    ),
    "qwen3": _spec(
        ProjectionSpec(d_model=24),
        mask=CAUSAL,
        rotary=RotarySpec(dim=8, theta=1e4, max_positions=64),
        qk_norm=QkNormSpec(kind="rms"),
    ),
    "joint": _spec(
        ProjectionSpec(
            d_model=24,
            **BIASED,
            joint=JointSpec(
                lengths=("a", "b"), d_model=20, qk_norm=QkNormSpec(kind="layer", bias=True)
            ),
        ),
        q_len="s",
        kv_len="s",
    ),
    "joint-one-output": _spec(
        ProjectionSpec(d_model=24, joint=JointSpec(lengths=("a", "b"), output=False)),
        sinks=True,
        rotary=RotarySpec(dim=8, theta=1e4, max_positions=64),
        q_len="s",
        kv_len="s",
    ),
    "joint-bare": _spec(
        ProjectionSpec(d_model=24, output=False, joint=JointSpec(lengths=("a", "b"))),
        q_len="s",
        kv_len="s",
    ),
    "gpt-oss": _spec(ProjectionSpec(d_model=24, **BIASED), sinks=True, mask=CAUSAL),
}
LATENT = {
    "latent": _spec(
        ProjectionSpec(d_model=24),
        kv_heads=4,
        head_dim=12,
        v_head_dim=6,
        mask=CAUSAL,
        rotary=RotarySpec(dim=4, theta=1e4, style=RotaryStyle.INTERLEAVED, max_positions=64),
        latent=LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, q_rank=14),
    ),
    "latent-direct-query": _spec(
        ProjectionSpec(d_model=24),
        kv_heads=4,
        head_dim=12,
        v_head_dim=6,
        mask=CAUSAL,
        rotary=RotarySpec(dim=4, theta=1e4, max_positions=64),
        latent=LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4),
    ),
    "latent-absorbed": _spec(
        ProjectionSpec(d_model=24),
        kv_heads=1,
        head_dim=14,
        v_head_dim=10,
        value_source="key_prefix",
        scale=12**-0.5,
        mask=CAUSAL,
        cache=CacheSpec(),
        rotary=RotarySpec(dim=4, theta=1e4, max_positions=64),
        latent=LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, q_rank=14, absorbed=True, v_dim=6),
    ),
    "latent-absorbed-default-width": _spec(
        ProjectionSpec(d_model=24, output=False),
        kv_heads=1,
        head_dim=14,
        v_head_dim=10,
        value_source="key_prefix",
        latent=LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, absorbed=True),
    ),
}


def _rows() -> list[Any]:
    return [
        pytest.param(form, name, id=f"{form}-{name}")
        for form in all_forms()
        for name, spec in (LAYERS | LATENT).items()
        if form_named(form).supports(spec, FormParams(opset=23))
    ]


@pytest.mark.parametrize(("form", "name"), _rows())
def test_a_layer_is_the_oracles(form: str, name: str) -> None:
    check_layer(form, (LAYERS | LATENT)[name], 23)


@pytest.mark.parametrize("name", [*LAYERS, *LATENT])
def test_a_primitive_layer_at_the_least_opset(name: str) -> None:
    check_layer("primitive", (LAYERS | LATENT)[name], 13)


def test_a_second_stream_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layers.MEMORY", 130)
    check_layer("primitive", LAYERS["joint"], 18)


def test_packed_projections_are_one_matmul_and_one_split() -> None:
    spec = LAYERS["packed"]
    model = build_model(form_named("onnx"), spec, FormParams())
    types = [node.op_type for node in model.graph]
    assert types == ["MatMul", "Split", "Attention", "MatMul"]


@pytest.mark.parametrize("form", ["onnx", "ort-mha", "ort-attention"])
def test_no_transpose_stands_between_projection_and_op(form: str) -> None:
    spec = LAYERS["bert"].replace(mask=MaskSpec())
    model = build_model(form_named(form), spec, FormParams())
    assert not {"Transpose", "Reshape"} & {node.op_type for node in model.graph}


def test_ort_attention_takes_the_input_itself() -> None:
    model = build_model(form_named("ort-attention"), LAYERS["gpt2"], FormParams())
    types = [node.op_type for node in model.graph]
    assert types == ["Attention", "MatMul", "Add"]


def test_weights_are_drawn_from_the_seed_alone() -> None:
    one, two, other = (random_weights(LAYERS["llama"], seed) for seed in (3, 3, 4))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(one["w_q"], other["w_q"])
    assert list(one) == list(weight_shapes(LAYERS["llama"]))


def test_a_bias_that_is_not_stated_is_zero_in_a_packed_one() -> None:
    b_qkv = random_weights(LAYERS["packed-some-biases"], 0)["b_qkv"]
    assert not b_qkv[:48].any()
    assert b_qkv[48:].all()


def test_weights_may_be_inputs_so_that_the_file_holds_none() -> None:
    spec = LAYERS["llama"]
    model = build_model(form_named("ort-gqa"), spec, FormParams(), weights="none")
    names = [value.name for value in model.graph.inputs]
    assert names[:3] == ["hidden_states", "past_key", "past_value"]
    assert names[3:] == ["w_q", "w_k", "w_v", "w_o"]
    assert not {"w_q", "w_o"} & set(model.graph.initializers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_q": None}, "weight w_q is missing"),
        ({"w_extra": np.zeros(2, np.float32)}, "weight w_extra is not one the spec states"),
        ({"w_q": np.zeros((24, 31), np.float32)}, r"weight w_q has shape \[24, 31\]"),
        ({"w_q": np.zeros((24, 32), np.float64)}, "weight w_q is DOUBLE; expected FLOAT"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_weights_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    weights: dict[str, Any] = random_weights(LAYERS["llama"], 0) | change
    weights = {name: array for name, array in weights.items() if array is not None}
    with pytest.raises(InputError, match=message):
        build_model(form_named("primitive"), LAYERS["llama"], FormParams(), weights=weights)


def test_an_unsupported_spec_is_refused_with_the_feature() -> None:
    spec = LAYERS["llama"].replace(softcap=3.0)
    with pytest.raises(InputError, match="softcap: needs"):
        build_model(form_named("ort-mha"), spec, FormParams())


def test_half_precision_weights_are_the_rounded_ones() -> None:
    spec = LAYERS["separate"]
    wide, half = random_weights(spec, 1), random_weights(spec.replace(io_dtype=DType.FP16), 1)
    np.testing.assert_array_equal(wide["w_q"].astype(np.float16), half["w_q"])
