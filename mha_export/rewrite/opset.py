"""Raising a model to a later opset, in place of node names, functions, data and metadata.

Most operators only gain element types and optional attributes from one opset to the next, so most
nodes stay as they are. A node is let through when the schema of the new opset reads it as the old
one did: no attribute or input it has is gone, no default it relies on has changed. The operators
whose meaning did change are adapted one by one below, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.recognise._collection import collection_paused
from mha_export.rewrite._clone import subgraphs_of

OLDEST = 11
NEWEST = 25

_IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
"""Least IR version that may carry an opset (onnx's own release table)."""

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")


def model_opset(model: ir.Model) -> int:
    """Version of the default domain; 1 where the model imports none."""
    return int(model.graph.opset_imports.get("", 1))


@collection_paused()
def with_opset(model: ir.Model, opset: int) -> ir.Model:
    """A copy of ``model`` whose default domain is at ``opset``, computing the same.

    Errors:
        InputError: ``opset`` is below the model's, unknown, or an operator cannot be carried over.
    """
    copy = model.clone()
    raise_opset(copy, opset)
    return copy


def raise_opset(model: ir.Model, opset: int) -> None:
    """:func:`with_opset` in place: nodes and values that need no change stay the same objects.

    Errors:
        InputError: as for :func:`with_opset`; the model is then partly converted.
    """
    current = model_opset(model)
    if opset == current:
        return
    if opset < current:
        raise InputError(
            f"the model is at opset {current}; it cannot be lowered to {opset}",
            fix=f"ask for opset {current} or more, or export the model again at {opset}",
        )
    if opset > NEWEST or current < OLDEST:
        raise InputError(
            f"opset {current} to {opset} is not a known step; expected {OLDEST} to {NEWEST}",
            fix="export the model again at a later opset"
            if current < OLDEST
            else f"ask for opset {NEWEST} or less",
        )
    _raise_graph(model.graph, current, opset)
    model.graph.opset_imports[""] = opset
    for function in model.functions.values():
        own = function.opset_imports.get("")
        if own is not None and own < opset:
            _raise_graph(function, int(own), opset)
            function.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, _IR_VERSIONS.get(opset, 7))


def _raise_graph(graph: ir.Graph | ir.Function, current: int, opset: int) -> None:
    for node in tuple(graph):
        for body in subgraphs_of(node):
            _raise_graph(body, current, opset)
        if node.domain == "":
            _raise_node(node, current, opset)


def _raise_node(node: ir.Node, current: int, opset: int) -> None:
    old = _schema(node.op_type, current, node)
    new = _schema(node.op_type, opset, node)
    if old.since_version == new.since_version:
        return
    for changed_at, adapt in _ADAPTERS.get(node.op_type, ()):
        if current < changed_at <= opset:
            adapt(node)
    _check(node, old, new, current, opset)


def _schema(op_type: str, opset: int, node: ir.Node) -> onnx.defs.OpSchema:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        raise _refusal(node, f"opset {opset} has no such operator") from None
    if schema.deprecated:
        raise _refusal(node, f"it is deprecated at opset {opset}")
    return schema


def _refusal(node: ir.Node, why: str) -> InputError:
    return InputError(
        f"node {node.name} ({node.op_type}) cannot be carried to the wanted opset: {why}",
        fix="export the model at that opset, or choose a form that needs no later one",
    )


def _check(
    node: ir.Node,
    old: onnx.defs.OpSchema,
    new: onnx.defs.OpSchema,
    current: int,
    opset: int,
) -> None:
    """Refuse a node that the new schema would read otherwise."""
    for name in node.attributes:
        if name not in new.attributes:
            raise _refusal(node, f"attribute {name} is gone at opset {opset}")
    if not new.min_input <= len(node.inputs) <= new.max_input:
        raise _refusal(node, f"{len(node.inputs)} inputs, expected {new.min_input} or more")
    if len(node.outputs) > new.max_output:
        raise _refusal(node, f"{len(node.outputs)} outputs, at most {new.max_output} are left")
    for name, attribute in new.attributes.items():
        before = old.attributes.get(name)
        if name in node.attributes or before is None:
            continue
        if _default(before) != _default(attribute):
            raise _refusal(node, f"the default of {name} changed after opset {current}")


def _default(attribute: onnx.defs.OpSchema.Attribute) -> bytes:
    return bytes(attribute.default_value.SerializeToString())


# Adapters: each takes a node valid before the change and leaves it valid after.


def _axes_to_input(node: ir.Node) -> None:
    """Reductions, Squeeze, Unsqueeze: ``axes`` became the second input."""
    axes = node.attributes.pop("axes", None)
    if axes is not None:
        _append_input(node, 1, np.array(axes.as_ints(), np.int64), "axes")


def _split_to_input(node: ir.Node) -> None:
    split = node.attributes.pop("split", None)
    if split is not None:
        _append_input(node, 1, np.array(split.as_ints(), np.int64), "split")


