"""From mask terms over the score space to operands that broadcast to [b, h, s, t]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._axes import Axis, View, composed
from mha_export.recognise._draft import Draft
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


def raw_mask(draft: Draft, scene: Scene, terms: Sequence[Term]) -> RawMask | Reason:
    """Operands that state ``terms`` exactly, values derived where the graph has none."""
    keeps: list[ir.Value] = []
    biases: list[ir.Value] = []
    fills: list[float] = []
    for term in terms:
        placed = place_term(term, draft, scene)
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
    bias = _joined(biases, "Add", draft, scene)
    keep = _joined(keeps, "And", draft, scene)
    absolute = bool(fills) and all(fill == -np.inf for fill in fills)
    if keep is None:
        row = EmptyRow.ZERO if draft.weighted.zeroed else EmptyRow.NOT_APPLICABLE
        return RawMask(bias=bias, empty_row=row)
    if draft.weighted.zeroed or draft.scores.sink is not None:
        row = EmptyRow.ZERO
    else:
        row = EmptyRow.NAN if absolute else EmptyRow.UNIFORM
    return RawMask(keep=keep, bias=bias, fill="-inf" if absolute else "min", empty_row=row)


def _joined(values: list[ir.Value], op: str, draft: Draft, scene: Scene) -> ir.Value | None:
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        (result,) = scene.context.derive(op, [result, value], before=draft.anchor.node)
    return result


def place_term(term: Term, draft: Draft, scene: Scene) -> ir.Value | None:
    """The term as a value that broadcasts to [b, h, s, t], its last axis all keys."""
    before = draft.anchor.node
    value = _aligned(term, draft, scene) or _materialised(term, draft, scene)
    if value is None:
        return None
    if term.kind == "hide":
        return _negated(value, before, scene)
    if term.kind == "additive" and term.factor != 1.0:
        dtype = scene.dtype(term.value) or ir.DataType.FLOAT
        factor = np.asarray(term.factor).astype(dtype.numpy())
        (value,) = scene.context.derive("Mul", [value, factor], before=before)
    return value


def _negated(value: ir.Value, before: ir.Node, scene: Scene) -> ir.Value:
    node = value.producer()
    if node is not None and node.op_type == "Not" and node.inputs[0] is not None:
        return node.inputs[0]
    (negated,) = scene.context.derive("Not", [value], before=before)
    return negated


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


def _materialised(term: Term, draft: Draft, scene: Scene) -> ir.Value | None:
    """The term spread over the scores it meets, then rearranged as the scores are."""
    level = scene.dims(term.level)
    natural = _natural_space(draft)
    if level is None or natural is None:
        return None
    before = draft.anchor.node
    context = scene.context
    value = term.value
    if scene.dims(value) != level:
        (shape,) = context.derive("Shape", [term.level], before=before)
        (value,) = context.derive("Expand", [value, shape], before=before)
    for node in draft.scores.rearrangements(term.level):
        (value,) = context.derive(
            node.op_type,
            [value, *node.inputs[1:]],
            {name: attribute.value for name, attribute in node.attributes.items()},
            before=before,
        )
    if natural:
        return value
    return _to_roles(value, draft, scene)


def _natural_space(draft: Draft) -> bool | None:
    """Whether the space's axes already are batch, heads, queries, keys, one each."""
    if len(draft.scores.space) != 4 or draft.scores.axis != 3:
        return False
    places = [
        {atom.axis for atom in role}
        for role in (draft.roles.batch, draft.roles.heads, draft.roles.queries)
    ]
    return all(found <= {axis} for axis, found in enumerate(places))


def _to_roles(value: ir.Value, draft: Draft, scene: Scene) -> ir.Value | None:
    """A value over the whole space, reshaped and transposed to [b, h, s, t]."""
    return None
