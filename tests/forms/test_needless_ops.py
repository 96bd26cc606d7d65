"""What a form writes and what it leaves out: no step that changes nothing, the ops of its opset."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from features import FEATURES

from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    LatentSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
)

SQUARE = {"q_len": "s", "kv_len": "s"}
CAUSAL = MaskSpec(causal=CausalAlignment.TOP_LEFT)
PLAIN = ("grouped", "primitive", "tiled", "trt")
"""Forms that multiply by the scale themselves, where it is not 1."""
FUSED = ("onnx", "ort-gqa", "ort-mha", "portable")


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 4, "head_dim": 16, **SQUARE} | fields)


def _model(form: str, spec: AttentionSpec, opset: int = 23) -> ir.Model:
    """All queries in one tile: sizes of tiles are not what is looked at here."""
    params = FormParams(opset=opset, options={"tiles": 1} if form == "tiled" else {})
    return build_model(form_named(form), spec, params)


def _ops(form: str, spec: AttentionSpec, opset: int = 23) -> Counter[str]:
    return Counter(node.op_type for node in _model(form, spec, opset).graph)


@pytest.mark.parametrize(("scale", "plain"), [(1.0, 0), (2.0, 1), (0.25, 1), (0.0, 1), (-0.5, 1)])
@pytest.mark.parametrize("form", PLAIN)
def test_a_scale_of_one_is_not_multiplied_by(form: str, scale: float, plain: int) -> None:
    assert _ops(form, _spec(scale=scale))["Mul"] == plain


@pytest.mark.parametrize(("scale", "outside"), [(1.0, 0), (2.0, 0), (0.25, 0), (0.0, 1)])
@pytest.mark.parametrize("form", FUSED)
def test_a_scale_that_an_op_has_no_word_for_stands_on_the_query(
    form: str, scale: float, outside: int
) -> None:
    """0 says "not given" to some, and has no root for another."""
    model = _model(form, _spec(scale=scale))
    factors = [node.inputs[1] for node in model.graph if node.op_type == "Mul"]
    assert [float(factor.const_value.numpy()) for factor in factors] == [scale] * outside


@pytest.mark.parametrize("form", [form for form in all_forms() if form != "ort-attention"])
def test_an_attention_without_a_mask_has_none(form: str) -> None:
    ops = _ops(form, _spec(scale=1.0))
    assert not {"Where", "Range", "LessOrEqual", "Tanh", "Split", "Slice"} & set(ops)
    assert ops["Add"] == 0


NEWER_OPS = {
    "grouped": (2, 2), "onnx": (2, 2), "ort-gqa": (2, 0), "ort-mha": (2, 2), "portable": (2, 2),
    "primitive": (0, 0), "tiled": (0, 0), "trt": (2, 2),
}  # fmt: skip
"""RMSNormalization and RotaryEmbedding nodes of the forms here; one that is added has its own."""

NEWER = {"qk_norm": QkNormSpec(kind="rms"), "rotary": RotarySpec(dim=16, theta=1e4)}


@pytest.mark.parametrize("form", [form for form in all_forms() if form != "ort-attention"])
@pytest.mark.parametrize("opset", [22, 23])
def test_norm_and_rotary_are_ops_where_the_opset_has_them(form: str, opset: int) -> None:
    """But not where every node is to be a plain one, nor rotary where the attention does it."""
    if not form_named(form).supports(_spec(**NEWER), FormParams(opset=opset)):
        assert (form, opset) == ("onnx", 22)
        return
    ops = _ops(form, _spec(**NEWER), opset)
    norms, rotaries = NEWER_OPS.get(form, (ops["RMSNormalization"], ops["RotaryEmbedding"]))
    assert ops["RMSNormalization"] == (norms if opset == 23 else 0)
    assert ops["RotaryEmbedding"] == (rotaries if opset == 23 else 0)


LATENT = LatentSpec(kv_rank=12, nope_dim=8, rope_dim=4)


@pytest.mark.parametrize(("opset", "q_rank", "norms"), [(22, 6, 0), (23, 6, 2), (23, None, 1)])
def test_latents_are_normalised_by_the_op_of_its_opset(
    opset: int, q_rank: int | None, norms: int
) -> None:
    spec = _spec(
        head_dim=12,
        v_head_dim=6,
        latent=replace(LATENT, q_rank=q_rank),
        projections=ProjectionSpec(d_model=24),
    )
    assert _ops("primitive", spec, opset)["RMSNormalization"] == norms


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("form", ["grouped", "onnx", "ort-mha", "portable", "primitive", "tiled"])
def test_a_static_cache_is_written_by_the_op_of_its_opset(form: str, opset: int) -> None:
    static = _spec(mask=CAUSAL, cache=CacheSpec(growth="static"), q_len=1, kv_len="t")
    static = static.replace(mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT))
    ops = _ops(form, static, opset)
    fused = opset == 24 and form not in ("primitive", "tiled")
    assert (ops["TensorScatter"], ops["ScatterElements"]) == ((2, 0) if fused else (0, 2))


BIAS = MaskSpec(bias=(1, 4, "s", "s"))
KEEP = MaskSpec(keep=("s", "s"), empty_row=EmptyRow.ZERO)


@pytest.mark.parametrize(("form", "guarded"), [
    ("onnx", 1), ("ort-gqa", 1), ("ort-mha", 0), ("portable", 0), ("trt", 0), ("primitive", 0),
])  # fmt: skip
def test_a_bias_at_the_minimum_is_kept_from_ops_that_take_it_for_infinity(
    form: str, guarded: int
) -> None:
    model = _model(form, _spec(mask=BIAS))
    lowest = np.finfo(np.float32).min
    constants = [value.const_value.numpy() for value in model.graph.initializers.values()]
    assert sum(array.size == 1 and array.item() == lowest for array in constants) == guarded
    ops = Counter(node.op_type for node in model.graph)
    assert ops["Equal"] == guarded


@pytest.mark.parametrize("feature", ["keep-inf-zero", "padding-inf-zero", "causal-bottom-right"])
def test_a_mask_that_only_hides_is_boolean(feature: str) -> None:
    model = _model("onnx", FEATURES[feature])
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert node.inputs[3].dtype is ir.DataType.BOOL
    assert "Where" not in {node.op_type for node in model.graph}


@pytest.mark.parametrize("feature", ["bias", "alibi", "keep-finite-finite", "sinks-padding"])
def test_a_mask_that_adds_is_of_the_io_dtype(feature: str) -> None:
    model = _model("onnx", FEATURES[feature])
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert node.inputs[3].dtype is ir.DataType.FLOAT


def test_forbidden_scores_are_chosen_away_in_plain_ops() -> None:
    """inf + -inf is not a number: what -inf replaces is not added to."""
    ops = _ops("primitive", _spec(mask=MaskSpec(keep=("s", "s"), empty_row=EmptyRow.NAN)))
    assert (ops["Where"], ops["Add"]) == (1, 0)
    finite = MaskSpec(keep=("s", "s"), fill=-9.0, empty_row=EmptyRow.FINITE)
    assert _ops("primitive", _spec(mask=finite))["Add"] == 1


@pytest.mark.parametrize(("form", "copies"), [("tiled", "Pad"), ("grouped", "Slice")])
def test_the_smaller_is_copied_for_a_sink(form: str, copies: str) -> None:
    """Of many queries the values, of few the weights."""
    ops = _ops(form, _spec(sinks=True))
    assert {name: ops[name] for name in ("Pad", "Slice")} == {"Pad": 0, "Slice": 0} | {copies: 1}


def test_a_portable_node_without_a_mask_adds_zeros() -> None:
    model = _model("portable", _spec())
    (node,) = (node for node in model.graph if node.op_type == "MultiHeadAttention")
    made = node.inputs[5].producer()
    assert made.op_type == "Expand"
    assert float(made.inputs[0].const_value.numpy()) == 0.0


SEPARATE = ProjectionSpec(d_model=24)


def test_what_ort_attention_says_by_other_means() -> None:
    form, params = form_named("ort-attention"), FormParams(opset=17)
    joined = {"projections": "the three weights joined by Concat"}
    for spec, means in (
        (_spec(projections=SEPARATE), joined),
        (_spec(projections=ProjectionSpec(d_model=24, packing="packed")), {}),
        (
            _spec(projections=ProjectionSpec(d_model=24, output=False), combine="mean"),
            joined | {"combine": "ReduceMean after the op"},
        ),
        (_spec(projections=SEPARATE, mask=KEEP),
         joined | {"keep": "additive mask", "empty_row": "Where on the output"}),
    ):  # fmt: skip
        verdict = form.supports(spec, params)
        assert verdict
        assert verdict.by_other_means == means


@pytest.mark.parametrize("biased", ["q", "k", "v", "qk", "kv", "qv", "qkv", ""])
def test_biases_that_are_not_there_are_zeros_among_the_joined(biased: str) -> None:
    stated: dict[str, Any] = {f"{name}_bias": True for name in biased}
    spec = _spec(v_head_dim=6, projections=ProjectionSpec(d_model=24, output=False, **stated))
    model = _model("ort-attention", spec, 17)
    (node,) = (node for node in model.graph if node.domain == "com.microsoft")
    if not biased:
        assert len(node.inputs) == 2
        return
    parts = [value.const_value.numpy() for value in node.inputs[2].producer().inputs]
    assert [len(part) for part in parts] == [64, 64, 24]
    assert [bool(part.any()) for part in parts] == [name in biased for name in "qkv"]


def test_weights_of_half_precision_are_joined_with_zeros_of_it() -> None:
    spec = _spec(io_dtype=DType.FP16, projections=ProjectionSpec(d_model=24, v_bias=True))
    model = _model("ort-attention", spec, 17)
    (node,) = (node for node in model.graph if node.domain == "com.microsoft")
    assert {value.dtype for value in node.inputs[2].producer().inputs} == {ir.DataType.FLOAT16}
