"""From what softmax reads up to Q Kᵀ: the affine normal form of the scores.

``x = softcap(scale * Q Kᵀ) + sum of terms``, with keep masks where a Where puts a constant, found
by one law per op. Two graphs that compute the same scores in another order of casts, reshapes and
factors get the same normal form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from mha_export.recognise._axes import Axis, View, composed, identity
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._product import Product, product_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason

LOWEST = -1e30
"""A number at or below this stands for a dtype's minimum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Term:
    """One step between the capped scores and softmax.

    Attributes:
        value: the operand of the Add or Where, as it stands in the graph.
        kind: ``additive``: ``factor * value`` is added; ``keep``: the score becomes ``fill`` where
            False; ``hide``: where True.
        view: the operand over the axes of the scores space.
        level: the scores before this step, and the space's axes as a view of them.
    """

    value: ir.Value
    kind: Literal["additive", "keep", "hide"]
    view: View
    level: ir.Value
    level_view: View
    node: ir.Node
    factor: float = 1.0
    fill: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighting:
    """A factor on the scores that is not one number: a learned scale per head, a temperature.

    It does not vary over the keys, so it can stand on the queries as well. ``level`` and
    ``level_view`` are those of a :class:`Term`.
    """

    value: ir.Value
    view: View
    level: ir.Value
    level_view: View
    inverse: bool
    node: ir.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Sink:
    """A column joined to the scores before softmax and cut off after it."""

    value: ir.Value
    view: View
    first: bool
    node: ir.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """The scores at one value on the way from the product to softmax.

    Attributes:
        view: the space's axes as a view of the value.
        factor: what the value is still multiplied by below (up to the softcap, where it is above).
        capped_below: the softcap comes below. terms_below: how many terms do.
    """

    view: View
    factor: float
    capped_below: bool
    terms_below: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The normal form of what one softmax reads.

    ``space`` are the sizes of the scores as softmax sees them (without a sink column), ``axis`` the
    place of the keys among them. ``query`` and ``key`` are views over the space's axes followed by
    the contracted ones.
    """

    product: Product
    space: tuple[int, ...]
    axis: int
    query: View
    key: View
    scale: float
    softcap: float | None
    terms: tuple[Term, ...]
    weightings: tuple[Weighting, ...]
    sink: Sink | None
    steps: tuple[tuple[ir.Node, ir.Value], ...]
    summed: int
    start: ir.Value
    levels: Mapping[ir.Value, Level]
    """Every value from the product to the space."""

    @property
    def path(self) -> list[ir.Node]:
        """Every node from the product to the space."""
        found = [self.product.node]
        for value in self.levels:
            node = value.producer()
            if node is not None:
                found.append(node)
        return [*found, *(node for node, _ in self.steps)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    value: ir.Value
    outer: View
    space: tuple[int, ...]
    axis: int
    factor: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    weightings: tuple[Weighting, ...] = ()
    sink: Sink | None = None
    steps: tuple[tuple[ir.Node, ir.Value], ...] = ()
    start: ir.Value
    levels: tuple[tuple[ir.Value, Level], ...] = ()

    def at(self, value: ir.Value, outer: View, node: ir.Node, **changes: object) -> _State:
        return dataclasses.replace(
            self,
            value=value,
            outer=outer,
            steps=(*self.steps, (node, value)),
            **changes,  # type: ignore[arg-type]
        ).noted()

    def noted(self) -> _State:
        """With the level it stands at remembered."""
        level = Level(
            view=self.outer,
            factor=self.factor,
            capped_below=self.softcap is not None,
            terms_below=len(self.terms),
        )
        return dataclasses.replace(self, levels=(*self.levels, (self.value, level)))


def read_scores(logits: ir.Value, axis: int, scene: Scene) -> Scores | Reason:
    """The normal form of ``logits``, or the first condition that failed on the way up."""
    dims = scene.dims(logits)
    if dims is None:
        return Reason(
            code="shape-unknown",
            message=f"the shape of {logits.name!r} depends on data; sizes could not be followed to it",
            value=logits.name,
        )
    state = _State(
        value=logits,
        outer=identity(logits, dims),
        space=dims,
        axis=axis % len(dims),
        start=logits,
    )
    return _walk(state.noted(), scene)


def _walk(state: _State, scene: Scene) -> Scores | Reason:
    while True:
        view = scene.views.of(state.value)
        if view is not None and view.source is not state.value:
            outer = composed(state.outer, view)
            if outer is None:
                return _refused(
                    state, "scores-rearranged", "the scores are rearranged in a way that mixes axes"
                )
            state = dataclasses.replace(state, value=view.source, outer=outer).noted()
        product = product_of(state.value, scene.views)
        if product is not None:
            return _end(state, product, scene)
        node = state.value.producer()
        law = None if node is None else _LAWS.get(node.op_type)
        if node is None or law is None:
            made = "a graph input or constant" if node is None else f"{node.op_type}"
            return _refused(
                state,
                "scores-not-a-product",
                f"what softmax reads comes from {made} ({state.value.name!r}), not from a product "
                "of queries and keys",
            )
        step = law(state, node, scene)
        if not isinstance(step, _State):
            return step
        state = step


def _refused(state: _State, code: str, message: str, *nodes: ir.Node) -> Reason:
    node = state.value.producer()
    shown = nodes or (() if node is None else (node,))
    return Reason(
        code=code,
        message=message,
        value=state.value.name,
        nodes=tuple(n.name or n.op_type for n in shown),
    )


def _end(state: _State, product: Product, scene: Scene) -> Scores | Reason:
    """At the product: the operand that owns the softmax axis holds the keys."""
    for oriented in (product, product.swapped()):
        queries, keys = oriented.across(oriented.left), oriented.across(oriented.right)
        if queries is None or keys is None:
            break
        query, key = composed(state.outer, queries), composed(state.outer, keys)
        if query is None or key is None:
            break
        if _moves(key.axes[state.axis]) and not any(s for _, s in query.axes[state.axis]):
            summed_query, summed_key = (
                oriented.summed(oriented.left),
                oriented.summed(oriented.right),
            )
            return Scores(
                product=oriented,
                space=state.space,
                axis=state.axis,
                query=View(query.source, query.offset, (*query.axes, *summed_query)),
                key=View(key.source, key.offset, (*key.axes, *summed_key)),
                scale=state.factor * product.factor,
                softcap=state.softcap,
                terms=state.terms[::-1],
                weightings=state.weightings,
                sink=state.sink,
                steps=state.steps,
                summed=oriented.contracted,
                start=state.start,
                levels=dict(state.levels),
            )
    return _refused(
        state,
        "softmax-axis",
        f"softmax runs over an axis of {product.out.name!r} that is not one operand's own: "
        "the keys are not what is normalised over",
    )


def _moves(axis: Axis) -> bool:
    """Whether every factor of the axis moves through the source (none is a broadcast)."""
    return all(stride != 0 for _, stride in axis)


_Law = Callable[[_State, ir.Node, Scene], "_State | Scores | Reason"]


def _below(state: _State, value: ir.Value | None, scene: Scene) -> View | None:
    """The space's axes seen from ``value``, which broadcasts to the current level."""
    dims = scene.dims(state.value)
    if value is None or dims is None:
        return None
    spread = scene.spread(value, dims)
    return None if spread is None else composed(state.outer, spread)


