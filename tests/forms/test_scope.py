"""What a form writes with: names, omitted inputs and outputs, constants that are shared."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.forms import Scope

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def _value(name: str) -> ir.Value:
    return ir.Value(name=name)


@pytest.mark.parametrize(
    ("prefix", "first"), [("", "Add_0"), ("layer.0.self", "layer.0.self.Add_0")]
)
def test_names_count_up_by_op(prefix: str, first: str) -> None:
    scope = Scope(prefix, opset=18)
    x = _value("x")
    made = [scope.op(op_type, [x, x]) for op_type in ("Add", "Add", "Mul", "Add")]
    assert made[0].name == first
    assert [str(value.name).removeprefix(prefix + ".") for value in made] == [
        "Add_0", "Add_1", "Mul_0", "Add_2",
    ]  # fmt: skip
    assert [node.name for node in scope.nodes] == [value.name for value in made]
    assert all(value.producer() is node for value, node in zip(made, scope.nodes, strict=True))


def test_types_and_shapes_are_kept_where_they_are_told() -> None:
    scope = Scope("", opset=18)
    told = scope.op("Add", [_value("x")], dtype=FLOAT, shape=[1, "s", None])
    assert told.dtype is FLOAT
    assert told.shape == ir.Shape([1, "s", None])
    scalar = scope.op("Squeeze", [_value("x")], dtype=INT64, shape=[])
    assert scalar.shape == ir.Shape([])
    open_ = scope.op("Add", [_value("x")])
    assert open_.dtype is None
    assert open_.shape is None


def test_several_outputs_are_numbered_and_an_omitted_one_has_no_name() -> None:
    scope = Scope("", opset=18)
    made = scope.op_multi("Split", [_value("x")], outputs=[(FLOAT, None), None, (INT64, [2])])
    assert [value.name for value in made] == ["Split_0", "", "Split_0:2"]
    assert [value.dtype for value in made] == [FLOAT, None, INT64]
    assert [*scope.nodes[0].outputs] == made


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["x", None], ["x"]),
        (["x", None, None], ["x"]),
        (["x", None, "y", None], ["x", None, "y"]),
        ([None, "x"], [None, "x"]),
        ([None], []),
        ([], []),
    ],
)
def test_inputs_that_are_omitted_at_the_end_are_left_out(
    given: list[str | None], kept: list[str | None]
) -> None:
    scope = Scope("", opset=18)
    scope.op("Op", [None if name is None else _value(name) for name in given])
    found = [None if value is None else value.name for value in scope.nodes[0].inputs]
    assert found == kept


def test_attributes_and_domain() -> None:
    scope = Scope("", opset=18)
    scope.op("Op", [], {"axis": -1, "alpha": 0.5, "perm": [1, 0]}, domain="com.microsoft")
    (node,) = scope.nodes
    assert node.domain == "com.microsoft"
    assert node.attributes["axis"].as_int() == -1
    assert node.attributes["alpha"].as_float() == 0.5
    assert [*node.attributes["perm"].as_ints()] == [1, 0]


def test_equal_constants_are_one_initializer() -> None:
    scope = Scope("", opset=18)
    ones = scope.constant(np.array([1, 1], np.int64), hint="ints")
    again = scope.constant(np.array([1, 1], np.int64), hint="ints")
    assert again is ones
    assert ones.const_value is not None
    assert ones.shape == ir.Shape([2])
    assert ones.dtype is INT64
    assert ones.name == "ints_0"
    assert scope.initializers == [ones]


@pytest.mark.parametrize(
    "other",
    [
        np.array([1, 2], np.int64),
        np.array([1, 1], np.int32),
        np.array([[1, 1]], np.int64),
        np.array([1.0, 1.0]),
    ],
    ids=["numbers", "type", "shape", "float"],
)
def test_other_constants_are_others(other: np.ndarray) -> None:
    scope = Scope("", opset=18)
    ones = scope.constant(np.array([1, 1], np.int64), hint="ints")
    value = scope.constant(other, hint="ints")
    assert value is not ones
    assert value.name == "ints_1"
    np.testing.assert_array_equal(value.const_value.numpy(), other)
    assert scope.initializers == [ones, value]
