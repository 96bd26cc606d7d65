"""A model with every floating-point number in float64: what it computes without rounding."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

_TYPE_ATTRIBUTES = frozenset(("to", "dtype", "softmax_precision", "output_dtype"))
"""Attributes that hold a data type."""

_HALF_OPEN = frozenset(
    ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul")
)
"""Ops whose rounding is what they are for: a float64 model must keep it, and cannot."""


def with_float64(model: ir.Model) -> ir.Model:
    """A copy of ``model`` in float64: weights, constants, casts, inputs and outputs.

    Functions are inlined first. A Cast between floating-point types becomes a Cast to float64, so
    what the original rounds on purpose (a softmax in fp32 of an fp16 model) is exact here. What is
    made an integer (the bucket of a relative position) keeps its own precision up to there: a step
    function of an exact number would be another model.

    Errors:
        ValueError: the model quantises, or reads an op of a domain other than ai.onnx.
    """
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    if any(value.dtype is None for node in copy.graph for value in node.outputs):
        ShapeInferencePass()(copy)  # older exporters state no types between inputs and outputs
    narrow = _before_integers(copy)
    for graph in (copy.graph, *copy.graph.subgraphs()):
        for value in graph.initializers.values():
            _widen_constant(value)
        for node in graph:
            if node.op_type in _HALF_OPEN:
                raise ValueError(f"{node.op_type} '{node.name}' rounds on purpose")
            if node.domain not in ("", "ai.onnx"):
                raise ValueError(f"{node.domain}.{node.op_type} '{node.name}' is not a standard op")
            if node not in narrow:
                _widen_attributes(node)
                for value in node.outputs:
                    _widen_type(value)
        for value in (*graph.inputs, *graph.outputs):
            _widen_type(value)
    for node in narrow:
        _fence(node, narrow)
    return copy


def _before_integers(model: ir.Model) -> dict[ir.Node, None]:
    """Nodes whose floating-point results end in a Cast to an integer, in the main graph."""
    found: dict[ir.Node, None] = {}
    queue = [node.inputs[0] for node in model.graph if _to_integer(node)]
    while queue:
        value = queue.pop()
        node = None if value is None else value.producer()
        if value is None or node is None or node in found or node.graph is not model.graph:
            continue
        if value.dtype is not None and not value.dtype.is_floating_point():
            continue
        if value.dtype is None or any(output.dtype is None for output in node.outputs):
            continue  # of unknown type: nothing to fence with
        found[node] = None
        queue += node.inputs
    return found


def _fence(node: ir.Node, narrow: dict[ir.Node, None]) -> None:
    """Casts where float64 values enter a narrow node, and where its results leave."""
    own = node.outputs[0].dtype
    assert own is not None
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype is not ir.DataType.DOUBLE:
            continue
        entry = _cast(value, own)
        node.prepend(entry)
        node.replace_input_with(index, entry.outputs[0])
    for value in node.outputs:
        outside = [(user, i) for user, i in value.uses() if user not in narrow]
        outside = [(user, i) for user, i in outside if not _to_integer(user)]
        if outside:
            leave = _cast(value, ir.DataType.DOUBLE)
            node.append(leave)
            for user, index in outside:
                user.replace_input_with(index, leave.outputs[0])


def _to_integer(node: ir.Node) -> bool:
    return node.op_type == "Cast" and not _names_float(node.attributes["to"])


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(to)})
    node.outputs[0].name = f"{value.name}.{to.name.lower()}"
    node.outputs[0].type = ir.TensorType(to)
    return node


def _widen_type(value: ir.Value) -> None:
    if value.dtype is not None and value.dtype.is_floating_point():
        value.type = ir.TensorType(ir.DataType.DOUBLE)


def _widen_constant(value: ir.Value) -> None:
    tensor = value.const_value
    if tensor is not None and tensor.dtype.is_floating_point():
        value.const_value = _wide(tensor)
    _widen_type(value)


def _names_float(attribute: ir.Attr) -> bool:
    is_int = attribute.type is ir.AttributeType.INT
    return is_int and ir.DataType(attribute.as_int()).is_floating_point()


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float64), name=tensor.name)


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR:
            tensor = attribute.value
            if tensor.dtype.is_floating_point():
                node.attributes[name] = ir.AttrTensor(name, _wide(tensor))
        elif name in _TYPE_ATTRIBUTES and _names_float(attribute):
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
    for name in ("value_float", "value_floats"):
        if name not in node.attributes:
            continue
        array = np.asarray(node.attributes.pop(name).value, dtype=np.float64)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        zero = ir.tensor(np.zeros(1, dtype=np.float64))
        node.attributes["value"] = ir.AttrTensor("value", zero)
