"""Softmax whose division comes last: ``(e V) / sum(e)`` is written ``(e / sum(e)) V``.

A row of ``e V`` is divided by the sum of the same row of ``e``, so the division may come first:
then it is a softmax like any other. However the sum and the product are written (a contraction with
ones, einsum, a power of -1, other layouts between), that is told by looking: what the division
gives must be what its numerator gives where ``e / sum(e)`` stands in place of ``e``. Where
something is added to the sum, that is a sink (:mod:`._added_sums`). Done in the recogniser's copy,
where the division is met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from mha_export.recognise._adapt import Deriver, ints
from mha_export.recognise._added_sums import Addition, addition, is_lost, with_column
from mha_export.recognise._scene import Scene

_PRODUCTS = frozenset({"Einsum", "MatMul"})
_MOVES = frozenset({"Cast", "Dropout", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SUMS = frozenset({"Einsum", "MatMul", "ReduceL1", "ReduceMean", "ReduceSum"})
_ELEMENTWISE = frozenset({"Add", "Clip", "Div", "Expand", "Max", "Mul", "Pow", "Reciprocal"})
_FAR = 8
"""How many nodes may lie between a division and the exponentials."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Quotient:
    """Exponentials divided by what is made of them.

    Attributes:
        node: the division. whole: its numerator. powers: the exponentials. total: the denominator.
        product: what multiplies the exponentials on the way to the numerator, if anything does.
        sums: what contracts the exponentials on the way to the denominator.
    """

    node: ir.Node
    whole: ir.Value
    total: ir.Value
    powers: ir.Value
    product: ir.Node | None
    sums: ir.Node


def divide_first(model: ir.Model, scenes: Sequence[Scene]) -> None:
    """Move every division that comes after ``e V`` before it, its sum written as a ReduceSum.

    Or, where a sink is added to the sum, as a softmax over one more column.
    """
    if not any(node.op_type == "Exp" for node in model.graph.all_nodes()):
        return
    moved = [_moved(node, scenes) for node in list(model.graph.all_nodes())]
    if any(moved):
        passes.RemoveUnusedNodesPass()(model)


def quotient(node: ir.Node) -> Quotient | None:
    """The division of exponentials by a sum of them that ``node`` is, maybe after a product."""
    for whole, total in _quotients(node):
        found = _exponentials(whole)
        if found is None:
            continue
        powers, product = found
        sums = _contraction(total, powers)
        if sums is not None and sums is not product:
            return Quotient(
                node=node, whole=whole, total=total, powers=powers, product=product, sums=sums
            )
    return None


def _moved(node: ir.Node, scenes: Sequence[Scene]) -> bool:
    """Whether ``node`` was such a division; its old nodes stay behind, unread."""
    found = quotient(node)
    if found is None or node.graph is None or found.powers.producer() is None:
        return False
    added = addition(found.total, found.sums, scenes[0])
    alone = found.product is None and found.whole is not found.powers
    if found.product is None and (alone or (added is None and _is_plain(found))):
        return False
    if found.product is not None and not _goes_on_alone(found.product, found.whole):
        return False
    rank = len(scenes[0].dims(found.powers) or ())
    axis = next((a for a in reversed(range(rank)) if _is_softmax(found, a, added, scenes)), None)
    if axis is None:
        return False
    place = found.node if found.product is None else found.product
    if added is None or is_lost(found.powers, axis, added, scenes[0]):
        ahead: ir.Value | None = _divided(found.powers, axis, place, scenes)
    else:
        ahead = with_column(found.powers, axis, added, place, scenes)
    if ahead is None:
        return False
    _rewire(found, ahead, scenes)
    return True


def _is_plain(found: Quotient) -> bool:
    return found.sums.op_type == "ReduceSum" and found.node.op_type == "Div"


def _is_softmax(
    found: Quotient, axis: int, added: Addition | None, scenes: Sequence[Scene]
) -> bool:
    """Whether the division gives what the numerator makes of normalised exponentials."""
    random = np.random.default_rng(41)
    for scene in scenes:
        given: dict[ir.Value, np.ndarray] = {}
        asked = [found.powers, *(found.product.inputs if found.product else ())]
        for value in asked:
            dims = None if value is None else scene.dims(value)
            if value is None or dims is None:
                return False
            if value is found.powers or _passed(value) is not found.powers:
                given[value] = random.uniform(0.5, 2.0, dims)
        powers = given[found.powers]
        total = powers.sum(axis=axis, keepdims=True)
        if added is not None:
            more = _drawn(added, total.shape, random, scene)
            if more is None:
                return False
            given |= more
            total = total + (added.number if added.number is not None else more[added.value])
        normal = powers / total
        looks = [
            scene.context.sized(scene.shapes.sizes, contents, wide=True).array(value)
            for contents, value in (
                (given, found.node.outputs[0]),
                ({**given, found.powers: normal}, found.whole),
            )
        ]
        if looks[0] is None or looks[1] is None or looks[0].shape != looks[1].shape:
            return False
        if not np.allclose(looks[0], looks[1], rtol=1e-6, atol=0):
            return False
    return True


