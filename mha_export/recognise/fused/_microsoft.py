"""What the ``com.microsoft`` attention ops have in common: masks, packed projections, causality.

Their CPU kernel (ONNX Runtime 1.32) adds ``mask_filter_value`` (-10000 unless stated) where a mask
is 0, and writes the dtype's minimum above the causal diagonal, which starts at the past length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise.fused._mask_reading import (
    Bound,
    beside,
    mask_shape,
    named,
    with_empty_rows,
)
from mha_export.recognise.fused._node import FusedNode, short
from mha_export.spec import CausalAlignment, Dim, EmptyRow, MaskSpec


def masked(
    fused: FusedNode,
    *,
    mask: ir.Value | None,
    bias: ir.Value | None,
    causal: CausalAlignment | None,
    batch: ir.Value,
    scores: ScoreShape,
    sinks: bool = False,
) -> Bound:
    """Flags or lengths, an attention bias and causality as one mask spec.

    A bias that is all there is, is read for what it means.

    A finite filter beside the causal minimum is two fills; the flags are then bound as a bias.
    """
    if mask is None:
        return _bias_alone(fused, bias, causal, scores, sinks=sinks)
    filler = short(fused.number("mask_filter_value", -10000.0))
    rank = _rank_of_mask(fused, mask, batch)
    if causal is None and rank < 3:
        return _lengths_or_flags(fused, mask, bias, rank, filler)
    if rank == 1:
        fused.refuse(
            "lengths-and-causal",
            "lengths are filled with a finite number and the future with the dtype's minimum",
            "give the lengths as a [batch, keys] mask",
            value=mask,
        )
    flags = _as_bias(fused, mask, rank, filler)
    total = flags if bias is None else fused.derive("Add", [bias, flags], dtype=bias.dtype)
    heads, rows, keys = _spread(fused, mask, bias, rank)
    spec = MaskSpec(
        causal=causal,
        bias=(fused.dim(mask, 0, "batch"), heads, rows, keys),
        fill=_fill(causal),
        empty_row=EmptyRow.NAN,
    )
    return Bound(spec=spec, operands={"bias": total})


def _bias_alone(
    fused: FusedNode,
    bias: ir.Value | None,
    causal: CausalAlignment | None,
    scores: ScoreShape,
    *,
    sinks: bool,
) -> Bound:
    if bias is None:
        spec = MaskSpec(causal=causal, fill=_fill(causal), empty_row=EmptyRow.NOT_APPLICABLE)
        return Bound(spec=spec, operands={})
    cached = scores.past is not None
    read = named(fused, bias, kind="additive", scores=scores, cached=cached)
    if read is not None and (causal is None or _leaves_every_row_a_key(read.spec)):
        found = beside(MaskSpec(causal=causal), read, sinks=sinks)
        if found is not None:
            return with_empty_rows(found, EmptyRow.NAN, sinks=sinks)
    spec = MaskSpec(
        causal=causal,
        bias=mask_shape(fused, bias),
        fill=_fill(causal),
        empty_row=EmptyRow.ZERO if sinks else EmptyRow.NOT_APPLICABLE,
    )
    return Bound(spec=spec, operands={"bias": bias})


def _fill(causal: CausalAlignment | None) -> Literal["-inf", "min"]:
    """What the kernel hides the future with, where there is one."""
    return "-inf" if causal is None else "min"


def _rank_of_mask(fused: FusedNode, mask: ir.Value, batch: ir.Value) -> int:
    rank = fused.rank(mask)
    if rank == 1 and not _same_length(fused, mask, batch):
        fused.refuse(
            "mask-index",
            f"{mask.name} holds start and end positions, not one length per sequence",
            "give a [batch, keys] mask of 0 and 1",
            value=mask,
        )
    if rank not in (1, 2, 3):
        fused.refuse("mask-rank", f"{mask.name} has rank {rank}; expected 1 to 3", value=mask)
    return rank


def _lengths_or_flags(
    fused: FusedNode, mask: ir.Value, bias: ir.Value | None, rank: int, filler: float
) -> Bound:
    operands = {"kv_lengths": as_int64(fused, mask)} if rank == 1 else {"key_padding": mask}
    shape = None
    if bias is not None:
        operands["bias"], shape = bias, mask_shape(fused, bias)
    spec = MaskSpec(
        bias=shape,
        lengths=rank == 1,
        padding=rank == 2,
        fill=filler,
        empty_row=EmptyRow.FINITE,
    )
    return Bound(spec=spec, operands=operands)


def _spread(
    fused: FusedNode, mask: ir.Value, bias: ir.Value | None, rank: int
) -> tuple[Dim, Dim, Dim]:
    """Heads, rows and keys of the flags and the bias together."""
    if bias is not None:
        _, heads, rows, keys = mask_shape(fused, bias)
        return heads, rows, keys
    rows = 1 if rank == 2 else fused.dim(mask, 1, "q_len")
    return 1, rows, fused.dim(mask, rank - 1, "kv_len")


def _leaves_every_row_a_key(mask: MaskSpec) -> bool:
    """Whether it is all the same with what the future is hidden: the dtype's minimum or -inf."""
    return not mask.may_empty_a_row and mask.bias is None and mask.alibi_slopes is None


