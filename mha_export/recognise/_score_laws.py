"""One law per op that may stand between Q Kᵀ and softmax: what it does to the normal form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import onnx_ir as ir

from mha_export.recognise._axes import View, composed, identity
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_blend import blended
from mha_export.recognise._score_steps import Scores, Sink, State, Term, Weighting, refused
from mha_export.recognise._site import Reason

LOWEST = -1e30
"""A number at or below this stands for a dtype's minimum."""

Step = State | Scores | Reason
Walk = Callable[[State, Scene], Scores | Reason]
Law = Callable[[State, ir.Node, Scene, Walk], Step]


def _below(state: State, value: ir.Value | None, scene: Scene) -> View | None:
    """The space's axes seen from ``value``, which broadcasts to the current level."""
    dims = scene.dims(state.value)
    if value is None or dims is None:
        return None
    spread = scene.spread(value, dims)
    return None if spread is None else composed(state.outer, spread)


def _through(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    inner = node.inputs[0]
    outer = _below(state, inner, scene)
    if inner is None or outer is None:
        return refused(state, "shape-unknown", f"sizes are unknown at {node.op_type}", node)
    return state.at(inner, outer, node)


def _cast(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    inner = node.inputs[0]
    dtype = None if inner is None else scene.dtype(inner)
    if dtype is not None and not dtype.is_floating_point():
        return refused(state, "scores-not-a-product", f"the scores are cast from {dtype}", node)
    return _through(state, node, scene, walk)


def _negate(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    return _through(dataclasses.replace(state, factor=-state.factor), node, scene, walk)


def _sum(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Add, Sub: one side leads to the product, the other is a term."""
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) == 1:
        return _through(state, node, scene, walk)
    if len(inputs) != 2:
        return refused(state, "scores-not-affine", "more than two summands in one node", node)
    first, second = inputs
    if node.op_type == "Sub" and _is_row_maximum(second, state, scene):
        return _through(state.shifted(), node, scene, walk)
    for inner, other in ((first, second), (second, first)):
        if scene.uniform(other) == 0.0:
            outer = _below(state, inner, scene)
            if outer is not None:
                return state.at(inner, outer, node)
        if node.op_type == "Sub":
            break
    failures: list[Reason] = []
    for scores, term, sign in _sides(first, second, node, state, scene):
        found = _with_term(state, node, (scores, term, sign), scene, walk)
        if isinstance(found, Scores):
            return found
        failures.append(found)
    return failures[0]


def _sides(
    first: ir.Value, second: ir.Value, node: ir.Node, state: State, scene: Scene
) -> list[tuple[ir.Value, ir.Value, float]]:
    """The ways to read a sum, the likelier first: the scores have the full shape."""
    if node.op_type == "Sub":
        return [(first, second, -1.0)]
    sides = [(first, second, 1.0), (second, first, 1.0)]
    full = scene.dims(state.value)
    return sorted(
        sides,
        key=lambda side: (
            scene.dims(side[0]) != full,
            scene.shapes.content(side[0]) is not None,
            scene.views.source(side[0]).producer() is None,
        ),
    )


def _with_term(
    state: State,
    node: ir.Node,
    side: tuple[ir.Value, ir.Value, float],
    scene: Scene,
    walk: Walk,
) -> Scores | Reason:
    """The sum read as scores and a term, followed to its end."""
    scores, term, sign = side
    outer, view = _below(state, scores, scene), _below(state, term, scene)
    if outer is None or view is None:
        return refused(state, "shape-unknown", f"sizes are unknown at {node.op_type}", node)
    if state.softcap is not None:
        return refused(
            state, "mask-inside-softcap", "a mask or bias is added before the softcap", node
        )
    if state.weightings:
        return refused(
            state,
            "weighted-bias",
            "scores with a bias are multiplied by more than one number",
            node,
        )
    made = Term(
        value=term,
        kind="additive",
        view=view,
        level=scores,
        level_view=outer,
        node=node,
        factor=sign * state.factor,
    )
    return walk(state.at(scores, outer, node, terms=(*state.terms, made)), scene)


def _is_row_maximum(value: ir.Value, state: State, scene: Scene) -> bool:
    """A maximum over the softmax axis: softmax does not change when it is taken off."""
    if state.sink is not None:
        return False
    view = _below(state, value, scene)
    if view is None or any(stride for _, stride in view.axes[state.axis]):
        return False
    node = scene.views.source(value).producer()
    return node is not None and node.op_type == "ReduceMax"


def _scaled(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Mul, Div by one number; Mul by tanh's cap; or a weighting that is folded into Q or K."""
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != 2:
        return refused(state, "scores-not-affine", "Mul with other than two operands", node)
    inverse = node.op_type == "Div"
    for inner, other in ((inputs[0], inputs[1]), (inputs[1], inputs[0])):
        number = scene.uniform(other)
        if number is not None and number != 0.0:
            outer = _below(state, inner, scene)
            if outer is None:
                break
            factor = state.factor / number if inverse else state.factor * number
            return state.at(inner, outer, node, factor=factor)
        if inverse:
            break
    return _weighted(state, node, inputs, scene)


def _weighted(
    state: State, node: ir.Node, inputs: list[ir.Value], scene: Scene
) -> State | Scores | Reason:
    full = scene.dims(state.value)
    order = [(inputs[0], inputs[1])]
    if node.op_type == "Mul":
        order.append((inputs[1], inputs[0]))
    for inner, other in order:
        if scene.dims(inner) != full:
            continue
        outer, view = _below(state, inner, scene), _below(state, other, scene)
        if outer is None or view is None:
            continue
        if any(stride for _, stride in view.axes[state.axis]):
            continue
        made = Weighting(
            value=other,
            view=view,
            level=inner,
            level_view=outer,
            inverse=node.op_type == "Div",
            node=node,
        )
        return state.at(inner, outer, node, weightings=(*state.weightings, made))
    return blended(state, node, scene) or refused(
        state,
        "scores-not-affine",
        f"{node.op_type} multiplies the scores by something that varies over the keys",
        node,
    )


def _capped(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """``c tanh(x)``: whatever stands before the tanh is ``scale / c``."""
    if state.softcap is not None or state.weightings:
        return refused(state, "scores-not-affine", "tanh of the scores more than once", node)
    cap = abs(state.factor)
    sign = 1.0 if state.factor > 0 else -1.0
    capped = dataclasses.replace(state, softcap=cap, factor=sign * cap)
    return _through(capped, node, scene, walk)


def _chosen(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Where: one branch is a constant fill, the other the scores."""
    condition, yes, no = node.inputs
    branches: tuple[tuple[ir.Value | None, ir.Value | None, Literal["keep", "hide"]], ...]
    branches = ((yes, no, "keep"), (no, yes, "hide"))
    for inner, other, kind in branches:
        fill = scene.uniform(other)
        if fill is None or inner is None or condition is None:
            continue
        outer, view = _below(state, inner, scene), _below(state, condition, scene)
        if outer is None or view is None:
            return refused(state, "shape-unknown", "sizes are unknown at Where", node)
        if state.softcap is not None:
            return refused(state, "mask-inside-softcap", "scores are masked before softcap", node)
        made = Term(
            value=condition,
            kind=kind,
            view=view,
            level=inner,
            level_view=outer,
            node=node,
            fill=fill * state.factor,
        )
        return state.at(inner, outer, node, terms=(*state.terms, made))
    return refused(state, "scores-not-affine", "Where chooses between two computed values", node)


def _clamped(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Max with a dtype's minimum keeps sums of two minima finite: no score is changed by it.

    What it makes of a row without keys is remembered as a step of the mask.
    """
    inner, low, high = _bounds(node, scene)
    outer = _below(state, inner, scene)
    number = scene.uniform(low)
    above = scene.uniform(high)
    harmless = (low is None or (number is not None and number <= LOWEST)) and (
        high is None or (above is not None and above >= -LOWEST)
    )
    if not harmless or inner is None or outer is None:
        return refused(state, "scores-clamped", "the scores are clamped to a finite range", node)
    if low is None or state.softcap is not None or number == -math.inf:
        return state.at(inner, outer, node)
    view = _below(state, low, scene)
    if view is None:
        return refused(state, "shape-unknown", f"sizes are unknown at {node.op_type}", node)
    made = Term(
        value=low,
        kind="floor",
        view=view,
        level=inner,
        level_view=outer,
        node=node,
        fill=number,
    )
    return state.at(inner, outer, node, terms=(*state.terms, made))


def _bounds(
    node: ir.Node, scene: Scene
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """(what is clamped, lower, upper); nothing is clamped where two values are computed."""
    if node.op_type == "Max":
        numbers = [scene.uniform(value) for value in node.inputs]
        inner = [value for value, n in zip(node.inputs, numbers, strict=True) if n is None]
        known = [value for value, n in zip(node.inputs, numbers, strict=True) if n is not None]
        single = len(inner) == len(known) == 1
        return (inner[0], known[0], None) if single else (None, None, None)
    if "min" in node.attributes or "max" in node.attributes:
        return None, None, None
    low, high = (node.inputs[place] if len(node.inputs) > place else None for place in (1, 2))
    return node.inputs[0], low, high


def _joined(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Concat of one column along the softmax axis: an attention sink."""
    dims = scene.dims(state.value)
    place = attributes_of(node).get("axis", 0)
    if dims is None or state.sink is not None or len(node.inputs) != 2:
        return refused(state, "scores-joined", "the scores are joined from several parts", node)
    place %= len(dims)
    if state.outer != identity(state.value, dims) or place != state.axis or state.terms:
        return refused(state, "scores-joined", "the scores are joined along another axis", node)
    for index, first in ((1, False), (0, True)):
        column, scores = node.inputs[index], node.inputs[1 - index]
        if column is None or scores is None:
            continue
        sizes, inner = scene.dims(column), scene.dims(scores)
        if sizes is None or inner is None or sizes[place] != 1 or inner[place] == 1:
            continue
        sink = Sink(value=column, view=identity(column, sizes), first=first, node=node)
        return dataclasses.replace(
            state,
            value=scores,
            outer=identity(scores, inner),
            space=inner,
            sink=sink,
            steps=(),
            start=scores,
            levels=(),
        ).noted()
    return refused(state, "scores-joined", "more than one column joins the scores", node)


def _rounded(state: State, node: ir.Node, scene: Scene, walk: Walk) -> Step:
    """Integers on the way: a fused attention would not round."""
    return refused(
        state,
        "scores-quantised",
        f"the scores are rounded to integers ({node.op_type}), which no fused attention does: "
        "leave the two products of each attention out when quantising",
        node,
    )


LAWS: dict[str, Law] = {
    "Add": _sum,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clamped,
    "Concat": _joined,
    "DequantizeLinear": _rounded,
    "Div": _scaled,
    "MatMulInteger": _rounded,
    "MatMulIntegerToFloat": _rounded,
    "Max": _clamped,
    "Mul": _scaled,
    "Neg": _negate,
    "QLinearMatMul": _rounded,
    "Sub": _sum,
    "Sum": _sum,
    "Tanh": _capped,
    "Where": _chosen,
}
