"""Quantised weights as numbers: what ONNX Runtime computes with them, and what is left alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from runtimes import OrtSession

from mha_export.forms import FormParams, build_model, form_named
from mha_export.measure._plain_weights import with_plain_weights
from mha_export.measure.model_inputs import ordinary_inputs
from mha_export.measure.reference_run import ModelReference
from mha_export.rewrite import WEIGHT_KINDS, with_quantised_weights
from mha_export.spec import AttentionSpec, ProjectionSpec


def _model(width: int = 80) -> ir.Model:
    """Of 80 rows the last block of 32 is half empty."""
    spec = AttentionSpec(
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        batch=1,
        q_len="s",
        kv_len="s",
        projections=ProjectionSpec(d_model=width, q_bias=True),
    )
    return build_model(form_named("primitive"), spec, FormParams(opset=21))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_they_are_the_numbers_that_the_runtime_computes_with(name: str) -> None:
    model = with_quantised_weights(_model(), name)
    plain = with_plain_weights(model)
    assert not {"MatMulNBits", "DequantizeLinear"} & {node.op_type for node in plain.graph}
    x = {"hidden_states": np.random.default_rng(0).standard_normal((1, 5, 80)).astype(np.float32)}
    np.testing.assert_allclose(
        OrtSession(plain).run(x)["output"], OrtSession(model).run(x)["output"], rtol=0, atol=1e-5
    )
    assert {"MatMulNBits", "DequantizeLinear"} & {node.op_type for node in model.graph}


def test_both_ways_to_write_four_bits_say_the_same_numbers() -> None:
    """ONNX Runtime itself would round the activations beside a DequantizeLinear, to 8 bits."""
    found = [
        {
            value.const_value.numpy().tobytes()
            for node in with_plain_weights(with_quantised_weights(_model(), name)).graph
            if node.op_type == "MatMul"
            for value in node.inputs
            if value is not None and value.const_value is not None
        }
        for name in ("int4", "int4-qdq")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_model_without_them_is_itself() -> None:
    model = _model()
    assert with_plain_weights(model) is model


def test_weights_that_are_computed_stay() -> None:
    model = with_quantised_weights(_model(), "int8")
    node = next(node for node in model.graph if node.op_type == "MatMulNBits")
    scales = node.inputs[2]
    assert scales is not None
    same = ir.node("Identity", [scales])
    model.graph.insert_before(node, [same])
    node.replace_input_with(2, same.outputs[0])
    assert sum(n.op_type == "MatMulNBits" for n in with_plain_weights(model).graph) == 1


@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_a_quantised_model_has_an_exact_answer(name: str) -> None:
    model = with_quantised_weights(_model(), name)
    reference = ModelReference(model)
    expected = reference.expected(ordinary_inputs(model, dims={"s": 5}))
    assert expected.problem is None
    assert reference.against == "original in float64 (reference)"
    assert expected.outputs["output"].exact.dtype == np.float64
