"""Casting a model: what changes type, what stays wide, what is kept in range."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.rewrite import with_dtype
from mha_export.spec import DType

FLOAT, HALF, INT64, BOOL = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.INT64,
    ir.DataType.BOOL,
)


class Builder:
    """A graph written node by node."""

    def __init__(self, opset: int = 18) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="g")

    def input(self, name: str, shape: list[int | str], dtype: ir.DataType = FLOAT) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def weight(self, name: str, array: Any, dtype: Any = np.float32) -> ir.Value:
        data = np.asarray(array, dtype)
        tensor = ir.tensor(data, name=name)
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(data.shape),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def op(self, op: str, *inputs: ir.Value, name: str, **attributes: Any) -> ir.Value:
        node = ir.node(op, list(inputs), attributes=attributes or None, name=name)
        node.outputs[0].name = f"{name}_out"
        self.graph.append(node)
        return node.outputs[0]

    def model(self, output: ir.Value, rank: int = 2) -> ir.Model:
        output.name = "y"
        output.type = ir.TensorType(FLOAT)
        output.shape = ir.Shape([None] * rank)
        self.graph.outputs.append(output)
        return ir.Model(self.graph, ir_version=10)


def _types(model: ir.Model) -> dict[str, ir.DataType | None]:
    return {node.name or "": node.outputs[0].dtype for node in model.graph}


def _ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_weights_inputs_and_outputs_change(evaluator: Evaluator) -> None:
    build = Builder()
    x = build.input("x", ["b", 4])
    rng = np.random.default_rng(0)
    w = build.weight("w", rng.standard_normal((4, 3)))
    model = build.model(build.op("MatMul", x, w, name="mm"))
    half = with_dtype(model, DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    assert [v.dtype for v in (*half.graph.inputs, *half.graph.outputs)] == [HALF, HALF]
    assert [v.dtype for v in half.graph.initializers.values()] == [HALF]
    assert [v.dtype for v in (*model.graph.inputs, *model.graph.outputs)] == [FLOAT, FLOAT]
    feed = rng.standard_normal((2, 4)).astype(np.float32)
    new = evaluator.run(half, {"x": feed.astype(np.float16)})["y"]
    assert new.dtype == np.float16
    np.testing.assert_allclose(new, evaluator.run(model, {"x": feed})["y"], atol=5e-3)


def test_a_mask_of_the_minimum_stays_finite(evaluator: Evaluator) -> None:
    """A fully masked row is a mean in fp32; with -inf for the minimum it would be NaN."""
    build = Builder()
    scores = build.input("scores", ["b", "s"])
    keep = build.input("keep", ["b", "s"], BOOL)
    zero = build.weight("zero", 0.0)
    low = build.weight("low", np.finfo(np.float32).min)
    mask = build.op("Where", keep, zero, low, name="mask")
    masked = build.op("Add", scores, mask, name="masked")
    model = build.model(build.op("Softmax", masked, name="p", axis=-1))
    half = with_dtype(model, DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    feeds = {
        "scores": np.zeros((2, 4), np.float16),
        "keep": np.array([[True, True, False, False], [False] * 4]),
    }
    expected = np.array([[0.5, 0.5, 0, 0], [0.25] * 4])
    np.testing.assert_allclose(evaluator.run(half, feeds)["y"], expected, atol=1e-3)


def test_positions_stay_fp32_until_they_meet_an_activation(evaluator: Evaluator) -> None:
    build = Builder()
    x = build.input("x", ["b", "s", 2])
    positions = build.input("positions", ["b", "s"], INT64)
    as_float = build.op("Cast", positions, name="float", to=int(FLOAT))
    frequency = build.weight("frequency", 1.0)
    angle = build.op("Mul", as_float, frequency, name="angle")
    cos = build.op("Cos", angle, name="cos")
    table = build.op("Unsqueeze", cos, build.weight("axis", [2], np.int64), name="table")
    model = build.model(build.op("Mul", x, table, name="rotated"), rank=3)
    half = with_dtype(model, DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    types = _types(half)
    assert {types[name] for name in ("float", "angle", "cos", "table")} == {FLOAT}
    assert types["rotated"] == HALF
    feeds = {"x": np.ones((1, 2, 2), np.float16), "positions": np.array([[3001, 3003]])}
    found = evaluator.run(half, feeds)["y"][0, :, 0]
    np.testing.assert_allclose(found, np.cos([3001.0, 3003.0]), atol=1e-3)


def test_a_spelled_out_norm_does_not_overflow(evaluator: Evaluator) -> None:
    """300 squared is infinite in fp16, and an epsilon of 1e-12 is zero."""
    build = Builder()
    x = build.input("x", ["b", 4])
    square = build.op("Pow", x, build.weight("two", 2.0), name="square")
    axis = build.weight("axis", [-1], np.int64)
    mean = build.op("ReduceMean", square, axis, name="mean", keepdims=1)
    shifted = build.op("Add", mean, build.weight("epsilon", 1e-12), name="shifted")
    root = build.op("Sqrt", shifted, name="root")
    model = build.model(build.op("Div", x, root, name="normed"))
    half = with_dtype(model, DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    types = _types(half)
    assert {types[name] for name in ("square", "mean", "shifted", "root")} == {FLOAT}
    assert types["normed"] == HALF
    feeds = {"x": np.array([[300, -300, 300, 300], [0, 0, 0, 0]], np.float16)}
    np.testing.assert_allclose(
        evaluator.run(half, feeds)["y"], [[1, -1, 1, 1], [0, 0, 0, 0]], atol=1e-3
    )


def test_an_operator_without_the_type_is_put_between_casts() -> None:
    build = Builder()
    x = build.input("x", [1, 1, 4, 4])
    sizes = build.weight("scales", [1.0, 1.0, 2.0, 2.0])
    roi = build.weight("roi", [])
    resized = build.op("Resize", x, roi, sizes, name="resize", mode="nearest")
    dynamic = ir.node("DynamicQuantizeLinear", [resized], num_outputs=3, name="quantise")
    for value, stem in zip(dynamic.outputs, ("q", "scale", "zero"), strict=True):
        value.name = stem
    build.graph.append(dynamic)
    back = build.op("DequantizeLinear", *dynamic.outputs, name="back")
    half = with_dtype(build.model(back, rank=4), DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    quantise = half.graph.node("quantise")
    assert quantise.inputs[0] is not None
    assert quantise.inputs[0].dtype == FLOAT
    scales = half.graph.node("resize").inputs[2]
    assert scales is not None
    assert scales.dtype == FLOAT


def test_fp16_to_fp32_is_the_way_back(evaluator: Evaluator) -> None:
    build = Builder()
    x = build.input("x", ["b", 4])
    w = build.weight("w", np.random.default_rng(0).standard_normal((4, 3)))
    model = build.model(build.op("MatMul", x, w, name="mm"))
    back = with_dtype(with_dtype(model, DType.FP16), DType.FP32)
    assert _ops(back) == ["MatMul"]
    feed = {"x": np.ones((1, 4), np.float32)}
    np.testing.assert_allclose(
        evaluator.run(back, feed)["y"], evaluator.run(model, feed)["y"], atol=5e-3
    )


def test_bf16_weights_are_rounded_to_bf16() -> None:
    build = Builder()
    x = build.input("x", ["b", 1])
    w = build.weight("w", [[1.0 + 2.0**-9]])
    brain = with_dtype(build.model(build.op("MatMul", x, w, name="mm")), DType.BF16)
    (weight,) = brain.graph.initializers.values()
    assert weight.dtype == ir.DataType.BFLOAT16
    assert weight.const_value is not None
    assert float(weight.const_value.numpy()[0, 0]) == 1.0


def test_an_embedding_is_an_activation_and_an_integer_is_not(evaluator: Evaluator) -> None:
    build = Builder()
    ids = build.input("ids", ["b", "s"], INT64)
    table = build.weight("table", np.random.default_rng(0).standard_normal((5, 4)))
    looked = build.op("Gather", table, ids, name="embed")
    half = with_dtype(build.model(looked, rank=3), DType.FP16)
    assert half.graph.inputs[0].dtype == INT64
    assert _types(half) == {"embed": HALF}


def test_doubles_are_no_target() -> None:
    build = Builder()
    x = build.input("x", ["b", 1])
    with pytest.raises(InputError, match="cannot be cast to fp64"):
        with_dtype(build.model(build.op("Neg", x, name="n")), DType.FP64)


def test_what_adds_the_minimum_to_scores_stays_fp32() -> None:
    """And its mask keeps fp32's minimum: fp16's absorbs no score. Lengths are no activations."""
    build = Builder()
    scores = build.input("scores", ["b", "s"])
    zero = build.weight("zero", 0.0)
    low = build.weight("low", np.finfo(np.float32).min)
    size = build.op("Shape", scores, name="size")
    keep = build.op("Cast", size, name="keep", to=int(BOOL))
    mask = build.op("Where", keep, zero, low, name="mask")
    masked = build.op("Add", scores, mask, name="masked")
    weights = build.op("Softmax", masked, name="p", axis=-1)
    model = build.model(build.op("Neg", weights, name="n"))
    half = with_dtype(model, DType.FP16)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    types = _types(half)
    assert {types[name] for name in ("mask", "masked", "p")} == {FLOAT}
    assert types["n"] == HALF
    minimum = half.graph.node("mask").inputs[2]
    assert minimum is not None
    assert minimum.const_value is not None
    assert minimum.const_value.numpy() == np.finfo(np.float32).min
