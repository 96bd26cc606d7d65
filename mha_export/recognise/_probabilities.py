"""From softmax down to P·V: guards, casts and reshapes passed, every other use noted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mha_export.recognise._axes import (
    Axis,
    View,
    coalesced,
    composed,
    identity,
    row_major,
    split_by_axis,
)
from mha_export.recognise._movement import RENAMING, moved_inputs
from mha_export.recognise._product import Product, product_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Scores
from mha_export.recognise._site import Reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """A place where probabilities (or a value on their way) go that is not P·V."""

    value: ir.Value
    node: ir.Node | None
    """None: a graph output."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replacement:
    """``number`` in place of the probabilities where ``condition`` is ``where``."""

    condition: ir.Value
    where: bool
    number: float
    node: ir.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted:
    """P·V and what lies between softmax and it.

    Attributes:
        product: left is P, right is V.
        onto: the axes of the score space as a view of P.
        value: V as a view over the axes of the score space followed by its own (e).
        output: the product's output as a view of itself over the same axes.
        zeroed: a guard puts zero in place of NaN.
        replaced: a number put in place of some probabilities after softmax.
        others: other uses of the probabilities. nodes: from softmax to the product.
    """

    product: Product
    onto: View
    value: View
    output: View
    zeroed: bool
    replaced: Replacement | None
    others: tuple[Use, ...]
    nodes: tuple[ir.Node, ...]
    path: tuple[ir.Value, ...]
    """The probabilities as they go from softmax to P."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Path:
    value: ir.Value
    values: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...] = ()
    zeroed: bool = False
    replaced: Replacement | None = None

    def to(self, value: ir.Value, *nodes: ir.Node, **changes: Any) -> _Path:
        """One step further down."""
        return dataclasses.replace(
            self,
            value=value,
            values=(*self.values, value),
            nodes=(*self.nodes, *nodes),
            **changes,
        )


def read_weighted(
    probabilities: ir.Value, scores: Scores, scene: Scene
) -> Weighted | tuple[Use, ...] | Reason:
    """P·V below ``probabilities``; its uses when there is no product at all."""
    ends: list[tuple[_Path, ir.Node]] = []
    others: list[Use] = []
    pending = [_Path(value=probabilities, values=(probabilities,))]
    while pending:
        path = pending.pop()
        if path.value.is_graph_output():
            others.append(Use(value=path.value, node=None))
        for node in dict.fromkeys(user for user, _ in path.value.uses()):
            following = _next(path, node, scene)
            if node.op_type in ("Shape", "Size"):
                continue
            if following is not None:
                pending.extend(following)
            elif _is_product(node, scene):
                ends.append((path, node))
            else:
                others.append(Use(value=path.value, node=node))
    if not ends:
        changed = _quantised(others) or _scaled(others, scene) or _combined(others, scene)
        if changed is not None:
            return changed
    failure: Reason | None = None
    for place, (path, node) in enumerate(ends):
        rest = [Use(value=p.value, node=n) for i, (p, n) in enumerate(ends) if i != place]
        found = _weighted(path, node, probabilities, scores, scene, (*others, *rest))
        if isinstance(found, Weighted):
            return found
        failure = failure or found
    return failure if failure is not None else tuple(others)


def _quantised(others: list[Use]) -> Reason | None:
    """Probabilities that are rounded to integers before they weigh values."""
    for use in others:
        node = use.node
        if node is not None and node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
            return Reason(
                code="weights-quantised",
                message=f"the attention weights {use.value.name!r} are rounded to integers by "
                f"{node.name!r} before they weigh the values, which no fused attention does: leave "
                "the two products of each attention out when quantising",
                value=use.value.name,
                nodes=(node.name or node.op_type,),
            )
    return None


def _scaled(others: list[Use], scene: Scene) -> Reason | None:
    """Probabilities that are multiplied before they weigh values."""
    for use in others:
        node = use.node
        if node is None or node.op_type not in ("Mul", "Div"):
            continue
        if any(_is_product(user, scene) for user, _ in node.outputs[0].uses()):
            return Reason(
                code="probabilities-scaled",
                message=f"the attention weights {use.value.name!r} are multiplied before they "
                "weigh the values: they no longer add up to one",
                value=use.value.name,
                nodes=(node.name or node.op_type,),
            )
    return None


_COMBINING = {"Add": "added to", "Div": "divided", "Mul": "multiplied", "Sub": "subtracted"}
_FURTHEST = 6
"""Steps that are looked for between softmax and P·V."""


def _combined(others: list[Use], scene: Scene) -> Reason | None:
    """Probabilities that are one part of what weighs the values."""
    for use in others:
        pending: list[tuple[ir.Node, ...]] = [] if use.node is None else [(use.node,)]
        while pending:
            way = pending.pop()
            node = way[-1]
            if _is_product(node, scene):
                steps = [step for step in way[:-1] if step.op_type in _COMBINING]
                verbs = dict.fromkeys(_COMBINING[step.op_type] for step in steps)
                return Reason(
                    code="probabilities-combined",
                    message=f"the attention weights {use.value.name!r} are "
                    f"{', '.join(verbs)} (by {steps[-1].name!r}) before {node.name!r} weighs the "
                    "values with the result: a fused attention weighs with softmax alone",
                    value=use.value.name,
                    nodes=tuple(step.name or step.op_type for step in way),
                )
            moves = bool(moved_inputs(node.outputs[0])) and len(way) > 1
            if len(way) < _FURTHEST and (node.op_type in _COMBINING or moves):
                pending += [(*way, user) for user, _ in node.outputs[0].uses()]
    return None


def _is_product(node: ir.Node, scene: Scene) -> bool:
    return product_of(node.outputs[0], scene.views) is not None


def _next(path: _Path, node: ir.Node, scene: Scene) -> list[_Path] | None:
    """Where the probabilities go on after ``node``; None when it uses them otherwise."""
    output = node.outputs[0]
    if node.op_type in RENAMING or node.op_type == "Cast":
        dtype = scene.dtype(output)
        if node.op_type == "Cast" and dtype is not None and not dtype.is_floating_point():
            return None
        return [path.to(output, node)]
    if path.value in moved_inputs(output) and node.op_type != "Concat":
        return [path.to(value, node) for value in node.outputs]
    if node.op_type == "IsNaN":
        guards = [user for user, _ in output.uses()]
        if guards and all(_guarded(output, path.value, user, scene) for user in guards):
            return []
        return None
    if node.op_type == "Where":
        return _after_where(path, node, scene)
    return None


def _guarded(condition: ir.Value, probabilities: ir.Value, node: ir.Node, scene: Scene) -> bool:
    """``Where(IsNaN(p), 0, p)``."""
    return (
        node.op_type == "Where"
        and node.inputs[0] is condition
        and node.inputs[2] is probabilities
        and scene.uniform(node.inputs[1]) == 0.0
    )


def _after_where(path: _Path, node: ir.Node, scene: Scene) -> list[_Path] | None:
    condition, yes, no = node.inputs
    where = no is path.value
    number = scene.number(yes if where else no)
    if condition is None or number is None or (yes if not where else no) is not path.value:
        return None
    maker = condition.producer()
    if maker is not None and maker.op_type == "IsNaN" and maker.inputs[0] is path.value:
        guards = where and number == 0.0
        return [path.to(node.outputs[0], node, maker, zeroed=True)] if guards else None
    if path.replaced is not None or scene.dims(node.outputs[0]) != scene.dims(path.value):
        return None
    step = Replacement(condition=condition, where=where, number=number, node=node)
    return [path.to(node.outputs[0], node, replaced=step)]


def _weighted(
    path: _Path,
    node: ir.Node,
    probabilities: ir.Value,
    scores: Scores,
    scene: Scene,
    others: tuple[Use, ...],
) -> Weighted | Reason:
    product = product_of(node.outputs[0], scene.views)
    assert product is not None
    if product.left.value is not path.value:
        product = product.swapped()
    names = tuple(n.name or n.op_type for n in (*path.nodes, node))

    def refused(code: str, message: str) -> Reason:
        return Reason(code=code, message=message, value=path.value.name, nodes=names)

    if product.left.value is not path.value:
        return refused("shape-unknown", "the operands of P·V could not be told apart")
    if product.right.value is path.value:
        return refused("probabilities-squared", "the probabilities are multiplied by themselves")
    onto = _onto(path, probabilities, scores, scene)
    if onto is None:
        return refused(
            "probabilities-rearranged",
            "between softmax and P·V the probabilities are cut or rearranged so that axes mix",
        )
    return _along(product, onto, path, scores, others, refused)


def _onto(path: _Path, probabilities: ir.Value, scores: Scores, scene: Scene) -> View | None:
    """The space's axes as a view of the path's end, a rearrangement of the probabilities."""
    value = path.value
    seen = _seen_from(path, probabilities, scene)
    dims = scene.dims(probabilities)
    own = scene.dims(value)
    if seen is None or dims is None or own is None:
        return None
    pieces = split_by_axis(seen, dims)
    if pieces is None:
        return None
    start = _start(seen.offset, dims)
    expected = [0] * len(dims)
    if scores.sink is not None and scores.sink.first:
        expected[scores.axis] = 1
    if start != expected:
        return None
    parts: list[list[tuple[int, int, int]]] = [[] for _ in dims]
    stride = 1
    for axis in reversed(pieces):
        for size, place, step in reversed(axis):
            if place < 0:
                return None
            parts[place].append((step, size, stride))
            stride *= size
    axes: list[Axis] = []
    for place, size in enumerate(scores.space):
        ordered = sorted(parts[place], reverse=True)
        reach = 1
        for step, count, _ in reversed(ordered):
            if step != reach:
                return None
            reach *= count
        if reach != size:
            return None
        axes.append(coalesced([(count, stride) for _, count, stride in ordered]))
    return View(value, 0, tuple(axes))


def _seen_from(path: _Path, probabilities: ir.Value, scene: Scene) -> View | None:
    """The path's end as a view of the probabilities, casts and guards passed through."""
    value = path.value
    dims = scene.dims(value)
    if dims is None:
        return None
    view: View | None = identity(value, dims)
    while view is not None and view.source is not probabilities:
        own = scene.views.of(view.source)
        if own is not None and own.source is not view.source:
            view = composed(view, own)
            continue
        node = view.source.producer()
        if node is None:
            return None
        inner = next((v for v in node.inputs if v in path.values), None)
        sizes = None if inner is None else scene.dims(inner)
        if inner is None or sizes is None or sizes != scene.dims(view.source):
            return None
        view = View(inner, view.offset, view.axes)
    return view


