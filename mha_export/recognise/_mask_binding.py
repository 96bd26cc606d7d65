"""From mask terms over the score space to operands that broadcast to [b, h, s, t]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout, ScoreMask
from mha_export.recognise._fit import Fitting
from mha_export.recognise._mask_steps import (
    Placed,
    apart,
    is_added_to_fill,
    is_given,
    kept,
    placed_steps,
    summed_steps,
)
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._score_steps import Term
from mha_export.recognise._site import Reason
from mha_export.recognise.masks import MaskReading, MaskTerm, read_mask
from mha_export.spec import Dim, EmptyRow, MaskSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundMask:
    """The mask of a spec and the operands that carry its data.

    ``kept``: why the attention must stay as it is, where rows without keys get what no spec says.
    """

    spec: MaskSpec
    operands: dict[str, Any]
    kept: Reason | None = None


def bound_mask(fitting: Fitting, terms: Sequence[Term]) -> BoundMask | Reason:
    """The parts the terms state where they have names, else the mask as the graph holds it."""
    placed = placed_steps(fitting, terms)
    if isinstance(placed, Reason):
        return placed
    named = _named(fitting, placed)
    if named is not None:
        return named
    placed = [part for step in placed for part in apart(step, fitting)]
    steps = summed_steps(fitting, placed, terms)
    if not isinstance(steps, Reason):
        return _raw(fitting, steps)
    hiding = [replace(p, fill=-np.inf) if p.fill is not None else p for p in placed]
    named = _named(fitting, hiding)
    return steps if named is None else replace(named, kept=steps)


def _named(fitting: Fitting, placed: list[Placed]) -> BoundMask | None:
    """The terms by their meaning, as :mod:`.masks` reads it; None where no name fits."""
    draft, scene = fitting.draft, fitting.scenes[0]
    query, key, past = draft.query.heads, draft.key.heads, draft.key.past
    assert query is not None
    assert key is not None
    if draft.is_static:
        key, past = past or key, None
    asked, met = _measure(fitting, query), _measure(fitting, key)
    reading = read_mask(
        [MaskTerm(value=p.value, kind=p.kind, fill=p.fill) for p in placed],
        scores=ScoreShape(
            query=asked[0],
            key=met[0],
            heads=draft.roles.q_heads,
            query_axis=asked[1],
            key_axis=met[1],
            element=scene.dtype(draft.scores.start) or ir.DataType.FLOAT,
            past=None if past is None else past.value,
            past_axis=2 if past is None or past.layout is Layout.BHSD else 1,
        ),
        context=scene.context,
        anchor=draft.anchor.node,
        heads=draft.roles.q_heads,
        cached=past is not None,
    )
    if reading is None or not _stands_apart(reading, placed, fitting):
        return None
    operands: dict[str, Any] = {
        name: value
        for name in ("key_padding", "kv_lengths", "prefix_lengths", "document_ids")
        if (value := getattr(reading, name)) is not None
    }
    bias: ir.Value | None = None
    if reading.rest:
        if any(not _spans(fitting, term.value) for term in reading.rest):
            return None
        bias = _joined([term.value for term in reading.rest], "Add", fitting)
        operands["bias"] = bias
    named = {term.value for term in reading.rest}
    hiding = [p for p in placed if p.value not in named]
    whole = _score_mask(fitting, hiding) if reading.hides and not (named and not hiding) else None
    if whole is not None and not (named - {p.value for p in placed}):
        operands["score_mask"] = whole
    spec = MaskSpec(
        causal=reading.causal,
        left_window=reading.left_window,
        right_window=reading.right_window,
        block=reading.block,
        alibi_slopes=reading.alibi_slopes,
        padding=reading.key_padding is not None,
        lengths=reading.kv_lengths is not None,
        prefix=reading.prefix_lengths is not None,
        documents=reading.document_ids is not None,
        bias=mask_dims(fitting, bias),
        fill="-inf" if reading.fill is None else "min" if reading.replaces else reading.fill,
        empty_row=_empty_row(fitting, reading.empty_row),
    )
    return BoundMask(spec=spec, operands=operands)


def _stands_apart(reading: MaskReading, placed: Sequence[Placed], fitting: Fitting) -> bool:
    """Whether the additions that are no mask may be named apart from the parts that hide.

    Where hiding puts a finite number, an addition can be as low: one that is given from outside
    (another mask, in numbers) is, and one that comes later moves rows without keys.
    """
    if not reading.rest or reading.fill in (None, "-inf"):
        return True
    if any(is_given(term.value, fitting.scenes[0]) for term in reading.rest):
        return False
    return reading.empty_row is EmptyRow.NOT_APPLICABLE or not is_added_to_fill(placed)


def _empty_row(fitting: Fitting, softmax_alone: EmptyRow) -> EmptyRow:
    """A guard or a sink gives zero where softmax alone would not."""
    if softmax_alone is EmptyRow.NOT_APPLICABLE:
        return softmax_alone
    draft = fitting.draft
    if fitting.empty_row is not None:
        return fitting.empty_row
    if draft.scores.sink is not None:
        return EmptyRow.ZERO
    if draft.weighted.zeroed and softmax_alone is EmptyRow.NAN:
        return EmptyRow.ZERO
    return softmax_alone


def _spans(fitting: Fitting, value: ir.Value) -> bool:
    """Whether the value broadcasts to [b, h, s, t] with a last axis of all keys."""
    draft, dims = fitting.draft, fitting.scenes[0].dims(value)
    return (
        dims is not None
        and 0 < len(dims) <= 4
        and dims[-1] == draft.scores.space[draft.scores.axis]
    )


def _score_mask(fitting: Fitting, placed: list[Placed]) -> ScoreMask | None:
    """All hiding steps as one value, when they are of one kind."""
    if not placed:
        return None
    if all(p.kind == "additive" for p in placed):
        value = _joined([p.value for p in placed], "Add", fitting)
        return None if value is None else ScoreMask(value=value, kind="additive")
    if any(p.kind == "additive" for p in placed):
        return None
    value = _joined([kept(p, fitting) for p in placed], "And", fitting)
    return None if value is None else ScoreMask(value=value, kind="keep")


def _raw(fitting: Fitting, placed: list[Placed]) -> BoundMask:
    """A keep mask, a bias, or both, stated as they are."""
    draft = fitting.draft
    bias = _joined([p.value for p in placed if p.kind == "additive"], "Add", fitting)
    keeps = [p for p in placed if p.kind != "additive"]
    keep = _joined([kept(p, fitting) for p in keeps], "And", fitting)
    absolute = all(p.fill == -np.inf for p in keeps)
    row = EmptyRow.NOT_APPLICABLE
    if keep is not None:
        row = _empty_row(fitting, EmptyRow.NAN if absolute else EmptyRow.UNIFORM)
    elif bias is not None and fitting.empty_row is not None:
        row = fitting.empty_row
    elif bias is not None and (draft.weighted.zeroed or draft.scores.sink is not None):
        row = EmptyRow.ZERO
    operands = {
        name: value for name, value in (("keep", keep), ("bias", bias)) if value is not None
    }
    spec = MaskSpec(
        keep=mask_dims(fitting, keep),
        bias=mask_dims(fitting, bias),
        fill="-inf" if absolute else "min",
        empty_row=row,
    )
    return BoundMask(spec=spec, operands=operands)


def mask_dims(fitting: Fitting, value: ir.Value | None) -> tuple[Dim, ...] | None:
    """The shape as a spec states it: a number where it is one, else the role's name."""
    if value is None:
        return None
    names = ("batch", fitting.draft.roles.q_heads, "q_len", "kv_len")
    shapes = [scene.dims(value) for scene in fitting.scenes]
    first = shapes[0]
    if first is None or any(shape is None for shape in shapes):
        return names
    return tuple(
        first[axis] if len({shape[axis] for shape in shapes if shape}) == 1 else name
        for axis, name in enumerate(names[len(names) - len(first) :])
    )


def _measure(fitting: Fitting, heads: Heads) -> tuple[ir.Value, int]:
    """A value as long as ``heads`` and the axis that says so: a graph input, where one shows it.

    Masks are looked at at sizes of their own; a graph input shows its length there at once, a
    projection deep in the graph only after everything above it.
    """
    scenes = fitting.scenes
    place = length_axis(heads)
    wanted = [(scene.dims(heads.value) or (0, 0, 0))[::place][:2] for scene in scenes]
    if len(scenes) > 1 and all(len({pair[i] for pair in wanted}) > 1 for i in (0, 1)):
        for value in scenes[0].context.model.graph.inputs:
            shapes = [scene.dims(value) for scene in scenes]
            known = [shape for shape in shapes if shape]
            if len(known) != len(scenes):
                continue
            for axis in range(1, len(known[0])):
                if all((s[0], s[axis]) == w for s, w in zip(known, wanted, strict=True)):
                    return value, axis
    return heads.value, place


def length_axis(heads: Heads) -> int:
    return 2 if heads.layout is Layout.BHSD else 1


def _joined(values: list[ir.Value], op: str, fitting: Fitting) -> ir.Value | None:
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        result = fitting.derive(op, [result, value])
    return result
