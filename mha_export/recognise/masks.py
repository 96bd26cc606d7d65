"""What a mask says: its parts, read by evaluating it and comparing with the canonical masks.

All mask steps of an attention are evaluated together at several sizes and, where they read a
padding mask, lengths or document ids, with several contents of it. A part is only named when the
evaluated mask equals the canonical one entry for entry at every size and content tried; otherwise
there is no reading and the caller binds the mask as it is, which is always exact.

A padding operand is taken to hold flags (0 or 1) where the mask computes with it as a number
(``(1 - mask) * min``); where the mask tests it, the test itself is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from mha_export.recognise import _masks_data as data
from mha_export.recognise import _masks_sizes as masks_sizes
from mha_export.recognise._evaluate import Context
from mha_export.recognise._masks_hypotheses import HYPOTHESES, read_positional
from mha_export.recognise._masks_scan import (
    ABSORBING,
    LARGEST,
    Extents,
    Subject,
    extents,
    spans,
)
from mha_export.recognise._masks_terms import MaskReading, MaskTerm

__all__ = ["MaskReading", "MaskTerm", "read_mask"]


def read_mask(
    terms: Sequence[MaskTerm],
    *,
    scores: masks_sizes.Scores,
    context: Context,
    anchor: ir.Node,
    heads: int,
    permutation: Sequence[int] | None = None,
    cached: bool = False,
) -> MaskReading | None:
    """The parts that ``terms`` state exactly, or None where no name fits (bind them raw then).

    Args:
        terms: every mask step of one attention; all of them, since two steps may overlap.
        scores: the unmasked scores (any value of that shape): its sizes decide.
        context: of the graph copy; derived operands are put into it.
        anchor: a node of the attention; derived operands come before it.
        heads: number of query heads among the leading axes of ``scores``.
        permutation: takes the axes of ``scores`` to [batch..., heads..., s, t]; None: they lie so.
        cached: keys begin with a past, and query 0 stands behind it: at position t - s where
            ``scores`` does not name the past.
    """
    if not terms:
        return MaskReading()
    subject = Subject(
        terms=_steps(context, terms),
        scores=scores,
        heads=heads,
        permutation=None if permutation is None else tuple(permutation),
        cached=cached,
        context=context,
    )
    inputs = sorted(
        {v for term in terms for v in context.sources(term.value) if v.is_graph_input()},
        key=lambda v: v.name or "",
    )
    plans = _plans(subject, inputs)
    if not plans:
        return None
    key = _key(subject, plans[:2])
    if key not in context.memo:
        context.memo[key] = _read_with_rest(subject, inputs, plans, anchor)
    reading: MaskReading | None = context.memo[key]
    if reading is None or not reading.rest:
        return reading
    # the same bias computed in another layer is another value: each site binds its own
    shown = {context.signature(t.value, plans[:2]): t for t in subject.terms}
    own = [shown[context.signature(term.value, plans[:2])] for term in reading.rest]
    return replace(reading, rest=tuple(own))


def _plans(subject: Subject, inputs: Sequence[ir.Value]) -> list[masks_sizes.Sizes]:
    """The sizes to look at: those of an earlier site where they serve this one as well."""
    context = subject.context
    kept = ("mask sizes", *inputs)
    plans: list[masks_sizes.Sizes] = context.memo.get(kept, [])
    if not all(masks_sizes.shape_of(context, sizes, subject.scores) for sizes in plans[:2]):
        plans = []
    if not plans:
        found = masks_sizes.plans(context, scores=subject.scores, inputs=inputs)
        plans = [sizes for sizes in found if spans(subject, sizes)] or found
        context.memo[kept] = plans
    return plans


def _key(subject: Subject, plans: Sequence[masks_sizes.Sizes]) -> tuple[object, ...]:
    """Equal for sites whose scores and masks are the same at every size."""
    context = subject.context
    shapes = [masks_sizes.shape_of(context, sizes, subject.scores) for sizes in plans]
    terms = [(context.signature(t.value, plans), t.kind, t.fill) for t in subject.terms]
    return ("mask", *terms, *shapes, subject.heads, subject.permutation, subject.cached)


def _steps(context: Context, terms: Sequence[MaskTerm]) -> tuple[MaskTerm, ...]:
    """The terms taken apart, as far as that is the same.

    Two finite fills stay additions: where both hide, their sum is lower than either.
    """
    apart = tuple(step for term in terms for step in _summands(context, term, finite=True))
    fills = [step for step in apart if step.fill is not None and step.fill != -np.inf]
    if len(fills) < 2 or len(apart) == len(terms) == 1:
        return apart
    return tuple(step for term in terms for step in _summands(context, term, finite=False))


def _summands(context: Context, term: MaskTerm, *, finite: bool) -> Iterator[MaskTerm]:
    """The steps an addition is made of: a learned bias and the mask it was merged with.

    ``a + b`` is two additions; ``where(keep, a, fill)`` with a fill that absorbs every score is the
    addition of ``a`` and then a step that hides; a finite one only with ``finite``.
    """
    node = term.value.producer()
    if term.kind != "additive" or node is None:
        yield term
    elif node.op_type in ("Add", "Sum"):
        for value in node.inputs:
            if value is not None:
                yield from _summands(context, replace(term, value=value), finite=finite)
    elif node.op_type == "Where":
        condition, yes, no = node.inputs
        assert condition is not None
        assert yes is not None
        assert no is not None
        for other, fill, kind in ((yes, no, _KEEP), (no, yes, _HIDE)):
            number = context.literal(fill)
            if number is None or number.size != 1 or not number.item() <= ABSORBING:
                continue
            if not finite and np.isfinite(number.item()):
                continue
            zero = context.literal(other)
            if zero is None or zero.any():
                yield from _summands(context, replace(term, value=other), finite=finite)
            yield MaskTerm(value=condition, kind=kind, fill=float(number.item()))
            return
        yield term
    else:
        yield term


_KEEP: Literal["keep"] = "keep"
_HIDE: Literal["hide"] = "hide"


def _read_with_rest(
    subject: Subject,
    inputs: Sequence[ir.Value],
    plans: list[masks_sizes.Sizes],
    anchor: ir.Node,
) -> MaskReading | None:
    """All terms together; else those that are masks by themselves, the additions left over.

    An addition that hides with a number that scores can outbid is left over as well.
    """
    whole = _read(subject, inputs, plans, anchor)
    if whole is not None or len(subject.terms) == 1:
        return whole
    named, rest = list[MaskTerm](), list[MaskTerm]()
    for term in subject.terms:
        alone = replace(subject, terms=(term,))
        is_rest = term.kind == "additive" and _adds(_read(alone, inputs, plans, anchor))
        (rest if is_rest else named).append(term)
    if not named or not rest:
        return None
    reading = _read(replace(subject, terms=tuple(named)), inputs, plans, anchor)
    if reading is None or not reading.hides:
        return None
    return replace(reading, rest=tuple(rest))


def _adds(reading: MaskReading | None) -> bool:
    """Whether an addition is no mask, or one whose fill is a number of the size of scores."""
    if reading is None:
        return True
    return isinstance(reading.fill, float) and reading.fill > ABSORBING


def _read(
    subject: Subject,
    inputs: Sequence[ir.Value],
    plans: list[masks_sizes.Sizes],
    anchor: ir.Node,
) -> MaskReading | None:
    bounds = extents(subject)
    if not masks_sizes.symbols_of(subject.context.model.graph).lengths:
        return _tried(subject, plans, [], anchor)  # there is no other size to be wrong at
    if bounds.number + 3 > LARGEST and not bounds.buffers:
        return _read_wide(subject, inputs, bounds, plans, anchor)
    return _read_far(subject, inputs, bounds, plans, anchor)


def _read_far(
    subject: Subject,
    inputs: Sequence[ir.Value],
    bounds: Extents,
    plans: list[masks_sizes.Sizes],
    anchor: ir.Node,
) -> MaskReading | None:
    """What the mask is at ordinary sizes and as far as its rules change."""
    large = _large_plans(subject, bounds, inputs, plans)
    if large is None:
        return None
    try:
        return _certain(_tried(subject, plans, large, anchor), bounds.doubtful)
    finally:
        for sizes in large:
            subject.context.forget(sizes)


def _certain(reading: MaskReading | None, doubtful: frozenset[int]) -> MaskReading | None:
    """Not a reading that leaves a large number unexplained: it may be a window not yet seen."""
    if reading is None:
        return None
    fill = reading.fill
    explained = {abs(int(fill))} if isinstance(fill, float) else {65504}
    return reading if doubtful <= explained else None


def _read_wide(
    subject: Subject,
    inputs: Sequence[ir.Value],
    bounds: Extents,
    plans: list[masks_sizes.Sizes],
    anchor: ir.Node,
) -> MaskReading | None:
    """A mask that names a number too large to look at: what would it be with small numbers?

    The number is given two other values, larger than any other, and what is read must follow it
    one for one.
    """
    others = _with_number(subject, bounds, 1)
    beyond = math.inf if others is None else extents(others).reach
    if not beyond <= LARGEST:
        return None
    readings: list[MaskReading] = []
    numbers = (math.ceil(beyond) + 1, math.ceil(beyond) + 2)
    for number in numbers:
        narrow = _with_number(subject, bounds, number)
        assert narrow is not None
        found = _read_far(narrow, inputs, extents(narrow), plans, anchor)
        if found is None or _certain(found, bounds.doubtful) is None:
            return None
        readings.append(found)
    first, second = readings
    step = numbers[1] - numbers[0]
    widths = {}
    for name in ("left_window", "right_window", "block"):
        before, after = getattr(first, name), getattr(second, name)
        if before == after:
            continue
        if before is None or after is None or after - before != step:
            return None
        widths[name] = before + bounds.number - numbers[0]
    return replace(first, **widths) if _alike(first, second, widths) else None


def _with_number(subject: Subject, bounds: Extents, number: int) -> Subject | None:
    """The mask with ``number`` in place of its largest; None where a table holds that."""
    fixed: dict[ir.Value, np.ndarray] = {}
    for value in bounds.widest:
        array = subject.context.literal(value)
        if array is None or array.size != 1 or array.dtype.kind not in "iu":
            return None
        fixed[value] = np.full_like(array, number * np.sign(array))
    return replace(subject, fixed=fixed)


def _alike(left: MaskReading, right: MaskReading, but: Mapping[str, int]) -> bool:
    """Equal in every field but some."""
    return all(
        getattr(left, one.name) == getattr(right, one.name)
        for one in fields(MaskReading)
        if one.name not in but
    )


def _tried(
    subject: Subject,
    plans: Sequence[masks_sizes.Sizes],
    large: Sequence[masks_sizes.Sizes],
    anchor: ir.Node,
) -> MaskReading | None:
    """The first hypothesis that holds for the first value that decides the mask."""
    values = [term.value for term in subject.terms]
    if not any(subject.context.sources(value) for value in values):
        return read_positional(subject, plans, large)
    inverted: MaskReading | None = None
    for cut in data.cuts(subject.context, values)[:16]:
        for hypothesis in HYPOTHESES:
            found = hypothesis(subject, cut, plans, large, anchor)
            if found is not None and not found.derived:
                return found.reading
            inverted = inverted or (None if found is None else found.reading)
    return inverted


def _large_plans(
    subject: Subject,
    bounds: Extents,
    inputs: Sequence[ir.Value],
    plans: Sequence[masks_sizes.Sizes],
) -> list[masks_sizes.Sizes] | None:
    """Sizes that show every rule the mask may have; None where those are too large to look at.

    A mask cut from a stored matrix is looked at as far as the matrix goes.
    """
    context = subject.context
    shapes = [masks_sizes.shape_of(context, sizes, subject.scores) or (0,) for sizes in plans]
    shown = max(shape[-1] for shape in shapes)
    queries = max(shape[-2:][0] for shape in shapes)

    def fitting(found: masks_sizes.Sizes | None) -> masks_sizes.Sizes | None:
        if found is None or spans(subject, found):
            return found
        context.forget(found)
        return None

    def sized(keys: int) -> masks_sizes.Sizes | None:
        return fitting(
            masks_sizes.enlarged(context, plans[0], scores=subject.scores, inputs=inputs, keys=keys)
        )

    def squared(few: masks_sizes.Sizes) -> list[masks_sizes.Sizes]:
        found = masks_sizes.squared(context, few, scores=subject.scores, inputs=inputs)
        square = fitting(found)
        return [] if square is None else [square]

    wanted = {n for n in bounds.buffers if n > shown}
    reach = max(bounds.number, bounds.reach) + 3
    if reach <= LARGEST:
        wanted |= {math.ceil(reach)} if reach > shown else set()
    elif not wanted or sized(max(wanted) + 1) is not None:
        return None  # no matrix ends it before
    if any(keys > LARGEST for keys in wanted):
        return None
    for keys in sorted(wanted, reverse=True):
        found = sized(keys)
        if found is not None:
            return [found, *squared(found)]
    few = sized(math.ceil(reach)) if queries < reach <= LARGEST else None
    if few is None:
        return []
    square = squared(few)
    context.forget(few)
    return square