def _state_num_outputs(node: ir.Node) -> None:
    """Split-18: equal parts must be counted in an attribute."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _ratio_to_input(node: ir.Node) -> None:
    """Dropout-12: the ratio became an input. It plays no part at inference."""
    node.attributes.pop("ratio", None)


def _axis_to_input(node: ir.Node) -> None:
    """DFT-20: the axis became the third input, and counts from the end by default."""
    axis = node.attributes.pop("axis", None)
    number = 1 if axis is None else axis.as_int()
    if len(node.inputs) < 2:
        node.resize_inputs(2)
    _append_input(node, 2, np.array(number, np.int64), "axis")


def _rename_grid_mode(node: ir.Node) -> None:
    """GridSample-20: bilinear and bicubic are called linear and cubic."""
    mode = node.attributes.get("mode")
    names = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
    text = "bilinear" if mode is None else mode.as_string()
    node.attributes["mode"] = ir.AttrString("mode", names.get(text, text))


def _state_roi_mode(node: ir.Node) -> None:
    """RoiAlign-16: what was the only behaviour is no longer the default."""
    if "coordinate_transformation_mode" not in node.attributes:
        node.attributes["coordinate_transformation_mode"] = ir.AttrString(
            "coordinate_transformation_mode", "output_half_pixel"
        )


def _refuse_group_norm(node: ir.Node) -> None:
    raise _refusal(node, "its scale and bias are per group before opset 21 and per channel after")


def _last_axis_only(node: ir.Node) -> None:
    """Softmax and its kin before opset 13 flatten all axes from ``axis`` on into one."""
    value = node.inputs[0]
    rank = None if value is None or value.shape is None else len(value.shape)
    attribute = node.attributes.get("axis")
    axis = 1 if attribute is None else attribute.as_int()
    if axis == -1 or (rank is not None and axis == rank - 1):
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        return
    if value is None or node.graph is None:
        raise _refusal(node, "it has no input")
    _around_flattened(node, value, axis)


def _around_flattened(node: ir.Node, value: ir.Value, axis: int) -> None:
    """``Reshape(op(Flatten(x, axis), -1), Shape(x))``: the old meaning in new words."""
    graph = node.graph
    assert graph is not None
    name = node.name or node.op_type
    flat = ir.node("Flatten", [value], attributes={"axis": axis}, name=f"{name}.flat")
    shape = ir.node("Shape", [value], name=f"{name}.shape")
    result = node.outputs[0]
    back = ir.node("Reshape", [result, shape.outputs[0]], name=f"{name}.back")
    for made, stem in ((flat, "flat"), (shape, "shape"), (back, "back")):
        made.outputs[0].name = f"{name}.{stem}_out"
    back.outputs[0].type, back.outputs[0].shape = result.type, result.shape
    is_output, old_name = result.is_graph_output(), result.name
    uses = [(user, index) for user, index in result.uses() if user is not back]
    node.replace_input_with(0, flat.outputs[0])
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    for user, index in uses:
        user.replace_input_with(index, back.outputs[0])
    result.shape = None
    if is_output:
        result.name, back.outputs[0].name = f"{name}.inner_out", old_name
        for index, output in enumerate(graph.outputs):
            if output is result:
                graph.outputs[index] = back.outputs[0]
    graph.insert_before(node, [flat, shape])
    graph.insert_after(node, back)


def _append_input(node: ir.Node, index: int, array: np.ndarray, stem: str) -> None:
    """Bind a new constant to input ``index`` (a node: functions hold no initializers)."""
    graph = node.graph
    assert graph is not None
    name = f"{node.name or node.outputs[0].name}.{stem}"
    tensor = ir.tensor(array, name=name)
    constant = ir.node("Constant", [], attributes={"value": tensor}, name=name)
    value = constant.outputs[0]
    value.name = name
    value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
    graph.insert_before(node, constant)
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


Adapter = Callable[[ir.Node], None]


_ADAPTERS: dict[str, tuple[tuple[int, Adapter], ...]] = {
    **{f"Reduce{kind}": ((18, _axes_to_input),) for kind in _REDUCTIONS},
    "ReduceSum": ((13, _axes_to_input),),
    "Squeeze": ((13, _axes_to_input),),
    "Unsqueeze": ((13, _axes_to_input),),
    "Split": ((13, _split_to_input), (18, _state_num_outputs)),
    "Softmax": ((13, _last_axis_only),),
    "LogSoftmax": ((13, _last_axis_only),),
    "Hardmax": ((13, _last_axis_only),),
    "Dropout": ((12, _ratio_to_input),),
    "DFT": ((20, _axis_to_input),),
    "GridSample": ((20, _rename_grid_mode),),
    "RoiAlign": ((16, _state_roi_mode),),
    "GroupNormalization": ((21, _refuse_group_norm),),
}