def _same_length(fused: FusedNode, mask: ir.Value, batch: ir.Value) -> bool:
    own, whole = fused.shape(mask), fused.shape(batch)
    return own is not None and whole is not None and own[0] == whole[0]


def as_int64(fused: FusedNode, value: ir.Value) -> ir.Value:
    """The same whole numbers as int64."""
    if value.dtype is ir.DataType.INT64:
        return value
    shape = None if value.shape is None else list(value.shape)
    return fused.derive(
        "Cast",
        [value],
        {"to": int(ir.DataType.INT64)},
        dtype=ir.DataType.INT64,
        shape=shape,  # type: ignore[arg-type]
    )


def _as_bias(fused: FusedNode, mask: ir.Value, rank: int, filler: float) -> ir.Value:
    """[b, 1, 1 or s, t]: 0 where the flag is set, the filter elsewhere."""
    dtype = fused.element(fused.required(0, "query")) or ir.DataType.FLOAT
    flags = fused.derive("Cast", [mask], {"to": int(ir.DataType.BOOL)}, dtype=ir.DataType.BOOL)
    axes = np.asarray([1, 2] if rank == 2 else [1], np.int64)
    placed = fused.derive("Unsqueeze", [flags, axes], dtype=ir.DataType.BOOL)
    zero, fill = np.zeros((), dtype.numpy()), np.asarray(filler, dtype.numpy())
    return fused.derive("Where", [placed, zero, fill], dtype=dtype)


def split_last(fused: FusedNode, value: ir.Value, widths: Sequence[int]) -> tuple[ir.Value, ...]:
    """Parts of the last axis, of the widths given."""
    lead = list(value.shape)[:-1] if value.shape is not None else None
    parts = fused.context.derive(
        "Split",
        [value, np.asarray(widths, np.int64)],
        {"axis": -1},
        before=fused.node,
        outputs=len(widths),
    )
    for part, width in zip(parts, widths, strict=True):
        if value.dtype is not None:
            part.type = ir.TensorType(value.dtype)
        if lead is not None:
            part.shape = ir.Shape([*lead, width])
    return parts


def stacked(fused: FusedNode, value: ir.Value, count: int) -> tuple[ir.Value, ...]:
    """The ``count`` tensors stacked on axis 3 of [b, s, h, count, d], each [b, s, h, d]."""
    dims = None if value.shape is None else list(value.shape)
    parts = []
    for index in range(count):
        chosen = np.asarray(index, np.int64)
        shape = None if dims is None else [dims[0], dims[1], dims[2], dims[4]]
        parts.append(
            fused.derive(
                "Gather",
                [value, chosen],
                {"axis": 3},
                dtype=value.dtype,
                shape=shape,  # type: ignore[arg-type]
            )
        )
    return tuple(parts)


def biased(fused: FusedNode, heads: Heads, bias: ir.Value, start: int) -> Heads:
    """``heads`` plus its part of the packed projection bias."""
    width = heads.heads * heads.dim
    bounds = [np.asarray([n], np.int64) for n in (start, start + width, 0)]
    part = fused.derive("Slice", [bias, *bounds], dtype=bias.dtype, shape=[width])
    dims = None if heads.value.shape is None else list(heads.value.shape)
    total = fused.derive(
        "Add",
        [heads.value, part],
        dtype=heads.value.dtype,
        shape=dims,  # type: ignore[arg-type]
    )
    return Heads(value=total, layout=Layout.BSM, heads=heads.heads, dim=heads.dim)


def scale_of(fused: FusedNode) -> float | None:
    """The stated scale; 0 and absent both mean the default."""
    stated = fused.number("scale", 0.0)
    return None if stated == 0.0 else short(stated)
