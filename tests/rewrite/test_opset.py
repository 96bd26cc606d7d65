"""Raising the opset: same numbers, same names, or a refusal that names the node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.rewrite import with_opset


def _one_node(
    op: str,
    shapes: list[list[int]],
    attributes: dict[str, Any],
    opset: int,
    *,
    outputs: int = 1,
    rank: bool = True,
) -> ir.Model:
    inputs = [
        ir.Value(
            name=f"x{i}",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(shape if rank else [None] * len(shape)),
        )
        for i, shape in enumerate(shapes)
    ]
    node = ir.node(op, inputs, attributes=attributes, num_outputs=outputs, name="the_node")
    for index, value in enumerate(node.outputs):
        value.name = f"y{index}"
        value.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs, list(node.outputs), nodes=[node], opset_imports={"": opset}, name="one"
    )
    return ir.Model(graph, ir_version=8)


CHANGED: dict[str, tuple[str, list[list[int]], dict[str, Any], int, int]] = {
    "reduce over axes": ("ReduceMean", [[2, 3, 4]], {"axes": [1], "keepdims": 0}, 17, 1),
    "reduce over all": ("ReduceMax", [[2, 3, 4]], {}, 17, 1),
    "sum over axes": ("ReduceSum", [[2, 3, 4]], {"axes": [-1]}, 12, 1),
    "squeeze": ("Squeeze", [[2, 1, 4]], {"axes": [1]}, 12, 1),
    "unsqueeze": ("Unsqueeze", [[2, 4]], {"axes": [0, 3]}, 12, 1),
    "split by sizes": ("Split", [[2, 6]], {"split": [2, 4], "axis": 1}, 12, 2),
    "split evenly": ("Split", [[2, 6]], {"axis": 1}, 17, 3),
    "softmax over the last": ("Softmax", [[2, 3, 4]], {"axis": 2}, 12, 1),
    "softmax without axis": ("Softmax", [[2, 3, 4]], {}, 12, 1),
    "softmax over the first": ("LogSoftmax", [[2, 3, 4]], {"axis": 0}, 12, 1),
    "grid sample": ("GridSample", [[1, 1, 3, 3], [1, 2, 2, 2]], {"mode": "bilinear"}, 17, 1),
    "erf": ("Erf", [[2, 3]], {}, 13, 1),
}


@pytest.mark.parametrize("opset", [18, 23, 25])
@pytest.mark.parametrize("name", CHANGED)
def test_what_changed_meaning_is_adapted(name: str, opset: int, evaluator: Evaluator) -> None:
    op, shapes, attributes, start, outputs = CHANGED[name]
    model = _one_node(op, shapes, attributes, start, outputs=outputs)
    raised = with_opset(model, opset)
    assert raised.graph.opset_imports[""] == opset
    assert model.graph.opset_imports[""] == start
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    old, new = evaluator.run(model, feeds), evaluator.run(raised, feeds)
    assert list(old) == list(new)
    for key, expected in old.items():
        np.testing.assert_array_equal(new[key], expected)


def test_an_old_softmax_of_unknown_rank_is_flattened_as_it_was(evaluator: Evaluator) -> None:
    model = _one_node("Softmax", [[2, 3, 4]], {"axis": 1}, 11, rank=False)
    raised = with_opset(model, 23)
    assert [node.op_type for node in raised.graph] == ["Flatten", "Shape", "Softmax", "Reshape"]
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    old, new = evaluator.run(model, {"x0": x}), evaluator.run(raised, {"x0": x})
    np.testing.assert_array_equal(new["y0"], old["y0"])


@pytest.mark.parametrize(
    ("model", "opset", "message"),
    [
        (_one_node("Erf", [[2]], {}, 18), 17, "cannot be lowered to 17"),
        (_one_node("Erf", [[2]], {}, 9), 18, "not a known step"),
        (_one_node("Erf", [[2]], {}, 18), 99, "not a known step"),
        (
            _one_node("GroupNormalization", [[1, 4, 2], [2], [2]], {"num_groups": 2}, 18),
            21,
            r"the_node \(GroupNormalization\).*deprecated",
        ),
        (_one_node("Fancy", [[2]], {}, 18), 23, r"the_node \(Fancy\).*no such operator"),
    ],
    ids=["lower", "too old", "too new", "deprecated", "unknown"],
)
def test_what_cannot_be_carried_over_is_refused_by_name(
    model: ir.Model, opset: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        with_opset(model, opset)


def test_bodies_and_functions_are_raised_too(evaluator: Evaluator) -> None:
    """A reduction inside a branch, and one inside a model-local function."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
    flag = ir.Value(name="flag", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))

    def reduction(name: str, op: str, value: ir.Value) -> ir.Node:
        node = ir.node(op, [value], attributes={"axes": [1], "keepdims": 1}, name=name)
        node.outputs[0].name = f"{name}_out"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        return node

    bodies = []
    for op in ("ReduceMax", "ReduceMin"):
        node = reduction(f"b{op}", op, x)
        bodies.append(ir.Graph([], [node.outputs[0]], nodes=[node], name=op))
    branch = ir.node(
        "If", [flag], attributes={"then_branch": bodies[0], "else_branch": bodies[1]}, name="if"
    )
    branch.outputs[0].name = "picked"
    inner = ir.Value(name="inner")
    node = reduction("f", "ReduceMean", inner)
    function = ir.Function(
        "own",
        "Mean",
        "",
        graph=ir.Graph([inner], [node.outputs[0]], nodes=[node], opset_imports={"": 17}),
        attributes=[],
    )
    call = ir.Node("own", "Mean", [branch.outputs[0]], name="call")
    call.outputs[0].name = "y"
    call.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    call.outputs[0].shape = ir.Shape([2, 1])
    graph = ir.Graph(
        [x, flag],
        [call.outputs[0]],
        nodes=[branch, call],
        opset_imports={"": 17, "own": 1},
        name="g",
    )
    model = ir.Model(graph, ir_version=8, functions=[function])
    raised = with_opset(model, 23)
    onnx.checker.check_model(ir.to_proto(raised))
    assert raised.functions[function.identifier()].opset_imports[""] == 23
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    for value in (True, False):
        feeds["flag"] = np.array(value)
        np.testing.assert_array_equal(
            evaluator.run(raised, feeds)["y"], evaluator.run(model, feeds)["y"]
        )


def test_names_metadata_and_data_stay() -> None:
    model = _one_node("ReduceMean", [[2, 3]], {"axes": [1]}, 17)
    model.metadata_props["a"] = "b"
    node = model.graph.node(0)
    node.metadata_props["c"] = "d"
    node.doc_string = "e"
    raised = with_opset(model, 23)
    assert raised.metadata_props == {"a": "b"}
    same = raised.graph.node("the_node")
    assert (same.name, same.metadata_props, same.doc_string) == ("the_node", {"c": "d"}, "e")
    assert raised.ir_version == 11
