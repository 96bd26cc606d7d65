"""What a canonical graph holds beside its inputs: outputs, versions, marks, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

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
    QkOutput,
    RotarySpec,
)
from mha_export.statement import statements

CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
LAYER = ProjectionSpec(d_model=24)


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 4, "head_dim": 8} | fields)


def _model(form: str, spec: AttentionSpec, opset: int = 18, **options: Any) -> ir.Model:
    return build_model(form_named(form), spec, FormParams(opset=opset), **options)


SPECS = {
    "bare": _spec(),
    "layer": _spec(projections=LAYER, mask=CAUSAL),
    "packed layer": _spec(projections=ProjectionSpec(d_model=24, packing="packed")),
    "cached layer": _spec(projections=LAYER, mask=CAUSAL, cache=CacheSpec()),
    "padding": _spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO)),
    "rotary": _spec(rotary=RotarySpec(dim=8, theta=1e4, max_positions=16), mask=CAUSAL),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", all_forms())
def test_nothing_is_left_over(form: str, name: str) -> None:
    """A form that does not read the packed projection leaves no Concat of weights behind."""
    if not form_named(form).supports(SPECS[name], FormParams(opset=23)):
        return
    model = _model(form, SPECS[name], 23)
    outputs = set(model.graph.outputs)
    for node in model.graph:
        assert any(value.uses() or value in outputs for value in node.outputs), node
    for value in model.graph.initializers.values():
        assert value.uses(), value
    for value in model.graph.inputs:
        assert value.uses(), value
    assert {value.dtype for value in outputs} == {ir.DataType.FLOAT}


@pytest.mark.parametrize(
    ("opset", "version"), [(13, 10), (18, 10), (22, 10), (23, 11), (24, 12), (25, 13), (26, 13)]
)
def test_the_ir_version_is_that_of_the_opset(opset: int, version: int) -> None:
    """10 is the first in which nodes carry metadata; from there on as onnx has it."""
    from onnx.helper import OP_SET_ID_VERSION_MAP

    model = _model("primitive", _spec(), opset)
    assert model.ir_version == version
    if ("ai.onnx", opset) in OP_SET_ID_VERSION_MAP:
        assert version == max(10, OP_SET_ID_VERSION_MAP["ai.onnx", opset])
    assert model.graph.opset_imports == {"": opset}


def test_the_domain_of_an_op_is_imported_where_it_is_used() -> None:
    model = _model("ort-mha", _spec())
    assert model.graph.opset_imports == {"": 18, "com.microsoft": 1}
    assert model.graph.name == "attention_ort_mha"
    assert model.producer_name == "mha_export"


def test_a_function_comes_with_the_node_that_calls_it() -> None:
    model = _model("portable", _spec(), 23)
    called = {(node.domain, node.op_type) for node in model.graph if node.domain}
    assert called
    assert called == {(function.domain, function.name) for function in model.functions.values()}
    assert not _model("primitive", _spec()).functions


def test_the_nodes_of_the_form_say_so_and_the_softmax_carries_the_spec() -> None:
    spec = _spec(projections=LAYER, mask=CAUSAL)
    for form in ("primitive", "onnx", "ort-mha", "ort-gqa"):
        model = _model(form, spec, 23)
        marked = [node for node in model.graph if "mha_export.form" in node.metadata_props]
        assert {node.metadata_props["mha_export.form"] for node in marked} == {form}
        assert {node.metadata_props["mha_export.site"] for node in marked} == {"attention"}
        plain = [node.op_type for node in model.graph if node not in marked]
        assert plain.count("MatMul") == 4, "the linear layers belong to no form"
        (anchor,) = (node for node in marked if "mha_export.spec" in node.metadata_props)
        assert anchor.op_type in (
            "Softmax",
            "Attention",
            "MultiHeadAttention",
            "GroupQueryAttention",
        )
        text = anchor.metadata_props["mha_export.spec"]
        assert json.loads(text) == spec.to_json()
        assert list(json.loads(text)) == sorted(spec.to_json())


@pytest.mark.parametrize("projected", [False, True], ids=["bare", "layer"])
def test_one_attention_in_many_softmaxes_states_itself(projected: bool) -> None:
    spec = _spec(mask=CAUSAL, cache=CacheSpec(), q_len=12, projections=LAYER if projected else None)
    params = FormParams(opset=18, options={"tiles": 3})
    model = build_model(form_named("tiled"), spec, params)
    assert [node.op_type for node in model.graph].count("Softmax") == 3
    (stated,) = statements(model.graph)
    assert stated.form == "tiled"
    assert stated.spec == spec.replace(projections=None)
    assert stated.operands.past_key is not None
    assert stated.operands.past_key.value.name == "past_key"
    assert set(stated.gives) == {"output", "present_key", "present_value"}
    for role in ("present_key", "present_value"):
        assert stated.gives[role].value.name == role
    assert not statements(_model("primitive", spec).graph), "one softmax can be read as it is"


OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, list[int | str]]]] = {
    "bare": ({"v_head_dim": 6}, {"output": ["batch", "q_len", 24]}),
    "mean of heads": ({"combine": "mean"}, {"output": ["batch", "q_len", 8]}),
    "layer": ({"projections": LAYER, "v_head_dim": 6}, {"output": ["batch", "q_len", 24]}),
    "layer that ends in the heads": (
        {"projections": ProjectionSpec(d_model=20, output=False)},
        {"output": ["batch", "q_len", 32]},
    ),
    "concat cache": (
        {"cache": CacheSpec(), "v_head_dim": 6},
        {
            "output": ["batch", "q_len", 24],
            "present_key": ["batch", 4, "kv_len", 8],
            "present_value": ["batch", 4, "kv_len", 6],
        },
    ),
    "static cache": (
        {"cache": CacheSpec(growth="static", layout="bshd", max_length=12)},
        {
            "output": ["batch", "q_len", 32],
            "present_key": ["batch", 12, 4, 8],
            "present_value": ["batch", 12, 4, 8],
        },
    ),
    "values out of keys": (
        {"cache": CacheSpec(), "value_source": "key_prefix"},
        {"output": ["batch", "q_len", 32], "present_key": ["batch", 4, "kv_len", 8]},
    ),
    "scores": (
        {"qk_output": QkOutput.RAW, "kv_len": 7},
        {"output": ["batch", "q_len", 32], "qk_output": ["batch", 4, "q_len", 7]},
    ),
    "scores beside a cache": (
        {"qk_output": QkOutput.RAW, "kv_len": "t", "cache": CacheSpec()},
        {
            "output": ["batch", "q_len", 32],
            "present_key": ["batch", 4, "t", 8],
            "present_value": ["batch", 4, "t", 8],
            "qk_output": ["batch", 4, "q_len", "kv_len"],
        },
    ),
    "absorbed latent": (
        {
            "projections": LAYER,
            "kv_heads": 1,
            "head_dim": 14,
            "v_head_dim": 10,
            "value_source": "key_prefix",
            "latent": LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, absorbed=True, v_dim=6),
        },
        {"output": ["batch", "q_len", 24]},
    ),
    "absorbed latent alone": (
        {
            "projections": ProjectionSpec(d_model=24, output=False),
            "kv_heads": 1,
            "head_dim": 14,
            "v_head_dim": 10,
            "value_source": "key_prefix",
            "latent": LatentSpec(kv_rank=10, nope_dim=8, rope_dim=4, absorbed=True, v_dim=6),
        },
        {"output": ["batch", "q_len", 24]},
    ),
    "two streams": (
        {
            "projections": ProjectionSpec(
                d_model=24, joint=JointSpec(lengths=("a", "b"), d_model=20)
            ),
            "q_len": "s",
            "kv_len": "s",
        },
        {"output": ["batch", "a", 24], "encoder_output": ["batch", "b", 20]},
    ),
    "two streams of one width": (
        {
            "projections": ProjectionSpec(d_model=24, joint=JointSpec(lengths=("a", "b"))),
            "q_len": "s",
            "kv_len": "s",
        },
        {"output": ["batch", "a", 24], "encoder_output": ["batch", "b", 24]},
    ),
    "two streams without an output projection": (
        {
            "projections": ProjectionSpec(
                d_model=24,
                output=False,
                joint=JointSpec(lengths=("a", "b"), d_model=20, output=False),
            ),
            "q_len": "s",
            "kv_len": "s",
        },
        {"output": ["batch", "a", 32]},
    ),
}


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_declared_by_the_spec(name: str, dtype: DType) -> None:
    fields, expected = OUTPUTS[name]
    model = _model("primitive", _spec(**fields, io_dtype=dtype))
    declared = {
        value.name: [size if isinstance(size, int) else size.value for size in value.shape or ()]
        for value in model.graph.outputs
    }
    assert declared == expected
    assert list(declared) == list(expected)
    typed = ir.DataType.FLOAT if dtype is DType.FP32 else ir.DataType.FLOAT16
    assert {value.dtype for value in model.graph.outputs} == {typed}


def test_weights_are_drawn_where_none_are_given() -> None:
    spec = _spec(projections=LAYER, qk_norm=QkNormSpec(kind="rms"), sinks=True)
    model = _model("primitive", spec, seed=3)
    for name, array in random_weights(spec, 3).items():
        (value,) = (v for v in model.graph.initializers.values() if v.name == name)
        assert value.shape == ir.Shape(array.shape)
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), array)


@pytest.mark.parametrize("form", ["primitive", "ort-mha", "ort-attention"])
def test_weights_that_are_inputs_come_last(form: str) -> None:
    spec = _spec(
        projections=ProjectionSpec(d_model=24, q_bias=True, packing="packed"),
        mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO),
    )
    model = _model(form, spec, weights="none")
    names = [value.name for value in model.graph.inputs]
    assert names == ["hidden_states", "key_padding", *weight_shapes(spec)]
    for value in model.graph.inputs[2:]:
        assert value.shape == ir.Shape(weight_shapes(spec)[str(value.name)])
