"""Operands of single heads as operands of all of them.

Head projections of one input are one product with the weights side by side; a bias, a mask and a
sink of each head are joined along the heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from mha_export.recognise._adapt import Deriver, ints
from mha_export.recognise._other import is_matrix
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site

BY_HEAD = ("keep", "bias", "sinks")
"""Operands that may be another for each head."""


def is_same(left: object, right: object, scenes: Sequence[Scene]) -> bool:
    """Whether two operands are one value, or values computed alike."""
    if left is right or (left == right and not isinstance(left, ir.Value)):
        return True
    if isinstance(left, ir.Value) and isinstance(right, ir.Value):
        sizes = [scene.shapes.sizes for scene in scenes]
        context = scenes[0].context
        return context.signature(left, sizes) == context.signature(right, sizes)
    if left is None or type(left) is not type(right) or not dataclasses.is_dataclass(left):
        return False
    return all(
        is_same(getattr(left, field.name), getattr(right, field.name), scenes)
        for field in dataclasses.fields(left)
    )


def stackable(name: str, first: Site, other: Site, scenes: Sequence[Scene]) -> bool:
    """Whether the operands ``name`` of two heads can be joined along the heads."""
    values = [getattr(site.operands, name) for site in (first, other)]
    if None in values or values[0].dtype != values[1].dtype:
        return False
    if name == "sinks":
        return True
    shapes = [[scene.dims(value) for scene in scenes] for value in values]
    return (
        shapes[0] == shapes[1]
        and all(dims is not None and len(dims) > 1 for dims in shapes[0])
        and all(dims is not None and (len(dims) == 2 or dims[-3] == 1) for dims in shapes[0])
    )


def together(
    name: str, group: Sequence[Site], scenes: Sequence[Scene], derive: Deriver
) -> ir.Value | None:
    """The operand ``name`` of all heads: the first's, or all of them joined along the heads."""
    values: list[ir.Value] = [getattr(site.operands, name) for site in group]
    if all(is_same(values[0], value, scenes) for value in values):
        return values[0]
    if name == "sinks":
        return derive("Concat", values, {"axis": 0})
    rank = len(scenes[0].dims(values[0]) or ())
    if rank == 2:
        values = [_led(value, derive) for value in values]
    return derive("Concat", values, {"axis": max(rank, 3) - 3})


def _led(value: ir.Value, derive: Deriver) -> ir.Value:
    """With an axis of one in front."""
    if derive.scenes[0].context.opset >= 13:
        return derive("Unsqueeze", [value, ints(0)])
    return derive("Unsqueeze", [value], {"axes": [0]})


def projected(values: Sequence[ir.Value], scenes: Sequence[Scene]) -> ir.Value | None:
    """All projections of one input as one, which the heads are cut from; None where there is none.

    The graph goes on with the pieces: whatever read a projection reads its piece.
    """
    whole = _whole(values, scenes)
    if whole is None:
        return None
    node = whole.producer()
    assert node is not None
    assert node.graph is not None
    mark = ir.Node("", "Identity", [whole], name=f"{node.name}.mark")
    node.graph.insert_after(node, mark)
    derive, start = Deriver(scenes, mark), 0
    for value in values:
        dims = scenes[0].dims(value)
        assert dims is not None
        bounds = [ints(n) for n in (start, start + dims[-1], len(dims) - 1)]
        piece = derive("Slice", [whole, *bounds])
        piece.type, piece.shape = value.type, value.shape
        start += dims[-1]
        for user, place in list(value.uses()):
            user.replace_input_with(place, piece)
    node.graph.remove(mark, safe=True)
    return whole


def _whole(values: Sequence[ir.Value], scenes: Sequence[Scene]) -> ir.Value | None:
    if any(value.is_graph_output() for value in values):
        return None
    makers = [value.producer() for value in values]
    biases: list[ir.Value] = []
    if all(node is not None and node.op_type == "Add" for node in makers):
        parts = [_biased(node, scenes[0]) for node in makers if node is not None]
        found = [part for part in parts if part is not None]
        if len(found) != len(parts):
            return None
        biases = [bias for _, bias in found]
        makers = [inner.producer() for inner, _ in found]
    weights: list[ir.Value] = []
    source: ir.Value | None = None
    for node in makers:
        if node is None or node.op_type != "MatMul" or node.inputs[1] is None:
            return None
        if source is not None and node.inputs[0] is not source:
            return None
        source = node.inputs[0]
        if not is_matrix(scenes[0].views.source(node.inputs[1])):
            return None
        weights.append(node.inputs[1])
    first = values[0].producer()
    if source is None or first is None:
        return None
    derive = Deriver(scenes, first)
    value = derive("MatMul", [source, derive("Concat", weights, {"axis": 1})])
    return derive("Add", [value, derive("Concat", biases, {"axis": 0})]) if biases else value


def _biased(node: ir.Node, scene: Scene) -> tuple[ir.Value, ir.Value] | None:
    """(what a stored vector is added to, the vector)."""
    left, right = node.inputs
    for inner, bias in ((left, right), (right, left)):
        if inner is None or bias is None:
            continue
        dims = scene.dims(bias)
        if dims is not None and len(dims) == 1 and is_matrix(scene.views.source(bias)):
            return inner, bias
    return None
