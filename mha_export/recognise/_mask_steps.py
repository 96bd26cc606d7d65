"""The steps of a mask in their order: laid out, and where they meet badly, added up.

A step adds (``additive``), hides (``keep``, ``hide``) or bounds from below (``floor``). A mask that
hides with -inf and an addition are two things whatever their order. With a finite number they are
not: an addition may itself hold such numbers, and then a row of hidden keys goes to whichever is
higher. Such steps are summed as the graph sums them, which is always exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._fit import Fitting
from mha_export.recognise._mask_placing import place_term
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Term
from mha_export.recognise._site import Reason

ABSORBED_FILL = -1e9
"""A score added to a constant at or below this is lost in its rounding (the proof says whether)."""

WEAKEST_FILL = -1e4
"""A constant put in place of a score hides the key only when it is at or below this."""

_LAYING_OUT = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_FEW = 8
"""Moves between the choice of a mask's numbers and where they are added."""

_PROJECTIONS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gather", "Gemm", "MatMul"})
LOWEST_BIAS = -1e3
"""What is added to scores and is lower than this anywhere is a mask of some kind."""

_LARGEST_FACTOR = 64
"""Elements of the largest constant that is a factor and not a weight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A term as a value that broadcasts to [batch, heads, queries, keys]."""

    value: ir.Value
    kind: Literal["additive", "keep", "hide", "floor"]
    fill: float | None = None


def placed_steps(fitting: Fitting, terms: Sequence[Term]) -> list[Placed] | Reason:
    """Every term laid out, floors that only bound fills taken into them."""
    placed: list[Placed] = []
    for term in terms:
        if term.kind == "floor":
            assert term.fill is not None
            placed = _bounded(placed, Placed(value=term.value, kind="floor", fill=term.fill))
            continue
        value = place_term(term, fitting)
        if value is None:
            return _refused(
                term,
                "mask-layout",
                f"the mask {term.value.name!r} can't be laid out as [batch, heads, queries, keys]",
            )
        if term.kind != "additive" and (term.fill is None or term.fill > WEAKEST_FILL):
            return _refused(
                term,
                "fill-too-weak",
                f"masked scores become {term.fill:g}, which does not hide them",
            )
        placed.append(Placed(value=value, kind=term.kind, fill=term.fill))
    return placed


def apart(step: Placed, fitting: Fitting) -> list[Placed]:
    """An addition as steps that hide by flags and what else is added.

    ``nn.MultiheadAttention`` makes numbers of the flags of each mask and adds them up.
    """
    if step.kind != "additive":
        return [step]
    moves, whole = _below_moves(step.value, fitting)
    summands = _summands(whole)
    if len(summands) == 1:
        return [_by_its_flags(step, fitting)]
    if all(_choice(value, fitting) is None for value in summands):
        return [step]
    found: list[Placed] = []
    for value in summands:
        if any(scene.dims(value) != scene.dims(whole) for scene in fitting.scenes):
            value = fitting.derive("Expand", [value, fitting.derive("Shape", [whole])])
        value = _moved(value, moves, fitting)
        found.append(_by_its_flags(Placed(value=value, kind="additive"), fitting))
    return found