def _start(offset: int, dims: tuple[int, ...]) -> list[int]:
    place: list[int] = []
    for dim in reversed(dims):
        offset, digit = divmod(offset, dim)
        place.insert(0, digit)
    return place


def _along(
    product: Product,
    onto: View,
    path: _Path,
    scores: Scores,
    others: tuple[Use, ...],
    refused: Callable[[str, str], Reason],
) -> Weighted | Reason:
    """V and the output over the axes of the score space, then their own axis e."""
    places = product.left.places
    strides = row_major(product.dims)
    value_axes: list[Axis] = []
    output_axes: list[Axis] = []
    sizes = product.left.view.dims
    right = product.right
    for axis, place in enumerate(places):
        broadcast: Axis = ((sizes[axis], 0),) if sizes[axis] > 1 else ()
        if place >= 0 and product.dims[place] != sizes[axis]:
            return refused("probabilities-broadcast", "P·V repeats the probabilities")
        met = right.view.axes[right.places.index(place)] if place in right.places else broadcast
        value_axes.append(met or broadcast)
        output_axes.append(coalesced([(sizes[axis], strides[place])]) if place >= 0 else broadcast)
    own = [place for place in range(len(product.dims)) if place not in places]
    if any(place not in right.places for place in own):
        return refused("value-broadcast", "P·V has an axis that neither operand has")
    value = composed(onto, View(right.view.source, right.view.offset, tuple(value_axes)))
    output = composed(onto, View(product.out, 0, tuple(output_axes)))
    if value is None or output is None:
        return refused("value-rearranged", "the axes of V do not line up with those of P")
    keys, tail = value.axes[scores.axis], output.axes[scores.axis]
    if any(stride == 0 for _, stride in keys) or any(stride for _, stride in tail):
        return refused(
            "softmax-axis",
            "P·V sums over another axis than softmax normalised: the weights do not add up to one",
        )
    value_own = [factor for p in own for factor in right.view.axes[right.places.index(p)]]
    output_own = [(product.dims[p], strides[p]) for p in own]
    return Weighted(
        product=product,
        onto=onto,
        value=View(value.source, value.offset, (*value.axes, coalesced(value_own))),
        output=View(product.out, 0, (*output.axes, coalesced(output_own))),
        zeroed=path.zeroed,
        replaced=path.replaced,
        others=others,
        nodes=(*path.nodes, product.node),
        path=path.values,
    )
