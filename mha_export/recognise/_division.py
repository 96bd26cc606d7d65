"""Softmax whose division comes last: ``(e V) / sum(e)`` is written ``(e / sum(e)) V``.

A row of ``e V`` is divided by the sum of the same row of ``e``, so the division may come first:
then it is a softmax like any other. Done in the recogniser's copy, where the division is met.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

from mha_export.recognise._scene import Scene

_PASSED = frozenset({"Cast", "Identity", "Dropout"})


def divide_first(model: ir.Model, scenes: Sequence[Scene]) -> None:
    """Move every division that comes after ``e V`` before it."""
    moved = [_moved(node, scenes) for node in list(model.graph.all_nodes())]
    if any(moved):
        passes.RemoveUnusedNodesPass()(model)


def _moved(node: ir.Node, scenes: Sequence[Scene]) -> bool:
    """Whether ``node`` was such a division; its old nodes stay behind, unread."""
    parts, graph = _postponed(node, scenes[0]), node.graph
    if parts is None or graph is None:
        return False
    product, powers, total, values = parts
    ahead = ir.Node("", "Div", [powers, total], name=f"{node.name}.first")
    again = ir.Node("", "MatMul", [ahead.outputs[0], values], name=f"{product.name}.last")
    for made, like in ((ahead, powers), (again, node.outputs[0])):
        made.outputs[0].name = f"{made.name}:0"
        made.outputs[0].type, made.outputs[0].shape = like.type, like.shape
        graph.insert_before(node, made)
    for user, place in list(node.outputs[0].uses()):
        user.replace_input_with(place, again.outputs[0])
    if node.outputs[0].is_graph_output():
        _stand_in(graph, node.outputs[0], again.outputs[0])
    for scene in scenes:
        scene.shapes.learn(ahead)
        scene.shapes.learn(again)
    return True


def _stand_in(graph: ir.Graph | ir.Function, old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape, name = old.type, old.shape, old.name
    old.name, new.name = f"{name}.undivided", name
    for place, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[place] = new


def _postponed(node: ir.Node, scene: Scene) -> tuple[ir.Node, ir.Value, ir.Value, ir.Value] | None:
    """(product, e, sum, V) of ``(e V) / sum(e)``, or of the same with a reciprocal."""
    if node.op_type not in ("Div", "Mul") or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    pairs = [(left, right)]
    if node.op_type == "Mul":
        pairs = [(a, inner) for a, b in ((left, right), (right, left)) if (inner := _inverted(b))]
    for whole, total in pairs:
        product = None if whole is None else _passed(whole).producer()
        summing = None if total is None else _passed(total).producer()
        if product is None or product.op_type != "MatMul" or summing is None:
            continue
        powers, values = product.inputs
        if (
            powers is None
            or values is None
            or total is None
            or not _sums_rows(summing, powers, scene)
        ):
            continue
        maker = _passed(powers).producer()
        if maker is not None and maker.op_type == "Exp":
            return product, powers, total, values
    return None


def _inverted(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Reciprocal" else None


def _passed(value: ir.Value) -> ir.Value:
    """The value itself, casts and copies taken off."""
    while True:
        node = value.producer()
        if node is None or node.op_type not in _PASSED or node.inputs[0] is None:
            return value
        value = node.inputs[0]


def _sums_rows(node: ir.Node, powers: ir.Value, scene: Scene) -> bool:
    """Whether ``node`` sums ``powers`` over its last axis and keeps that axis."""
    source = node.inputs[0] if node.inputs else None
    if node.op_type != "ReduceSum" or source is None or _passed(source) is not _passed(powers):
        return False
    axes = node.attributes.get_ints("axes", None)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is not None:
        stored = ir.convenience.get_const_tensor(given)
        axes = None if stored is None else [int(n) for n in stored.numpy().reshape(-1)]
    if axes is None or len(axes) != 1 or not node.attributes.get_int("keepdims", 1):
        return False
    dims = scene.dims(powers)
    return axes[0] == -1 or (dims is not None and axes[0] == len(dims) - 1)
