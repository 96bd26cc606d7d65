"""From what meets the scores to values that broadcast to [batch, heads, queries, keys]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from mha_export.recognise._adapt import arranged, partitioned
from mha_export.recognise._axes import Axis, View, composed, identity
from mha_export.recognise._draft import Draft
from mha_export.recognise._fit import Fitting, SizeUnknownError
from mha_export.recognise._lift import Stage
from mha_export.recognise._roles import along
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Term, Weighting


def place_term(term: Term, fitting: Fitting) -> ir.Value | None:
    """The term as a value that broadcasts to [b, h, s, t], its last axis all keys."""
    scene = fitting.scenes[0]
    place = fitting.draft.scores.terms.index(term)
    value = placed_value(term, lambda d: d.scores.terms[place].level_view, fitting, keys=True)
    if value is None:
        return None
    if term.kind == "additive" and term.factor != 1.0:
        dtype = scene.dtype(term.value) or ir.DataType.FLOAT
        factor = np.asarray(term.factor).astype(dtype.numpy())
        return fitting.derive("Mul", [value, factor])
    return value


def placed_value(
    term: Term | Weighting, level_view: Callable[[Draft], View], fitting: Fitting, *, keys: bool
) -> ir.Value | None:
    """What meets the scores, as a value that broadcasts to [b, h, s, t].

    With ``keys`` its last axis must be all keys, not one that broadcasts.
    """
    value = _aligned(term, fitting.draft, fitting.scenes[0], keys=keys)
    if value is not None:
        return value
    try:
        return _materialised(term, level_view, fitting, keys=keys)
    except SizeUnknownError:
        return None


def _aligned(term: Term | Weighting, draft: Draft, scene: Scene, *, keys: bool) -> ir.Value | None:
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
        if seen.offset == view.offset and _broadcasts(seen.axes, wanted, keys=keys)
    ]
    full = [value for value in fitting if len(scene.dims(value) or ()) == 4]
    return full[0] if full else fitting[0] if fitting else None


def _broadcasts(axes: tuple[Axis, ...], wanted: list[Axis], *, keys: bool) -> bool:
    """Whether axes, aligned at the end, are the roles or units along which nothing moves."""
    if not 1 <= len(axes) <= 4 or (keys and axes[-1] != wanted[-1]):
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


def _materialised(
    term: Term | Weighting, level_view: Callable[[Draft], View], fitting: Fitting, *, keys: bool
) -> ir.Value | None:
    """The term rearranged from the axes of the scores it meets to batch, heads, queries, keys.

    It is only spread along factors that a reshape has to cut or join, and along the keys.
    """
    draft, scene = fitting.draft, fitting.scenes[0]
    level, own = scene.dims(term.level), scene.dims(term.value)
    if level is None or own is None:
        return None
    parts = fitting.parts(level_view, "bst", draft.roles.heads, 0, cut=True)
    axes = None if parts is None else partitioned(identity(term.level, level).axes, parts)
    if parts is None or axes is None:
        return None
    padded = (1,) * (len(level) - len(own)) + own
    present = [axis if size != 1 else [] for axis, size in zip(axes, padded, strict=True)]
    here = {id(part) for axis in present for part in axis}
    needed = {
        role
        for role in "bhst"
        if (role == "t" and keys)
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


def is_natural(draft: Draft) -> bool:
    """Whether the space's axes already are batch, heads, queries, keys, one each."""
    if len(draft.scores.space) != 4 or draft.scores.axis != 3:
        return False
    places = [
        {atom.axis for atom in role}
        for role in (draft.roles.batch, draft.roles.heads, draft.roles.queries)
    ]
    return all(found <= {axis} for axis, found in enumerate(places))