def _through(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    inner = node.inputs[0]
    outer = _below(state, inner, scene)
    if inner is None or outer is None:
        return _refused(state, "shape-unknown", f"sizes are unknown at {node.op_type}", node)
    return state.at(inner, outer, node)


def _cast(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    inner = node.inputs[0]
    dtype = None if inner is None else scene.dtype(inner)
    if dtype is not None and not dtype.is_floating_point():
        return _refused(state, "scores-not-a-product", f"the scores are cast from {dtype}", node)
    return _through(state, node, scene)


def _negate(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    return _through(dataclasses.replace(state, factor=-state.factor), node, scene)


def _sum(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """Add, Sub: one side leads to the product, the other is a term."""
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) == 1:
        return _through(state, node, scene)
    if len(inputs) != 2:
        return _refused(state, "scores-not-affine", "more than two summands in one node", node)
    first, second = inputs
    if node.op_type == "Sub" and _is_row_maximum(second, state, scene):
        return _through(state, node, scene)
    for inner, other in ((first, second), (second, first)):
        if scene.uniform(other) == 0.0:
            outer = _below(state, inner, scene)
            if outer is not None:
                return state.at(inner, outer, node)
        if node.op_type == "Sub":
            break
    failures: list[Reason] = []
    for scores, term, sign in _sides(first, second, node, state, scene):
        found = _with_term(state, node, scores, term, sign, scene)
        if isinstance(found, Scores):
            return found
        failures.append(found)
    return failures[0]


def _sides(
    first: ir.Value, second: ir.Value, node: ir.Node, state: _State, scene: Scene
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
    state: _State, node: ir.Node, scores: ir.Value, term: ir.Value, sign: float, scene: Scene
) -> Scores | Reason:
    outer, view = _below(state, scores, scene), _below(state, term, scene)
    if outer is None or view is None:
        return _refused(state, "shape-unknown", f"sizes are unknown at {node.op_type}", node)
    if state.softcap is not None:
        return _refused(
            state, "mask-inside-softcap", "a mask or bias is added before the softcap", node
        )
    if state.weightings:
        return _refused(
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
    return _walk(state.at(scores, outer, node, terms=(*state.terms, made)), scene)


def _is_row_maximum(value: ir.Value, state: _State, scene: Scene) -> bool:
    """A maximum over the softmax axis: softmax does not change when it is taken off."""
    if state.sink is not None:
        return False
    view = _below(state, value, scene)
    if view is None or any(stride for _, stride in view.axes[state.axis]):
        return False
    node = scene.views.source(value).producer()
    return node is not None and node.op_type == "ReduceMax"


def _scaled(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """Mul, Div by one number; Mul by tanh's cap; or a weighting that is folded into Q or K."""
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != 2:
        return _refused(state, "scores-not-affine", "Mul with other than two operands", node)
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
    state: _State, node: ir.Node, inputs: list[ir.Value], scene: Scene
) -> _State | Scores | Reason:
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
    return _refused(
        state,
        "scores-not-affine",
        f"{node.op_type} multiplies the scores by something that varies over the keys",
        node,
    )


def _capped(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """``c tanh(x)``: whatever stands before the tanh is ``scale / c``."""
    if state.softcap is not None or state.weightings:
        return _refused(state, "scores-not-affine", "tanh of the scores more than once", node)
    cap = abs(state.factor)
    sign = 1.0 if state.factor > 0 else -1.0
    return _through(dataclasses.replace(state, softcap=cap, factor=sign * cap), node, scene)


def _chosen(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """Where: one branch is a constant fill, the other the scores."""
    condition, yes, no = node.inputs
    kind: Literal["keep", "hide"]
    for inner, other, kind in ((yes, no, "keep"), (no, yes, "hide")):  # type: ignore[assignment]
        fill = scene.uniform(other)
        if fill is None or inner is None or condition is None:
            continue
        outer, view = _below(state, inner, scene), _below(state, condition, scene)
        if outer is None or view is None:
            return _refused(state, "shape-unknown", "sizes are unknown at Where", node)
        if state.softcap is not None:
            return _refused(state, "mask-inside-softcap", "scores are masked before softcap", node)
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
    return _refused(state, "scores-not-affine", "Where chooses between two computed values", node)


def _clamped(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """Max with a dtype's minimum only keeps sums of two minima finite."""
    attributes = attributes_of(node)
    bounds = [attributes.get("min"), attributes.get("max")]
    for place in (1, 2):
        if len(node.inputs) > place and node.inputs[place] is not None:
            bounds[place - 1] = scene.uniform(node.inputs[place])
    if node.op_type == "Max":
        numbers = [scene.uniform(value) for value in node.inputs]
        inner = [value for value, n in zip(node.inputs, numbers, strict=True) if n is None]
        known = [n for n in numbers if n is not None]
        if len(inner) != 1 or inner[0] is None or not known:
            return _refused(state, "scores-not-affine", "Max of two computed values", node)
        value, bounds = inner[0], [max(known), None]
    else:
        value = node.inputs[0]
    low, high = bounds
    outer = _below(state, value, scene)
    if (low is None or low <= LOWEST) and (high is None or high >= -LOWEST):
        if value is not None and outer is not None:
            return state.at(value, outer, node)
    return _refused(state, "scores-clamped", "the scores are clamped to a finite range", node)


def _joined(state: _State, node: ir.Node, scene: Scene) -> _State | Scores | Reason:
    """Concat of one column along the softmax axis: an attention sink."""
    dims = scene.dims(state.value)
    place = attributes_of(node).get("axis", 0)
    if dims is None or state.sink is not None or len(node.inputs) != 2:
        return _refused(state, "scores-joined", "the scores are joined from several parts", node)
    place %= len(dims)
    if state.outer != identity(state.value, dims) or place != state.axis or state.terms:
        return _refused(state, "scores-joined", "the scores are joined along another axis", node)
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
    return _refused(state, "scores-joined", "more than one column joins the scores", node)


_LAWS: dict[str, _Law] = {
    "Add": _sum,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clamped,
    "Concat": _joined,
    "Div": _scaled,
    "Max": _clamped,
    "Mul": _scaled,
    "Neg": _negate,
    "Sub": _sum,
    "Sum": _sum,
    "Tanh": _capped,
    "Where": _chosen,
}
