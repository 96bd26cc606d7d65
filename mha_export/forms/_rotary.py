"""Rotary position embedding around a form: as one op where there is one, else in plain ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.forms._layout import Sizes, as_layout, four_dimensional, ints, unsqueeze
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout, RotaryTables
from mha_export.spec import AttentionSpec, RotarySpec, RotaryStyle


@dataclass(frozen=True, kw_only=True)
class _Tables:
    cos: ir.Value
    sin: ir.Value
    position_ids: ir.Value | None


def rotate_query(
    scope: Scope, spec: AttentionSpec, sizes: Sizes, heads: Heads, tables: RotaryTables, *, op: bool
) -> Heads:
    """The queries, rotated by the tables of the query positions.

    ``op``: use RotaryEmbedding-23 where the opset and the rotated channels allow it.
    """
    own = _Tables(cos=tables.cos, sin=tables.sin, position_ids=tables.position_ids)
    return _rotate(scope, spec, sizes, heads, _halved(scope, spec, own, tables), op=op)


def rotate_key(
    scope: Scope, spec: AttentionSpec, sizes: Sizes, heads: Heads, tables: RotaryTables, *, op: bool
) -> Heads:
    """The keys, rotated by their own tables where they have some, else by the queries'."""
    own = _Tables(cos=tables.cos, sin=tables.sin, position_ids=tables.position_ids)
    if tables.key_cos is not None:
        assert tables.key_sin is not None
        own = _Tables(cos=tables.key_cos, sin=tables.key_sin, position_ids=None)
    return _rotate(scope, spec, sizes, heads, _halved(scope, spec, own, tables), op=op)


def _halved(scope: Scope, spec: AttentionSpec, own: _Tables, given: RotaryTables) -> _Tables:
    """Tables of width r/2: a full-width table holds each pair's angle twice."""
    if given.half_width:
        return own
    rotary = _rotary_of(spec)
    half, full = rotary.dim // 2, rotary.dim
    start, end, step = (0, half, 1) if rotary.style is RotaryStyle.HALF else (0, full, 2)

    def narrow(table: ir.Value) -> ir.Value:
        inputs = [table, *(ints(scope, n) for n in (start, end, -1, step))]
        return scope.op("Slice", inputs, dtype=table.dtype)

    return _Tables(cos=narrow(own.cos), sin=narrow(own.sin), position_ids=own.position_ids)


def _rotate(
    scope: Scope, spec: AttentionSpec, sizes: Sizes, heads: Heads, tables: _Tables, *, op: bool
) -> Heads:
    if op and scope.opset >= 23 and spec.rotary_offset == 0:
        return _rotate_op(scope, _rotary_of(spec), sizes, heads, tables)
    return _rotate_plain(scope, spec, heads, tables)


def _rotate_op(
    scope: Scope, rotary: RotarySpec, sizes: Sizes, heads: Heads, tables: _Tables
) -> Heads:
    """RotaryEmbedding-23: 3-D or [b, h, s, d] in, the same out."""
    if heads.layout is Layout.BSHD:
        heads = as_layout(scope, heads, Layout.BSM)
    attributes: dict[str, int] = {}
    if rotary.style is RotaryStyle.INTERLEAVED:
        attributes["interleaved"] = 1
    if rotary.dim != heads.dim:
        attributes["rotary_embedding_dim"] = rotary.dim
    if heads.layout is Layout.BSM:
        attributes["num_heads"] = heads.heads
    cos, sin = tables.cos, tables.sin
    if tables.position_ids is None:
        # The op wants one table a batch row; one shared by all rows is expanded.
        shape = scope.op(
            "Concat", [sizes.batch, ints(scope, 1, 1)], {"axis": 0}, dtype=ir.DataType.INT64
        )
        cos, sin = (scope.op("Expand", [x, shape], dtype=x.dtype) for x in (cos, sin))
    inputs = [heads.value, cos, sin, tables.position_ids]
    value = scope.op("RotaryEmbedding", inputs, attributes, dtype=heads.value.dtype)
    return Heads(value=value, layout=heads.layout, heads=heads.heads, dim=heads.dim)


def _rotate_plain(scope: Scope, spec: AttentionSpec, heads: Heads, tables: _Tables) -> Heads:
    """``(x, y) -> (x cos - y sin, y cos + x sin)`` with Split, Mul and Concat."""
    rotary = _rotary_of(spec)
    heads = four_dimensional(scope, heads)
    dtype = heads.value.dtype
    head_axis = 1 if heads.layout is Layout.BHSD else 2
    cos, sin = (
        unsqueeze(scope, _rows(scope, table, tables.position_ids), head_axis)
        for table in (tables.cos, tables.sin)
    )
    before, after = _around(spec)
    if rotary.style is RotaryStyle.HALF:
        sizes = [before, rotary.dim // 2, rotary.dim // 2, after]
        parts = _split(scope, heads.value, sizes, axis=-1)
        x, y = parts[1], parts[2]
    else:
        parts = _split(scope, heads.value, [before, rotary.dim, after], axis=-1)
        pairs = scope.op("Reshape", [parts[1], ints(scope, 0, 0, 0, -1, 2)], dtype=dtype)
        one, other = _split(scope, pairs, [1, 1], axis=4)
        x, y = (scope.op("Squeeze", [part, ints(scope, 4)], dtype=dtype) for part in (one, other))
    assert x is not None
    assert y is not None

    def combine(op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        left = scope.op("Mul", [a, cos], dtype=dtype)
        right = scope.op("Mul", [b, sin], dtype=dtype)
        return scope.op(op_type, [left, right], dtype=dtype)

    real, imaginary = combine("Sub", x, y), combine("Add", y, x)
    if rotary.style is RotaryStyle.HALF:
        turned = [real, imaginary]
    else:
        both = [unsqueeze(scope, part, 4) for part in (real, imaginary)]
        pairs = scope.op("Concat", both, {"axis": 4}, dtype=dtype)
        turned = [scope.op("Reshape", [pairs, ints(scope, 0, 0, 0, rotary.dim)], dtype=dtype)]
    pieces = [part for part in (parts[0], *turned, parts[-1]) if part is not None]
    value = pieces[0]
    if len(pieces) > 1:
        value = scope.op("Concat", pieces, {"axis": -1}, dtype=dtype)
    return Heads(value=value, layout=heads.layout, heads=heads.heads, dim=heads.dim)


def _rows(scope: Scope, table: ir.Value, position_ids: ir.Value | None) -> ir.Value:
    """The table's rows of each query: [b or 1, s, r/2]."""
    if position_ids is None:
        return table
    return scope.op("Gather", [table, position_ids], {"axis": 0}, dtype=table.dtype)


def _around(spec: AttentionSpec) -> tuple[int, int]:
    rotary = _rotary_of(spec)
    return spec.rotary_offset, spec.head_dim - spec.rotary_offset - rotary.dim


def _split(scope: Scope, value: ir.Value, sizes: list[int], *, axis: int) -> list[ir.Value | None]:
    """One part a size, None for a size of 0; nothing is emitted for a single part."""
    kept = [size for size in sizes if size]
    if len(kept) == 1:
        return [value if size else None for size in sizes]
    made = scope.op_multi(
        "Split",
        [value, scope.constant(np.array(kept, np.int64), hint="ints")],
        {"axis": axis},
        outputs=[(value.dtype, None)] * len(kept),
    )
    parts = iter(made)
    return [next(parts) if size else None for size in sizes]


def _rotary_of(spec: AttentionSpec) -> RotarySpec:
    assert spec.rotary is not None
    return spec.rotary