def _drawn(
    added: Addition, shape: tuple[int, ...], random: np.random.Generator, scene: Scene
) -> dict[ir.Value, np.ndarray] | None:
    """Numbers for what is added; None where it does not go with a sum of ``shape``."""
    dims = scene.dims(added.value)
    if added.number is not None:
        return {}
    if dims is None or len(dims) > len(shape):
        return None
    if any(n not in (1, whole) for n, whole in zip(dims[::-1], shape[::-1], strict=False)):
        return None
    return {added.value: random.uniform(0.5, 2.0, dims)}


def _divided(powers: ir.Value, axis: int, place: ir.Node, scenes: Sequence[Scene]) -> ir.Value:
    """The exponentials divided by their sum, before ``place``."""
    derive = Deriver(scenes, place)
    if scenes[0].context.opset >= 13:
        total = derive("ReduceSum", [powers, ints(axis)], {"keepdims": 1})
    else:
        total = derive("ReduceSum", [powers], {"axes": (axis,), "keepdims": 1})
    ahead = derive("Div", [powers, total])
    for made in (total, ahead):
        if powers.dtype is not None:
            made.dtype = powers.dtype
    return ahead


def _rewire(found: Quotient, ahead: ir.Value, scenes: Sequence[Scene]) -> None:
    """Let ``ahead`` stand in place of the exponentials, and nothing divide any more."""
    result = ahead
    if found.product is not None:
        derive = Deriver(scenes, found.product)
        for index, value in enumerate(found.product.inputs):
            if value is None or _passed(value) is not found.powers:
                continue
            kind, stands = scenes[0].dtype(value), ahead
            if kind is not None and kind != scenes[0].dtype(ahead):
                stands = derive("Cast", [ahead], {"to": int(kind)})
                stands.dtype = kind
            found.product.replace_input_with(index, stands)
        result = found.whole
    old = found.node.outputs[0]
    for user, index in list(old.uses()):
        user.replace_input_with(index, result)
    if old.is_graph_output() and found.node.graph is not None:
        _stand_in(found.node.graph, old, result)


def _stand_in(graph: ir.Graph | ir.Function, old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape, name = old.type, old.shape, old.name
    old.name, new.name = f"{name}.undivided", name
    for place, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[place] = new


def _quotients(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """(numerator, what it is divided by): a Div, or a Mul with an inverse."""
    if node.op_type not in ("Div", "Mul") or len(node.inputs) != 2 or None in node.inputs:
        return
    left, right = node.inputs
    assert left is not None
    assert right is not None
    if node.op_type == "Div":
        yield left, right
        return
    for whole, other in ((left, right), (right, left)):
        maker = _passed(other).producer()
        if maker is not None and maker.op_type in ("Reciprocal", "Pow") and maker.inputs[0]:
            yield whole, other


def _exponentials(whole: ir.Value) -> tuple[ir.Value, ir.Node | None] | None:
    """The exponentials that the numerator is made of, and the product with values between."""
    product: ir.Node | None = None
    pending = [whole]
    for _ in range(_FAR):
        if not pending:
            return None
        value = pending.pop()
        node = value.producer()
        if node is None:
            continue
        if node.op_type == "Exp":
            return value, product
        if node.op_type in _MOVES and node.inputs[0] is not None:
            pending.append(node.inputs[0])
        elif node.op_type in _PRODUCTS and product is None:
            made = [v for v in node.inputs if v is not None]
            powers = [v for v in made if (m := _passed(v).producer()) and m.op_type == "Exp"]
            if len(powers) == 1:
                product = node
                pending.append(powers[0])
    return None


def _contraction(total: ir.Value, powers: ir.Value) -> ir.Node | None:
    """The contraction of the exponentials that the denominator is made of."""
    pending, seen = [total], 0
    while pending and seen < 2 * _FAR:
        value = pending.pop()
        seen += 1
        node = value.producer()
        if node is None:
            continue
        if node.op_type in _SUMS and any(
            v is not None and _passed(v) is powers for v in node.inputs
        ):
            return node
        if node.op_type in _MOVES:
            pending += [v for v in node.inputs[:1] if v is not None]
        elif node.op_type in _ELEMENTWISE:
            pending += [v for v in node.inputs if v is not None]
    return None


def _goes_on_alone(product: ir.Node, whole: ir.Value) -> bool:
    """Whether the product goes to the numerator and nowhere else."""
    value = product.outputs[0]
    for _ in range(_FAR):
        users = [user for user, _ in value.uses() if user.op_type not in ("Shape", "Size")]
        if len(users) != 1 or value.is_graph_output():
            return False
        if value is whole:
            return True
        if users[0].op_type not in _MOVES:
            return False
        value = users[0].outputs[0]
    return False


def _passed(value: ir.Value) -> ir.Value:
    """The value itself, casts and copies taken off."""
    while True:
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Dropout", "Identity"):
            return value
        if node.inputs[0] is None:
            return value
        value = node.inputs[0]