def _summands(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    if node is None or node.op_type not in ("Add", "Sum"):
        return [value]
    return [part for given in node.inputs if given is not None for part in _summands(given)]


def _below_moves(value: ir.Value, fitting: Fitting) -> tuple[list[ir.Node], ir.Value]:
    """What lays the value out, or multiplies it by a number above nothing, and what of.

    In the order of the graph.
    """
    scene = fitting.scenes[0]
    moves: list[ir.Node] = []
    node = value.producer()
    while node is not None and len(moves) < _FEW and node.inputs and node.inputs[0] is not None:
        factor = scene.uniform(node.inputs[1]) if node.op_type == "Mul" else None
        if node.op_type not in _LAYING_OUT and not (factor or 0.0) > 0.0:
            break
        moves.insert(0, node)
        value = node.inputs[0]
        node = value.producer()
    return moves, value


def _moved(value: ir.Value, moves: Sequence[ir.Node], fitting: Fitting) -> ir.Value:
    for move in moves:
        value = fitting.derive(move.op_type, [value, *move.inputs[1:]], attributes_of(move))
    return value


def _choice(
    value: ir.Value, fitting: Fitting
) -> tuple[list[ir.Node], ir.Value, Literal["keep", "hide"]] | None:
    """(moves, flags, what they mean) of an addition of nothing or -inf that flags decide.

    A factor leaves nothing and -inf what they are.
    """
    scene = fitting.scenes[0]
    moves, whole = _below_moves(value, fitting)
    node = whole.producer()
    if node is None or node.op_type != "Where":
        return None
    flags, yes, no = node.inputs
    kinds: dict[tuple[float | None, ...], Literal["keep", "hide"]] = {
        (0.0, -np.inf): "keep",
        (-np.inf, 0.0): "hide",
    }
    kind = kinds.get(tuple(scene.uniform(value) for value in (yes, no)))
    if kind is None or flags is None:
        return None
    if any(each.dims(flags) != each.dims(whole) for each in fitting.scenes):
        return None
    return [move for move in moves if move.op_type != "Mul"], flags, kind


def _by_its_flags(step: Placed, fitting: Fitting) -> Placed:
    """An addition of nothing or -inf that flags decide, as the step that hides by them."""
    found = _choice(step.value, fitting)
    if found is None:
        return step
    moves, flags, kind = found
    return Placed(value=_moved(flags, moves, fitting), kind=kind, fill=-np.inf)


def _bounded(placed: list[Placed], floor: Placed) -> list[Placed]:
    """The steps so far, none of which leaves a score below the floor."""
    assert floor.fill is not None
    if any(step.kind == "additive" for step in placed):
        return [*placed, floor]
    return [
        dataclasses.replace(step, fill=max(step.fill, floor.fill))
        for step in placed
        if step.fill is not None
    ]


def summed_steps(
    fitting: Fitting, placed: Sequence[Placed], terms: Sequence[Term]
) -> list[Placed] | Reason:
    """The steps as one addition, where hiding and adding can't be told apart."""
    floored = any(step.kind == "floor" for step in placed)
    if not floored and not is_added_to_fill(placed) and not _is_beside_given(placed, fitting):
        return list(placed)
    weak = next((t for t in terms if t.fill is not None and t.fill > ABSORBED_FILL), None)
    if weak is not None:
        return _refused(
            weak,
            "mask-added-to-fill",
            f"masked scores become {weak.fill:g}, and another mask is added to scores that may "
            "lower them as far: a query without a key then weighs keys it may not see, as no fused "
            "attention does; export the model with -inf or the type's minimum as its mask value",
        )
    return [Placed(value=_summed(placed, fitting), kind="additive")]


def is_added_to_fill(placed: Sequence[Placed]) -> bool:
    """Whether an addition comes after a step that puts a finite number in place of scores."""
    filled = False
    for step in placed:
        if step.kind == "additive" and filled:
            return True
        filled = filled or _fills(step)
    return False


def _fills(step: Placed) -> bool:
    return step.kind != "additive" and step.fill != -np.inf


def _is_beside_given(placed: Sequence[Placed], fitting: Fitting) -> bool:
    """Whether a finite number stands beside an addition that is given from outside."""
    scene = fitting.scenes[0]
    return any(map(_fills, placed)) and any(
        step.kind == "additive" and is_given(step.value, scene) for step in placed
    )


def is_given(value: ir.Value, scene: Scene) -> bool:
    """Whether ``value`` may hold numbers as low as a mask's, given from outside.

    What is computed by weights (a bias from the queries, a table of relative positions) is of the
    size of scores, and so is what flags or ids are seen to become (ALiBi over padded positions). A
    floating point input may be anything.
    """
    inputs = _inputs_of(value, scene)
    if not inputs:
        return False
    kinds = {source: scene.dtype(source) for source in inputs}
    if any(kind is None or kind.is_floating_point() for kind in kinds.values()):
        return True
    for largest in (1, 2, 8):
        contents = {}
        for source, kind in kinds.items():
            dims = scene.dims(source)
            if dims is None or kind is None:
                return True
            drawn = np.random.default_rng(largest).integers(0, largest + 1, dims)
            contents[source] = drawn.astype(kind.numpy())
        array = scene.context.sized(scene.shapes.sizes, contents).array(value)
        if array is None or not np.all(array.astype(np.float64) > LOWEST_BIAS):
            return True
    return False


def _inputs_of(value: ir.Value, scene: Scene) -> list[ir.Value]:
    """The graph inputs whose content makes ``value``, with no weight between."""
    found: list[ir.Value] = []
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        if current.const_value is None and current.is_graph_input():
            found.append(current)
        node = current.producer()
        for place, item in enumerate(scene.context.content_inputs(current)):
            if node is not None and node.op_type in _PROJECTIONS and _is_weight(node, scene):
                break
            if node is not None and node.op_type == "Gather" and place:
                break
            if item not in seen:
                seen.add(item)
                stack.append(item)
    return found


def _is_weight(node: ir.Node, scene: Scene) -> bool:
    """Whether an operand of ``node`` is a stored matrix."""
    for value in node.inputs:
        source = None if value is None else scene.views.source(value)
        if source is None or source.const_value is None:
            continue
        if source.const_value.size > _LARGEST_FACTOR or len(source.const_value.shape) > 1:
            return True
    return False


def _summed(placed: Sequence[Placed], fitting: Fitting) -> ir.Value:
    """All steps, in their order, as what they add to a score of nothing."""
    kind = fitting.scenes[0].dtype(fitting.draft.scores.start) or ir.DataType.FLOAT
    total: ir.Value | np.ndarray = np.zeros((), kind.numpy())
    for step in placed:
        fill = None if step.fill is None else np.asarray(step.fill, kind.numpy())
        if step.kind == "additive":
            blank = isinstance(total, np.ndarray)
            total = step.value if blank else fitting.derive("Add", [total, step.value])
        elif step.kind == "floor":
            total = fitting.derive("Max", [total, fill])
        else:
            total = fitting.derive("Where", [kept(step, fitting), total, fill])
    assert isinstance(total, ir.Value)
    return total


def kept(placed: Placed, fitting: Fitting) -> ir.Value:
    """A hiding step's operand, True where the key takes part."""
    if placed.kind != "hide":
        return placed.value
    node = placed.value.producer()
    if node is not None and node.op_type == "Not" and node.inputs[0] is not None:
        return node.inputs[0]
    return fitting.derive("Not", [placed.value])


def _refused(term: Term, code: str, message: str) -> Reason:
    return Reason(
        code=code,
        message=message,
        value=term.value.name,
        nodes=(term.node.name or term.node.op_type,),
    )
