"""The graph values one attention reads: what forms emit from, and what a recognised site binds.

One type serves both sides, so that a recognised site can be handed to any form without
translation. Shapes use the legend of :mod:`mha_export.spec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

import onnx_ir as ir

from mha_export.spec import DType

_ELEMENTS = {
    DType.FP32: ir.DataType.FLOAT,
    DType.FP16: ir.DataType.FLOAT16,
    DType.BF16: ir.DataType.BFLOAT16,
    DType.FP64: ir.DataType.DOUBLE,
}
_DTYPES = {element: dtype for dtype, element in _ELEMENTS.items()}


def ir_dtype(dtype: DType) -> ir.DataType:
    """The ONNX element type of a spec's dtype."""
    return _ELEMENTS[dtype]


def dtype_of(element: ir.DataType | None) -> DType | None:
    """The dtype a spec has for an ONNX element type; None where it has none for it."""
    return None if element is None else _DTYPES.get(element)


class Layout(StrEnum):
    """Axis order of a per-head tensor."""

    BSM = "bsm"
    """[batch, length, heads * dim]: as a projection writes it, and most fused ops read it."""
    BSHD = "bshd"
    """[batch, length, heads, dim]."""
    BHSD = "bhsd"
    """[batch, heads, length, dim]."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A value that holds all heads of a query, key, value, cache or output."""

    value: ir.Value
    layout: Layout
    heads: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class ScoreMask:
    """A mask as the source graph materialised it, broadcastable to [b, h, s, t].

    ``additive``: float, added to the scores. ``keep``: bool, True takes part. It states all the
    *hiding* parts of ``spec.mask`` (causal, windows, padding, ...) at once, fill included.
    """

    value: ir.Value
    kind: Literal["additive", "keep"]


@dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """Cosine and sine of the angles, each row of width r/2 (``half_width``) or r.

    A row of width r holds each pair's angle twice, where the style puts the pair: ``c0 c1 c0 c1``
    for half, ``c0 c0 c1 c1`` for interleaved.

    ``cos`` and ``sin`` are [b or 1, s, width] without ``position_ids``, or [positions, width] with
    ``position_ids`` [b, s] int64.
    """

    cos: ir.Value
    sin: ir.Value
    position_ids: ir.Value | None = None
    half_width: bool = True
    key_cos: ir.Value | None = None
    """Tables of the keys where they differ from the queries' (keys rotated after the cache)."""
    key_sin: ir.Value | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A packed projection [Q | K | V] and its input, for a form that projects by itself.

    ``value`` [b, s, m], ``weight`` [m, h*d + k*d + k*e], ``bias`` of that width or None.
    """

    value: ir.Value
    weight: ir.Value
    bias: ir.Value | None = None


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The values bound to a spec's names.

    ``query``, ``key``, ``value`` are *before* the parts the spec states (qk-norm, rotary), and
    key/value are the new tokens only when ``past_key``/``past_value`` are bound. Every optional
    operand is present exactly when the spec states its part, except ``score_mask``, which a
    recognised site binds whenever the source graph had a materialised mask: a form that can say
    ``spec.mask`` natively ignores it, any other uses it as it is.
    """

    query: Heads
    key: Heads
    value: Heads
    past_key: Heads | None = None
    past_value: Heads | None = None
    score_mask: ScoreMask | None = None
    keep: ir.Value | None = None
    bias: ir.Value | None = None
    key_padding: ir.Value | None = None
    """[b, t] bool or integer, nonzero: the key takes part. t counts the past."""
    kv_lengths: ir.Value | None = None
    """[b] int64: keys at index < length take part."""
    prefix_lengths: ir.Value | None = None
    document_ids: ir.Value | None = None
    sinks: ir.Value | None = None
    """[h]."""
    rotary: RotaryTables | None = None
    q_norm_weight: ir.Value | None = None
    k_norm_weight: ir.Value | None = None
    q_norm_bias: ir.Value | None = None
    k_norm_bias: ir.Value | None = None
    projection: Projection | None = None
    """What query, key and value were projected from, where that is one packed weight."""

    def values(self) -> Iterator[tuple[str, ir.Value]]:
        """Every bound graph value with its dotted name, in declaration order."""
        for field in fields(self):
            yield from _values_of(field.name, getattr(self, field.name))


def _values_of(name: str, part: object) -> Iterator[tuple[str, ir.Value]]:
    if isinstance(part, ir.Value):
        yield name, part
    elif isinstance(part, (Heads, ScoreMask)):
        yield name, part.value
    elif isinstance(part, (RotaryTables, Projection)):
        for field in fields(part):
            yield from _values_of(f"{name}.{field.name}", getattr(part, field.name))
