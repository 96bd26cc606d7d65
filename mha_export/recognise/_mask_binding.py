"""From mask terms over the score space to operands that broadcast to [b, h, s, t]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._adapt import arranged, partitioned
from mha_export.recognise._axes import Axis, View, composed, identity
from mha_export.recognise._draft import Draft
from mha_export.recognise._fit import Fitting, SizeUnknownError
from mha_export.recognise._lift import Stage
from mha_export.recognise._roles import along
from mha_export.recognise._scene import Scene
from mha_export.recognise._scores import Term
from mha_export.recognise._site import Reason
from mha_export.spec import EmptyRow, Fill

WEAKEST_FILL = -1e4
"""A constant put in place of a score hides the key only when it is at or below this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RawMask:
    """The mask as the graph holds it: a keep mask, a bias, or both."""

    keep: ir.Value | None = None
    bias: ir.Value | None = None
    fill: Fill = "-inf"
    empty_row: EmptyRow = EmptyRow.NOT_APPLICABLE


def raw_mask(fitting: Fitting, terms: Sequence[Term]) -> RawMask | Reason:
    """Operands that state ``terms`` exactly, values derived where the graph has none."""
    draft, scene = fitting.draft, fitting.scenes[0]
    keeps: list[ir.Value] = []
    biases: list[ir.Value] = []
    fills: list[float] = []
    for term in terms:
        placed = place_term(term, fitting)
        if placed is None:
            return Reason(
                code="mask-layout",
                message=f"the mask {term.value.name!r} can't be laid out as "
                "[batch, heads, queries, keys]",
                value=term.value.name,
                nodes=(term.node.name or term.node.op_type,),
            )
        if term.kind == "additive":
            biases.append(placed)
            continue
        fill = term.fill if term.fill is not None else -np.inf
        if fill > WEAKEST_FILL:
            return Reason(
                code="fill-too-weak",
                message=f"masked scores become {fill:g}, which does not hide them",
                value=term.value.name,
                nodes=(term.node.name or term.node.op_type,),
            )
        fills.append(fill)
        keeps.append(placed)
    bias = _joined(biases, "Add", fitting)
    keep = _joined(keeps, "And", fitting)
    absolute = bool(fills) and all(fill == -np.inf for fill in fills)
    if keep is None:
        row = EmptyRow.ZERO if draft.weighted.zeroed else EmptyRow.NOT_APPLICABLE
        return RawMask(bias=bias, empty_row=row)
    if draft.weighted.zeroed or draft.scores.sink is not None:
        row = EmptyRow.ZERO
    else:
        row = EmptyRow.NAN if absolute else EmptyRow.UNIFORM
    return RawMask(keep=keep, bias=bias, fill="-inf" if absolute else "min", empty_row=row)


def _joined(values: list[ir.Value], op: str, fitting: Fitting) -> ir.Value | None:
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        result = fitting.derive(op, [result, value])
    return result


def place_term(term: Term, fitting: Fitting) -> ir.Value | None:
    """The term as a value that broadcasts to [b, h, s, t], its last axis all keys."""
    draft, scene = fitting.draft, fitting.scenes[0]
    value = _aligned(term, draft, scene)
    if value is None:
        try:
            value = _materialised(term, fitting)
        except SizeUnknownError:
            return None
    if value is None:
        return None
    if term.kind == "hide":
        return _negated(value, fitting)
    if term.kind == "additive" and term.factor != 1.0:
        dtype = scene.dtype(term.value) or ir.DataType.FLOAT
        factor = np.asarray(term.factor).astype(dtype.numpy())
        return fitting.derive("Mul", [value, factor])
    return value


def _negated(value: ir.Value, fitting: Fitting) -> ir.Value:
    node = value.producer()
    if node is not None and node.op_type == "Not" and node.inputs[0] is not None:
        return node.inputs[0]
    return fitting.derive("Not", [value])


def _aligned(term: Term, draft: Draft, scene: Scene) -> ir.Value | None:
    """A value on the term's way that already broadcasts, nearest to its source first."""
    own = scene.views.of(term.value)
    view = None if own is None else composed(term.view, own)
    if view is None:
        return None
    wanted = role_axes(view, draft)
    if wanted is None:
        return None
    stage = Stage(entry=term.value, view=view)
    fitting = [
        value
        for value, seen in stage.places(scene)
        if seen.offset == view.offset and _broadcasts(seen.axes, wanted)
    ]
    full = [value for value in fitting if len(scene.dims(value) or ()) == 4]
    return full[0] if full else fitting[0] if fitting else None


def _broadcasts(axes: tuple[Axis, ...], wanted: list[Axis]) -> bool:
    """Whether axes, aligned at the end, are the roles or units along which nothing moves."""
    if not 1 <= len(axes) <= 4 or axes[-1] != wanted[-1]:
        return False
    padded = ((),) * (4 - len(axes)) + axes
    return all(
        have == want or (have == () and not any(stride for _, stride in want))
        for have, want in zip(padded, wanted, strict=True)
    )


def role_axes(view: View, draft: Draft) -> list[Axis] | None:
    """How a view over the space moves along [batch, heads, queries, keys]."""
    roles = draft.roles
    strides = roles.strides(view)
    if strides is None:
        return None
    keys = view.axes[draft.scores.axis]
    return [*(along(role, strides) for role in (roles.batch, roles.heads, roles.queries)), keys]


def _materialised(term: Term, fitting: Fitting) -> ir.Value | None:
    """The term rearranged from the axes of the scores it meets to batch, heads, queries, keys.

    It is only spread along factors that a reshape has to cut or join, and along the keys.
    """
    draft, scene = fitting.draft, fitting.scenes[0]
    place = draft.scores.terms.index(term)
    level, own = scene.dims(term.level), scene.dims(term.value)
    if level is None or own is None:
        return None
    parts = fitting.parts(lambda d: d.scores.terms[place].level_view, "bst", draft.roles.heads, 0)
    axes = None if parts is None else partitioned(identity(term.level, level).axes, parts)
    if parts is None or axes is None:
        return None
    padded = (1,) * (len(level) - len(own)) + own
    present = [axis if size != 1 else [] for axis, size in zip(axes, padded, strict=True)]
    here = {id(part) for axis in present for part in axis}
    needed = {
        role
        for role in "bhst"
        if role == "t"
        or len({id(part) in here for part in parts if part.role == role and part.size > 1}) == 2
    }
    spread = [
        axis if any(part.role in needed for part in axis) else kept
        for axis, kept in zip(axes, present, strict=True)
    ]
    value = term.value
    if spread != present or len(own) != len(level):
        value = fitting.derive("Expand", [value, fitting.derive.exact_shape(spread)])
    flat = [part for axis in spread for part in axis]
    order = [[part for part in parts if part.role == role and part in flat] for role in "bhst"]
    return arranged(value, spread, order, fitting.derive)
