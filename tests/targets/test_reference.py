"""Where onnx's evaluator is wrong and this target is not, and what stays off the terminal."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.targets import evaluator_of
from mha_export.targets._evaluator import EvaluationError


@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 6), 1), ((1, 6), 0), ((2, 5), 1), ((2, 1, 4), -1)], ids=str
)
def test_gather_elements_is_right(shape: tuple[int, ...], axis: int) -> None:
    stream = np.random.default_rng(0)
    data = stream.standard_normal(shape).astype(np.float32)
    size = shape[axis]
    indices = stream.integers(-size, size, size=shape)
    values = [
        ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape(shape))
        for n, t in (("data", ir.DataType.FLOAT), ("indices", ir.DataType.INT64))
    ]
    node = ir.node("GatherElements", values, {"axis": axis})
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 17}, name="g")
    got = evaluator_of("reference").run(
        ir.Model(graph, ir_version=9), {"data": data, "indices": indices}
    )["y"]
    assert np.array_equal(got, np.take_along_axis(data, indices % size, axis=axis))


def test_a_refused_run_is_an_exception_and_no_line_on_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxruntime", reason="its log is what must stay quiet")
    names = {"x": ["a", "b"], "y": ["c", "d"]}
    inputs = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for n, shape in names.items()
    ]
    node = ir.node("MatMul", inputs)
    node.outputs[0].name, node.outputs[0].type = "z", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 17}, name="g")
    arrays = {"x": np.ones((2, 3), np.float32), "y": np.ones((4, 3), np.float32)}
    with pytest.raises(EvaluationError, match="MatMul"):
        evaluator_of("cpu").run(ir.Model(graph, ir_version=9), arrays)
    assert capfd.readouterr().err == ""
