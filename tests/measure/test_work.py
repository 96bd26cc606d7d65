"""Counting the work of a model, and the evaluator it is counted on."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_export.measure import ordinary_inputs, work_of


def test_products_are_counted(plain_encoder: ir.Model) -> None:
    case = ordinary_inputs(plain_encoder, dims={"batch": 2, "seq": 6})
    work = work_of(plain_encoder, case.inputs)
    assert work is not None
    tokens, width, layers = 12, 8, 2
    projections = 4 * 2 * tokens * width * width
    attention = 2 * 2 * tokens * 6 * width
    assert work.flops == layers * (projections + attention)
    assert work.nbytes > sum(array.nbytes for array in case.inputs.values())


def test_a_contrib_op_has_no_known_work() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.node("FastGelu", [x], domain="com.microsoft")
    node.outputs[0].name = "y"
    opsets = {"": 17, "com.microsoft": 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports=opsets, name="g")
    assert work_of(ir.Model(graph, ir_version=9), {"x": np.zeros(2, np.float32)}) is None
