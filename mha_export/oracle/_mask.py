"""Which (query, key) pairs take part, and what is added to their scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mha_export.errors import InputError
from mha_export.oracle._inputs import Array, Floats, Geometry, SideInputs
from mha_export.spec import AttentionSpec, CausalAlignment, DType

Bools = NDArray[np.bool_]

MINIMUM = {
    DType.FP16: -65504.0,
    DType.BF16: -float.fromhex("0x1.fep127"),
    DType.FP32: -float.fromhex("0x1.fffffep127"),
    DType.FP64: -float.fromhex("0x1.fffffffffffffp1023"),
}
"""The most negative finite number of each dtype."""


def query_offset(spec: AttentionSpec, side: SideInputs, geometry: Geometry) -> NDArray[np.int64]:
    """Position of query 0 among the keys, [b or 1] (the table in :mod:`mha_export.spec`)."""
    if spec.mask.causal is CausalAlignment.TOP_LEFT:
        return np.zeros(1, np.int64)
    if side.kv_lengths is not None:
        return side.kv_lengths.astype(np.int64) - geometry.s
    if spec.cache is None and spec.mask.causal is CausalAlignment.BOTTOM_RIGHT:
        return np.array([geometry.t - geometry.s], np.int64)
    return np.array([geometry.p], np.int64)


def hidden_rows(spec: AttentionSpec, side: SideInputs, geometry: Geometry, rows: slice) -> Bools:
    """True where the pair is forbidden, broadcastable to [b, h, rows, t]."""
    mask, t = spec.mask, geometry.t
    offset = query_offset(spec, side, geometry)
    i_b1s1 = (offset[:, None] + np.arange(geometry.s)[rows])[:, None, :, None]
    key = np.arange(t)
    hidden: Bools = np.zeros(t, np.bool_)
    if mask.causal is not None:
        future = key > i_b1s1
        if side.prefix_lengths is not None:
            future = future & (key >= side.prefix_lengths[:, None, None, None])
        hidden = hidden | future
    if mask.left_window is not None:
        hidden = hidden | (key < i_b1s1 - mask.left_window)
    if mask.right_window is not None:
        hidden = hidden | (key > i_b1s1 + mask.right_window)
    if mask.block is not None:
        hidden = hidden | (i_b1s1 // mask.block != key // mask.block)
    if side.document_ids is not None:
        hidden = hidden | _other_document(side.document_ids, i_b1s1)
    if side.kv_lengths is not None:
        hidden = hidden | (key >= side.kv_lengths[:, None, None, None])
    if side.key_padding is not None:
        hidden = hidden | (side.key_padding == 0)[:, None, None, :]
    if side.keep is not None:
        kept, present = _rows_of(side.keep, "keep", spec, geometry, rows)
        hidden = hidden | ~present | ~kept.astype(np.bool_)
    if side.bias is not None:
        _, present = _rows_of(side.bias, "bias", spec, geometry, rows)
        hidden = hidden | ~present
    return hidden


def additive(
    spec: AttentionSpec, side: SideInputs, geometry: Geometry, rows: slice
) -> Floats | None:
    """Bias plus ALiBi, broadcastable to [b, h, rows, t]; None for nothing."""
    total: Floats | None = None
    if side.bias is not None:
        bias, _ = _rows_of(side.bias, "bias", spec, geometry, rows)
        total = bias.astype(np.float64)
    if spec.mask.alibi_slopes is not None:
        slopes = np.array(spec.mask.alibi_slopes, np.float64)[None, :, None, None]
        offset = query_offset(spec, side, geometry)
        i_b1s1 = (offset[:, None] + np.arange(geometry.s)[rows])[:, None, :, None]
        slope = slopes * (np.arange(geometry.t) - i_b1s1)
        total = slope if total is None else total + slope
    return total


def _rows_of(
    operand: Array, name: str, spec: AttentionSpec, geometry: Geometry, rows: slice
) -> tuple[Array, Bools]:
    """The operand at rank 4 for the rows asked for, padded to t keys; and which keys it has."""
    full = (geometry.b, spec.q_heads, geometry.s, geometry.t)
    shape = (1,) * (4 - operand.ndim) + operand.shape
    broadcasts = all(have in (1, want) for have, want in zip(shape[:-1], full[:-1], strict=False))
    if len(shape) != 4 or not broadcasts or shape[-1] > geometry.t:
        raise InputError(
            f"operand {name} has shape {list(operand.shape)}; expected one that broadcasts to "
            f"{list(full)}, the last axis not beyond {geometry.t}"
        )
    array = operand.reshape(shape)
    if shape[2] != 1:
        array = array[:, :, rows]
    missing = geometry.t - shape[-1]
    padded = np.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return padded, np.arange(geometry.t) < shape[-1]


def _other_document(document_ids: Array, i_b1s1: NDArray[np.int64]) -> Bools:
    b, t = document_ids.shape
    position = np.broadcast_to(i_b1s1[:, 0, :, 0], (b, i_b1s1.shape[2]))
    if np.any(position < 0) or np.any(position >= t):
        raise InputError(
            f"document_ids know {t} positions; a query stands at "
            f"{int(position.min())}..{int(position.max())}"
        )
    own = np.take_along_axis(document_ids, position, axis=1)
    result: Bools = own[:, None, :, None] != document_ids[:, None, None, :]
    return result
