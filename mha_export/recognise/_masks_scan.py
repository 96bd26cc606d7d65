"""Looking at a mask: all its steps evaluated together, and the numbers told apart from the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise._evaluate import Context
from mha_export.recognise._masks_reach import SENTINEL, reach_of
from mha_export.recognise._masks_sizes import Scores, ScoreShape, Sizes, shape_of
from mha_export.recognise._masks_terms import MaskTerm
from mha_export.spec import Fill

ABSORBING = -1e30
"""At or below this a fill swallows every score: it is the dtype's minimum by another name."""

LARGEST = 4200
"""Most keys a mask is looked at with; a mask that may be wider than this is not read."""

LEAST_FINITE = -100.0
"""A two-valued mask whose lower value is above this is a bias, not a way to hide keys."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One attention's mask: the terms, and how their axes lie.

    ``permutation`` takes the axes of ``scores`` to [batch..., heads..., s, t].
    """

    terms: tuple[MaskTerm, ...]
    scores: Scores
    heads: int
    permutation: tuple[int, ...] | None
    cached: bool
    context: Context
    fixed: Mapping[ir.Value, NDArray[Any]] = field(default_factory=dict)
    """Constants given another content, to see what they are for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sight:
    """The mask at one pair of sizes, [b or 1, h or 1, s, t] float: added, fills written in.

    ``past`` is the position of query 0 where the keys begin with a past, else None.
    """

    mask: NDArray[Any]
    batch: int
    past: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """Masks with one fill in common: what they keep, and the ALiBi slopes of what they add."""

    fill: Fill | None
    replaces: bool
    slopes: tuple[float, ...] | None
    keeps: tuple[NDArray[np.bool_], ...]


def geometry(subject: Subject, sizes: Sizes) -> tuple[int, int, int]:
    """Batch, queries and keys of the scores at these sizes.

    Errors:
        ValueError: the scores have no shape there (plans only hold sizes at which they have one).
    """
    shape = shape_of(subject.context, sizes, subject.scores)
    if shape is None:
        raise ValueError(f"the scores have no shape at {dict(sizes)}")
    queries, keys = _last_two(shape, subject)
    lead = int(np.prod(shape, dtype=np.int64)) // max(1, queries * keys)
    return max(1, lead // subject.heads), queries, keys


def look(
    subject: Subject, sizes: Sizes, contents: Mapping[ir.Value, np.ndarray] | None = None
) -> Sight | None:
    """The mask at these sizes, or None where they contradict the graph."""
    shape = shape_of(subject.context, sizes, subject.scores)
    if shape is None:
        return None
    view = subject.context.sized(sizes, {**subject.fixed, **(contents or {})})
    total: NDArray[Any] | None = None
    for term in subject.terms:
        array = view.array(term.value)
        if array is None:
            return None
        array = _aligned(array, shape, subject)
        if array is None:
            return None
        total = _applied(term, array, total, subject)
    if total is None:
        return None
    batch, queries, keys = geometry(subject, sizes)
    return Sight(
        mask=np.broadcast_to(total, (*total.shape[:2], queries, keys)),
        batch=batch,
        past=_past(subject, sizes, keys - queries),
    )


def _past(subject: Subject, sizes: Sizes, difference: int) -> int | None:
    """The length of the past: there may be more or fewer new keys than queries."""
    if not subject.cached:
        return None
    scores = subject.scores
    past = scores.past_length(subject.context, sizes) if isinstance(scores, ScoreShape) else None
    return difference if past is None else past


def _last_two(shape: tuple[int, ...], subject: Subject) -> tuple[int, int]:
    order = subject.permutation or tuple(range(len(shape)))
    return shape[order[-2]], shape[order[-1]]


def _aligned(array: np.ndarray, shape: tuple[int, ...], subject: Subject) -> NDArray[Any] | None:
    """The term as [b or 1, h or 1, s or 1, t or 1]; None where it does not broadcast."""
    if array.ndim > len(shape):
        return None
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if any(n not in (1, m) for n, m in zip(array.shape, shape, strict=True)):
        return None
    order = subject.permutation or tuple(range(len(shape)))
    array = array.transpose(order)
    lead = tuple(shape[axis] for axis in order[:-2])
    if all(n == 1 for n in array.shape[:-2]):
        return array.reshape((1, 1, *array.shape[-2:]))
    if len(lead) == 2 and lead[1] == subject.heads:
        return array
    whole = np.broadcast_to(array, (*lead, *array.shape[-2:]))
    return whole.reshape((-1, subject.heads, *array.shape[-2:]))


def _applied(
    term: MaskTerm, array: NDArray[Any], total: NDArray[Any] | None, subject: Subject
) -> NDArray[Any] | None:
    if term.kind == "additive":
        if array.dtype.kind not in "fV":
            return None
        with np.errstate(all="ignore"):
            return array if total is None else total + array
    if term.kind == "floor":
        return total if total is None else np.maximum(total, np.asarray(term.fill, total.dtype))
    if array.dtype != np.bool_ or term.fill is None:
        return None
    keep = array if term.kind == "keep" else ~array
    dtype = subject.scores.dtype
    plain = np.zeros((), np.float32 if dtype is None else dtype.numpy())
    below = plain if total is None else total
    with np.errstate(over="ignore"):  # fp32's minimum is -inf in half precision
        return np.where(keep, below, np.asarray(term.fill, below.dtype))


def decode(sights: Sequence[Sight], subject: Subject) -> Decoded | None:
    """Tell fills from additions; None where the masks have more to say than one fill and ALiBi."""
    masks = [sight.mask for sight in sights]
    if any(mask.dtype.name == "bfloat16" for mask in masks):
        masks = [mask.astype(np.float32) for mask in masks]
    if any(np.isnan(mask).any() or (mask == np.inf).any() for mask in masks):
        return None
    keeps = [mask > _absorbing(mask.dtype) for mask in masks]
    low = {float(mask.dtype.type(np.finfo(mask.dtype).min)) for mask in masks}
    fill = _absorbing_fill(masks, keeps)
    if fill is None or not _is_even_where_empty(masks, keeps):
        return None
    slopes: tuple[float, ...] | None = None
    if not all(bool(np.all(~keep | (mask == 0))) for keep, mask in zip(keeps, masks, strict=True)):
        finite = min(float(mask.min(initial=0)) for mask in masks)
        two_valued = all(bool(np.all((m == 0) | (m == finite))) for m in masks)
        if two_valued and fill == "none" and finite <= LEAST_FINITE:
            keeps = [mask == 0 for mask in masks]
            fill = "min" if finite in low else finite
        else:
            slopes = _slopes(masks, keeps, subject.heads)
            if slopes is None:
                return None
    hiding = [term for term in subject.terms if term.kind in ("keep", "hide")]
    return Decoded(
        fill=None if fill == "none" else fill,
        replaces=bool(hiding) and isinstance(fill, float),
        slopes=slopes,
        keeps=tuple(keeps),
    )


def _absorbing(dtype: np.dtype[Any]) -> float:
    """The largest fill that absorbs any score: in fp16, whose range ends before, its minimum."""
    return max(ABSORBING, float(np.finfo(dtype).min))


def _is_even_where_empty(masks: Sequence[NDArray[Any]], keeps: Sequence[NDArray[np.bool_]]) -> bool:
    """Whether a row that keeps no key hides all of them alike.

    Two minima added where two masks overlap are -inf beside a minimum: such a row spreads over the
    keys that only one of them hides, which no policy for empty rows says.
    """
    for mask, keep in zip(masks, keeps, strict=True):
        infinite = np.isneginf(mask)
        mixed = infinite.any(axis=-1) & ~infinite.all(axis=-1)
        if np.any(mixed & ~keep.any(axis=-1)):
            return False
    return True


def _absorbing_fill(
    masks: Sequence[NDArray[Any]], keeps: Sequence[NDArray[np.bool_]]
) -> Fill | Literal["none"] | None:
    """'-inf' or 'min' where every hidden entry is that one, 'none' where none is hidden."""
    kinds: set[bool] = set()
    for mask, keep in zip(masks, keeps, strict=True):
        hidden = mask[~keep]
        if hidden.size:
            infinite = np.isneginf(hidden)
            kinds |= {True} if infinite.all() else {False} if not infinite.any() else {True, False}
    if not kinds:
        return "none"
    return None if len(kinds) > 1 else "-inf" if kinds.pop() else "min"


def _slopes(
    masks: Sequence[NDArray[Any]], keeps: Sequence[NDArray[np.bool_]], heads: int
) -> tuple[float, ...] | None:
    """m with ``mask = m * t + (a number per row)`` at every kept entry, one per head.

    A number added to a whole row changes no probability, so ``m * (t - i)`` is the same bias.
    """
    found: list[float] | None = None
    for mask, keep in zip(masks, keeps, strict=True):
        whole = np.broadcast_to(mask, (mask.shape[0], heads, *mask.shape[2:])).astype(np.float64)
        kept = np.broadcast_to(keep, whole.shape)
        key = np.arange(whole.shape[-1], dtype=np.float64)
        if found is None:
            found = [_slope_of(whole[:, h], kept[:, h], key) for h in range(heads)]
        for head, slope in enumerate(found):
            rest = whole[:, head] - slope * key
            top = np.max(np.where(kept[:, head], rest, -np.inf), axis=-1)
            bottom = np.min(np.where(kept[:, head], rest, np.inf), axis=-1)
            seen = kept[:, head].any(axis=-1)
            tolerance = 2e-6 * max(1.0, abs(slope) * len(key))
            if np.any((top - bottom)[seen] > tolerance):
                return None
    return None if found is None or not any(found) else tuple(found)


def _slope_of(rows: NDArray[np.float64], kept: NDArray[np.bool_], key: NDArray[Any]) -> float:
    """The slope over the longest kept row; 0 where no row keeps two keys."""
    batch, query = np.unravel_index(np.argmax(kept.sum(axis=-1)), kept.shape[:-1])
    places = np.nonzero(kept[batch, query])[0]
    if len(places) < 2:
        return 0.0
    first, last = places[0], places[-1]
    rise = rows[batch, query, last] - rows[batch, query, first]
    return float(np.float32(rise / (key[last] - key[first])))


@dataclass(frozen=True, kw_only=True, eq=False)
class Extents:
    """What bounds the sizes worth looking at.

    Attributes:
        number: largest whole number in the mask's own computation: perhaps a window or a chunk.
        numbers: all of them, without their signs.
        reach: number of tokens at which every rule has shown; infinite where that can't be told.
        widest: the constants that hold it.
        buffers: extents of stored matrices that the mask may be cut from.
        doubtful: whole numbers held as floats, too large to be looked past: widths unless fills.
    """

    number: int
    numbers: frozenset[int]
    reach: float
    widest: tuple[ir.Value, ...]
    buffers: frozenset[int]
    doubtful: frozenset[int]


def extents(subject: Subject) -> Extents:
    """Read every constant that takes part in computing the mask."""
    context = subject.context
    holders: dict[int, list[ir.Value]] = {}
    buffers, doubtful = set[int](), set[int]()
    seen: set[ir.Value] = set()
    stack = [term.value for term in subject.terms]
    while stack:
        value = stack.pop()
        if value in seen or context.sources(value) == frozenset({value}):
            continue
        seen.add(value)
        stack.extend(context.content_inputs(value))
        array = subject.fixed.get(value, context.literal(value))
        if array is None or array.dtype.kind not in "iufb":
            continue
        if array.ndim >= 2:
            buffers |= {int(n) for n in array.shape[-2:] if n > 1}
        if array.size > 64 or array.dtype.kind == "b":
            continue
        for number in np.ravel(array):
            whole = np.isfinite(number) and float(number).is_integer()
            if not whole or abs(float(number)) >= SENTINEL:
                continue
            if array.dtype.kind == "f" and abs(number) > LARGEST:
                doubtful.add(abs(int(number)))
            else:
                holders.setdefault(abs(int(number)), []).append(value)
    number = max(holders, default=0)
    reach = reach_of(context, [term.value for term in subject.terms], subject.fixed)
    return Extents(
        number=number,
        numbers=frozenset(holders),
        reach=reach,
        widest=tuple(holders.get(number, ())),
        buffers=frozenset(buffers),
        doubtful=frozenset(doubtful),
    )


def spans(subject: Subject, sizes: Sizes) -> bool:
    """Whether the mask has a shape that fits the scores at these sizes (a buffer may be short)."""
    view = subject.context.sized(sizes)
    whole = shape_of(subject.context, sizes, subject.scores)
    if whole is None:
        return False
    for term in subject.terms:
        shape = view.shape(term.value)
        if shape is None or len(shape) > len(whole):
            return False
        if any(n not in (1, m) for n, m in zip(shape[::-1], whole[::-1], strict=False)):
            return False
    return True
