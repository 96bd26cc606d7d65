"""Probabilities put right after softmax: what a Where on them may do.

A model may set hidden keys to zero again, or give a row without keys a value of its own. Either
changes nothing in a row that has keys, which is checked by looking: the mask and the condition are
evaluated together on masks of every kind, rows without keys among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise._draft import Draft
from mha_export.recognise._mask_steps import ABSORBED_FILL
from mha_export.recognise._probabilities import Replacement
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason
from mha_export.recognise.fused._upstream import same_value
from mha_export.spec import EmptyRow

Bools = NDArray[np.bool_]

_LOOKS = 4
HIDING = (ABSORBED_FILL, -np.inf)
"""What an addition hides at: any number that absorbs scores, or -inf alone."""


def policy_afterwards(draft: Draft, scene: Scene) -> EmptyRow | Reason | None:
    """What a row without keys gets by the Where after softmax; None where there is no such Where.

    A reason where the Where changes rows that have keys, or can't be looked at.
    """
    step = draft.weighted.replaced
    if step is None:
        return None
    if step.where and any(
        term.kind == "hide" and same_value(term.value, step.condition, 16)
        for term in draft.scores.terms
    ):
        return EmptyRow.ZERO if step.number == 0.0 else _refused(step)
    keys = draft.scores.space[draft.scores.axis]
    policy = EmptyRow.ZERO if step.number == 0.0 else EmptyRow.UNIFORM
    if step.number != 0.0 and not np.isclose(step.number, 1.0 / keys, rtol=1e-5):
        return _refused(step)
    for limit in HIDING:
        if all(_gives_rows(_look(draft, step, scene, s, limit), step) for s in range(_LOOKS)):
            return policy
    return _refused(step)


def _gives_rows(seen: tuple[Bools, Bools] | None, step: Replacement) -> bool:
    """Whether every row without keys is replaced, and of the others hidden keys at most, by 0."""
    if seen is None:
        return False
    hidden, replaced = seen
    empty = hidden.all(axis=-1, keepdims=True)
    touched = replaced & ~empty
    if step.number == 0.0:
        touched &= ~hidden
    missed = (replaced != empty)[np.broadcast_to(empty, replaced.shape)]
    return not touched.any() and not missed.any()


def _refused(step: Replacement) -> Reason:
    return Reason(
        code="probabilities-masked",
        message=f"after softmax, {step.number:g} is put in place of probabilities by "
        f"{step.condition.name!r}: the weights no longer add up to one",
        value=step.condition.name,
        nodes=(step.node.name or step.node.op_type,),
    )


def _look(
    draft: Draft, step: Replacement, scene: Scene, seed: int, limit: float
) -> tuple[Bools, Bools] | None:
    """(hidden, replaced), both over the score space with the keys last."""
    terms = draft.scores.terms
    space, axis = draft.scores.space, draft.scores.axis
    if any(scene.dims(term.level) != space for term in terms):
        return None
    asked = [*(term.value for term in terms), step.condition]
    contents = contents_of(asked, scene, seed)
    if contents is None:
        return None
    view = scene.context.sized(scene.shapes.sizes, contents)
    arrays = [view.array(value) for value in asked]
    hidden = np.zeros(space, np.bool_)
    for term, array in zip(terms, arrays[:-1], strict=True):
        if array is None:
            return None
        if term.kind == "floor":
            continue
        if term.kind == "additive":
            hidden |= np.broadcast_to(is_hidden(array * term.factor, limit), space)
        else:
            hidden |= np.broadcast_to(array if term.kind == "hide" else ~array, space)
    condition = arrays[-1]
    if condition is None:
        return None
    replaced = np.broadcast_to(condition if step.where else ~condition, space)
    return np.moveaxis(hidden, axis, -1), np.moveaxis(replaced, axis, -1)


def is_hidden(added: NDArray[np.floating], limit: float) -> Bools:
    """Where what is added to the scores absorbs them."""
    result: Bools = added.astype(np.float64) <= limit  # beyond the range of fp16
    return result


def contents_of(
    values: Sequence[ir.Value], scene: Scene, seed: int
) -> Mapping[ir.Value, np.ndarray] | None:
    """Flags and biases for everything the masks are computed from; in some rows all are alike.

    A bias computed from queries is no number where those are infinite: it gets content of its own.
    """
    random = np.random.default_rng(seed)
    found: dict[ir.Value, np.ndarray] = {}
    for value in sorted(
        set().union(*(scene.context.sources(v) for v in values)), key=lambda v: v.name or ""
    ):
        content = _random_content(value, scene, random)
        if content is None:
            return None
        found[value] = content
    view = scene.context.sized(scene.shapes.sizes, found)
    for value in values:
        array = view.array(value)
        if array is not None and array.dtype.kind == "f" and np.isnan(array).any():
            content = _random_content(value, scene, random)
            if content is None:
                return None
            found[value] = content
    return found


def _random_content(
    value: ir.Value, scene: Scene, random: np.random.Generator
) -> np.ndarray | None:
    dims, kind = scene.dims(value), scene.dtype(value)
    if dims is None or kind is None:
        return None
    flags = random.random(dims) < 0.5
    if flags.ndim:
        row = random.random((*dims[:-1], 1))
        flags = (flags & (row < 0.7)) | (row < 0.3)
    if kind.is_floating_point():
        flags = np.where(flags, 0.0, -np.inf)
    return np.asarray(flags).astype(kind.numpy())
