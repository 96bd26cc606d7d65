"""Hypotheses about what a mask reads, each tested exactly against the evaluated mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise import _masks_data as data
from mha_export.recognise._masks_canonical import Observed, Structure, find_structure
from mha_export.recognise._masks_scan import (
    Decoded,
    Sight,
    Subject,
    decode,
    extents,
    geometry,
    look,
)
from mha_export.recognise._masks_sizes import Sizes
from mha_export.recognise._masks_terms import MaskReading
from mha_export.spec import CausalAlignment, EmptyRow

Keep = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A reading; ``derived``: its flags had to be turned round, so plainer ones are preferred."""

    reading: MaskReading
    derived: bool = False


Hypothesis = Callable[[Subject, ir.Value, Sequence[Sizes], Sequence[Sizes], ir.Node], Found | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """One content of the operand at one pair of sizes, and the mask it gave."""

    feed: NDArray[Any]
    sight: Sight


def read_positional(
    subject: Subject, plans: Sequence[Sizes], large: Sequence[Sizes]
) -> MaskReading | None:
    """A mask that reads nothing but sizes."""
    sights = [look(subject, sizes) for sizes in plans]
    wide = [look(subject, sizes) for sizes in large]
    seen = [sight for sight in sights if sight is not None]
    if not seen or any(sight is None for sight in wide):
        return None
    seen += [sight for sight in wide if sight is not None]
    decoded = decode(seen, subject)
    if decoded is None:
        return None
    structure = _structure(decoded.keeps, seen)
    return None if structure is None else _reading(structure, decoded)


def _read_padding(
    subject: Subject,
    cut: ir.Value,
    plans: Sequence[Sizes],
    large: Sequence[Sizes],
    anchor: ir.Node,
) -> Found | None:
    """``keep = positions & padding``: a [b, t] operand of flags, as it is or inverted."""
    dtype = data.dtype_of(cut)
    if dtype is None or not _is_per_key(subject, cut, plans[0]):
        return None
    set_flags = _first_look(subject, cut, dtype, plans[0], 1)
    if set_flags is None:
        return None
    inverted = not any(keep.any() for keep in set_flags.keeps)
    trials = _trials(subject, cut, dtype, plans, large, data.padding_feeds, invert=inverted)
    decoded = decode([trial.sight for trial in trials], subject) if trials else None
    split = None if decoded is None else _split_padding(trials, decoded)
    if decoded is None or split is None:
        return None
    if not _reads_flags(subject, cut, dtype, plans[0], split, inverted):
        return None
    structure, reads = split
    reading = _reading(structure, decoded, empties=reads)
    if not reads:
        # flags have no other content; numbers that showed nothing may at another size of theirs
        return Found(reading=reading) if dtype is ir.DataType.BOOL else None
    operand = _flag_operand(subject, cut, dtype, inverted, anchor)
    return Found(reading=replace(reading, key_padding=operand), derived=operand is not cut)


def _first_look(
    subject: Subject, cut: ir.Value, dtype: ir.DataType, sizes: Sizes, number: int
) -> Decoded | None:
    """One content, the same everywhere: what is no mask then need not be looked at further."""
    extent = subject.context.sized(sizes).shape(cut)
    if extent is None:
        return None
    sight = look(subject, sizes, {cut: np.full(extent, number).astype(dtype.numpy())})
    return None if sight is None else decode([sight], subject)


def _split_padding(trials: Sequence[_Trial], decoded: Decoded) -> tuple[Structure, bool] | None:
    """The positional part, and whether the operand is read at all; None where it is not padding."""
    rules = _rules(trials, decoded, lambda feed: bool(feed.all()))
    if rules is None:
        return None
    masked = ignored = True
    for trial, keep in zip(trials, decoded.keeps, strict=True):
        rule = rules[keep.shape[2:]].keep[None, None]
        masked = masked and _equal(rule & (trial.feed != 0)[:, None, None, :], keep)
        ignored = ignored and _equal(rule, keep)
    structure = find_structure(list(rules.values())) if masked or ignored else None
    return None if structure is None else (structure, not ignored)


def _reads_flags(
    subject: Subject,
    cut: ir.Value,
    dtype: ir.DataType,
    sizes: Sizes,
    split: tuple[Structure, bool],
    inverted: bool,
) -> bool:
    """Whether integers beyond 0 and 1 mean "not zero", or can't be meant at all.

    ``ids == 1`` agrees with an inverted flag on 0 and 1 and is something else: it is told by what
    it makes of other integers. Arithmetic on flags makes of them what is no mask.
    """
    if dtype is ir.DataType.BOOL:
        return True
    batch, queries, keys = geometry(subject, sizes)
    feed = data.rich_feed(batch, keys, extents(subject).numbers)
    sight = look(subject, sizes, {cut: feed.astype(dtype.numpy())})
    flat = look(subject, sizes, {cut: np.full_like(feed, not inverted).astype(dtype.numpy())})
    if sight is None or flat is None:
        return False
    decoded = decode([flat, sight], subject)
    if decoded is None:
        return True
    structure, reads = split
    offset = Observed(keep=decoded.keeps[0][0, 0], past=sight.past).offset(structure.causal)
    rule = structure.pattern(queries, keys, offset)[None, None]
    flags = ((feed == 0) if inverted else (feed != 0))[:, None, None, :]
    return _equal(rule & flags if reads else rule, decoded.keeps[1])


def _read_documents(
    subject: Subject,
    cut: ir.Value,
    plans: Sequence[Sizes],
    large: Sequence[Sizes],
    anchor: ir.Node,
) -> Found | None:
    """``keep = positions & (ids[i] == ids[t])``: a [b, t] operand of document numbers."""
    dtype = data.dtype_of(cut)
    if dtype is None or not dtype.is_integer() or not _is_per_key(subject, cut, plans[0]):
        return None
    if _first_look(subject, cut, dtype, plans[0], 1) is None:
        return None
    trials = _trials(subject, cut, dtype, plans, large, data.document_feeds)
    decoded = decode([trial.sight for trial in trials], subject) if trials else None
    if decoded is None:
        return None
    rules = _rules(trials, decoded, lambda feed: len(np.unique(feed)) == 1)
    structure = None if rules is None else find_structure(list(rules.values()))
    if rules is None or structure is None:
        return None
    for trial, keep in zip(trials, decoded.keeps, strict=True):
        one = rules[keep.shape[2:]]
        offset = one.offset(structure.causal)
        if offset < 0 or offset + one.queries > one.keys:
            return None
        own = trial.feed[:, offset : offset + one.queries]
        same = own[:, None, :, None] == trial.feed[:, None, None, :]
        if not _equal(one.keep[None, None] & same, keep):
            return None
    return Found(reading=replace(_reading(structure, decoded), document_ids=cut))


def _read_lengths(
    subject: Subject,
    cut: ir.Value,
    plans: Sequence[Sizes],
    large: Sequence[Sizes],
    anchor: ir.Node,
) -> Found | None:
    """``keep = positions & (t < length)``: a [b] operand; query 0 stands at ``length - s``."""
    trials, dtype = _per_batch_trials(subject, cut, plans, large)
    decoded = decode([trial.sight for trial in trials], subject) if trials else None
    if decoded is None or dtype is None:
        return None
    rules = _rules(trials, decoded, lambda feed: False, whole=True)
    structure = None if rules is None else find_structure(list(rules.values()))
    if structure is None:
        return None
    aligned = [structure]
    if structure.causal is not None:
        aligned.append(replace(structure, causal=CausalAlignment.BOTTOM_RIGHT))
    for candidate in aligned:
        if all(
            _equal(_within(candidate, trial.feed, keep), keep)
            for trial, keep in zip(trials, decoded.keeps, strict=True)
        ):
            operand = _whole_numbers(subject, cut, dtype, anchor)
            reading = replace(_reading(candidate, decoded, empties=True), kv_lengths=operand)
            return Found(reading=reading)
    return None


def _within(structure: Structure, lengths: NDArray[Any], keep: Keep) -> Keep:
    queries, keys = keep.shape[2:]
    fixed = structure.causal is CausalAlignment.TOP_LEFT
    rows = [
        structure.pattern(queries, keys, 0 if fixed else int(n) - queries) & (np.arange(keys) < n)
        for n in lengths
    ]
    return np.stack(rows)[:, None]


def _read_prefix(
    subject: Subject,
    cut: ir.Value,
    plans: Sequence[Sizes],
    large: Sequence[Sizes],
    anchor: ir.Node,
) -> Found | None:
    """``keep = causal | (t < prefix)``: a [b] operand, the length of what all queries see."""
    trials, dtype = _per_batch_trials(subject, cut, plans, large)
    decoded = decode([trial.sight for trial in trials], subject) if trials else None
    if decoded is None or dtype is None:
        return None
    rules = _rules(trials, decoded, lambda feed: not feed.any())
    structure = None if rules is None else find_structure(list(rules.values()))
    if rules is None or structure is None or structure != Structure(causal=structure.causal):
        return None
    for trial, keep in zip(trials, decoded.keeps, strict=True):
        rule = rules[keep.shape[2:]].keep[None, None]
        first = np.arange(keep.shape[3]) < trial.feed[:, None]
        if not _equal(rule | first[:, None, None, :], keep):
            return None
    operand = _whole_numbers(subject, cut, dtype, anchor)
    return Found(reading=replace(_reading(structure, decoded), prefix_lengths=operand))


HYPOTHESES: tuple[Hypothesis, ...] = (_read_padding, _read_documents, _read_lengths, _read_prefix)


def _trials(
    subject: Subject,
    cut: ir.Value,
    dtype: ir.DataType,
    plans: Sequence[Sizes],
    large: Sequence[Sizes],
    feeds: Callable[[int, int], Iterable[NDArray[Any]]],
    *,
    invert: bool = False,
) -> list[_Trial]:
    """Every feed at the ordinary sizes, two of them at the large; none where those fail."""
    trials: list[_Trial] = []
    for sizes in [*plans, *large]:
        batch, _, keys = geometry(subject, sizes)
        extent = subject.context.sized(sizes).shape(cut)
        given = list(feeds(batch, keys))
        for feed in (given[0], given[-2]) if sizes in large else given:
            content = (1 - feed if invert else feed).astype(dtype.numpy())
            if extent is None or content.size != int(np.prod(extent)):
                return []
            sight = look(subject, sizes, {cut: content.reshape(extent)})
            if sight is None:
                return []
            trials.append(_Trial(feed=feed, sight=sight))
    return trials


def _per_batch_trials(
    subject: Subject, cut: ir.Value, plans: Sequence[Sizes], large: Sequence[Sizes]
) -> tuple[list[_Trial], ir.DataType | None]:
    dtype = data.dtype_of(cut)
    if dtype is None or not dtype.is_integer():
        return [], None
    batch, _, keys = geometry(subject, plans[0])
    if subject.context.sized(plans[0]).shape(cut) not in ((batch,), (batch, 1)):
        return [], None
    if _first_look(subject, cut, dtype, plans[0], keys) is None:
        return [], None
    return _trials(subject, cut, dtype, plans, large, data.length_feeds), dtype


def _rules(
    trials: Sequence[_Trial],
    decoded: Decoded,
    plain: Callable[[NDArray[Any]], bool],
    *,
    whole: bool = False,
) -> dict[tuple[int, ...], Observed] | None:
    """Per pair of sizes, the mask under a feed that hides nothing; None where one has none.

    ``whole``: the feed is the number of keys itself, and query 0 stands at ``t - s``.
    """
    rules: dict[tuple[int, ...], Observed] = {}
    for trial, keep in zip(trials, decoded.keeps, strict=True):
        shape = keep.shape[2:]
        if shape in rules:
            continue
        if not (bool((trial.feed == shape[1]).all()) if whole else plain(trial.feed)):
            continue
        if not _equal(keep[:1, :1], keep):
            return None
        past = shape[1] - shape[0] if whole else trial.sight.past
        rules[shape] = Observed(keep=np.ascontiguousarray(keep[0, 0]), past=past)
    return rules if all(keep.shape[2:] in rules for keep in decoded.keeps) else None


def _equal(left: Keep, right: Keep) -> bool:
    """Equal where broadcast against each other."""
    return bool(np.all(left == right))


def _structure(keeps: Sequence[Keep], sights: Sequence[Sight]) -> Structure | None:
    observed: list[Observed] = []
    for keep, sight in zip(keeps, sights, strict=True):
        if not _equal(keep[:1, :1], keep):
            return None
        observed.append(Observed(keep=keep[0, 0], past=sight.past))
    return find_structure(observed)


def _reading(structure: Structure, decoded: Decoded, *, empties: bool = False) -> MaskReading:
    empty = EmptyRow.NOT_APPLICABLE
    if empties and decoded.fill is not None:
        empty = _EMPTY.get(str(decoded.fill), EmptyRow.FINITE)
        if decoded.replaces:
            empty = EmptyRow.UNIFORM
    return MaskReading(
        causal=structure.causal,
        left_window=structure.left_window,
        right_window=structure.right_window,
        block=structure.block,
        alibi_slopes=decoded.slopes,
        fill=decoded.fill,
        replaces=decoded.replaces,
        empty_row=empty,
    )


_EMPTY = {"-inf": EmptyRow.NAN, "min": EmptyRow.UNIFORM}


def _is_per_key(subject: Subject, cut: ir.Value, sizes: Sizes) -> bool:
    batch, _, keys = geometry(subject, sizes)
    return subject.context.sized(sizes).shape(cut) == (batch, keys)


def _flag_operand(
    subject: Subject, cut: ir.Value, dtype: ir.DataType, inverted: bool, anchor: ir.Node
) -> ir.Value:
    """The operand itself, or a boolean computed from it: turned round, or from floats."""
    context = subject.context
    if not inverted and not dtype.is_floating_point():
        return cut
    if dtype is ir.DataType.BOOL:
        (operand,) = context.derive("Not", [cut], before=anchor)
    elif inverted:
        zero = np.zeros((), dtype.numpy())
        (operand,) = context.derive("Equal", [cut, zero], before=anchor)
    else:
        to = {"to": int(ir.DataType.BOOL)}
        (operand,) = context.derive("Cast", [cut], to, before=anchor)
    operand.type = ir.TensorType(ir.DataType.BOOL)
    operand.shape = cut.shape
    return operand


def _whole_numbers(
    subject: Subject, cut: ir.Value, dtype: ir.DataType, anchor: ir.Node
) -> ir.Value:
    """[b] int64, computed where the operand is of another type or shape."""
    operand = cut
    if dtype is not ir.DataType.INT64:
        to = {"to": int(ir.DataType.INT64)}
        (operand,) = subject.context.derive("Cast", [cut], to, before=anchor)
        operand.type = ir.TensorType(ir.DataType.INT64)
        operand.shape = cut.shape
    if cut.shape is not None and len(cut.shape) == 1:
        return operand
    target = np.asarray([-1], np.int64)
    (flat,) = subject.context.derive("Reshape", [operand, target], before=anchor)
    flat.type = ir.TensorType(ir.DataType.INT64)
    return flat
