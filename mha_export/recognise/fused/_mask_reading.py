"""What a reader makes of a mask input: named parts where they can be named, else bound as it is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from mha_export.operands import ScoreMask
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise.fused._node import FusedNode
from mha_export.recognise.masks import MaskReading, MaskTerm, read_mask
from mha_export.spec import Dim, EmptyRow, MaskSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """A mask spec and the operands that carry its data (fields of :class:`Operands`)."""

    spec: MaskSpec
    operands: dict[str, Any]


def named(
    fused: FusedNode,
    mask: ir.Value,
    *,
    kind: Literal["additive", "keep"],
    scores: ScoreShape,
    cached: bool,
) -> Bound | None:
    """The mask's parts, when it is the only thing that hides keys; None where no name fits."""
    fill = -np.inf if kind == "keep" else None
    if not _spans_keys(fused, mask, scores):
        return None
    reading = read_mask(
        [MaskTerm(value=mask, kind=kind, fill=fill)],
        scores=scores,
        context=fused.context,
        anchor=fused.node,
        heads=scores.heads,
        cached=cached,
    )
    if reading is None or reading.replaces or len(reading.rest) > 1:
        return None
    return _bound(fused, reading, mask, kind)


def _spans_keys(fused: FusedNode, mask: ir.Value, scores: ScoreShape) -> bool:
    """The last axis is the keys': 1 would mean one key, not all of them."""
    shape, whole = fused.shape(mask), scores.at(fused.context.sized(fused.sizes))
    return shape is not None and whole is not None and bool(shape) and shape[-1] == whole[-1]


def _bound(
    fused: FusedNode, reading: MaskReading, mask: ir.Value, kind: Literal["additive", "keep"]
) -> Bound:
    operands: dict[str, Any] = {
        name: value
        for name in ("key_padding", "kv_lengths", "prefix_lengths", "document_ids")
        if (value := getattr(reading, name)) is not None
    }
    bias: tuple[Dim, ...] | None = None
    if reading.rest:
        operands["bias"] = reading.rest[0].value
        bias = mask_shape(fused, reading.rest[0].value)
    else:
        operands["score_mask"] = ScoreMask(value=mask, kind=kind)
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
        bias=bias,
        fill="-inf" if reading.fill is None else reading.fill,
        empty_row=reading.empty_row,
    )
    return Bound(spec=spec, operands=operands)


def mask_shape(fused: FusedNode, value: ir.Value) -> tuple[Dim, ...]:
    """The shape as a spec states it: numbers, or the graph's own names."""
    rank = fused.rank(value)
    defaults = ("batch", "q_heads", "q_len", "kv_len")[-rank:]
    concrete = fused.shape(value)
    found: list[Dim] = []
    for axis, default in enumerate(defaults):
        dim = fused.dim(value, axis, default)
        if isinstance(dim, str) and concrete is not None and concrete[axis] == 1:
            dim = 1
        found.append(dim)
    return tuple(found)


def with_empty_rows(bound: Bound, policy: EmptyRow) -> Bound:
    """The same with the node's own policy for a row in which every key is masked by -inf."""
    if bound.spec.fill != "-inf" or not bound.spec.may_empty_a_row:
        return bound
    return Bound(spec=dataclasses.replace(bound.spec, empty_row=policy), operands=bound.operands)
