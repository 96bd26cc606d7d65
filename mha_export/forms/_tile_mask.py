"""The mask of one tile: some queries against some keys, from the parts of the whole mask.

Position parts are compared at the tile's own positions, so nothing of size [s, t] is ever made;
tensors that come from outside (keep-masks, biases, padding) are cut to the tile's rows and columns.
A source graph's own mask, which says the same of all pairs, is not read. Where every position is a
number the tile's mask is a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from mha_export.forms._counts import Count, Counts, Span
from mha_export.forms._layout import Sizes, cast, dimension, numpy_dtype, unsqueeze
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts
from mha_export.forms._scope import Scope
from mha_export.operands import Operands
from mha_export.spec import AttentionSpec, Dim, MaskSpec

POSITION_PARTS = frozenset({"causal", "left_window", "right_window", "block"})
"""Parts that are known once the positions of queries and keys are."""

_LARGEST_CONSTANT = 1 << 20
"""Elements a tile's mask may have as a constant; a larger one is computed in the graph."""


class TileMask(Mask):
    """The mask of the queries ``rows`` and the keys ``keys``.

    Args:
        whole: the mask of the whole attention; what tiles share is emitted there once.
        offset: position of query 0 where it is one count for all batch rows, else None.
    """

    def __init__(
        self,
        scope: Scope,
        spec: AttentionSpec,
        operands: Operands,
        sizes: Sizes,
        *,
        whole: Mask,
        counts: Counts,
        rows: Span,
        keys: Span,
        offset: Count | None,
    ) -> None:
        super().__init__(scope, spec, operands, sizes)
        self._whole = whole
        self._counts = counts
        self._rows = rows
        self._keys = keys
        self._known = _known_positions(rows, keys, offset)

    def additive(self, parts: frozenset[str], fill: float) -> ir.Value | None:
        known = self._visible(parts)
        if known is None or added_parts(self._spec.mask):
            return super().additive(parts, fill)
        if known.all():
            return None
        mask_st = np.where(known, 0.0, fill).astype(numpy_dtype(self._spec.io_dtype))
        return self._scope.constant(mask_st[None, None], hint="tile_mask")

    def allowed(self, parts: frozenset[str]) -> ir.Value | None:
        known = self._visible(parts)
        if known is None:
            return super().allowed(parts)
        return self._scope.constant(known[None, None], hint="tile_mask")

    def query_positions(self) -> ir.Value:
        return self._once("i", lambda: self._cut(self._whole.query_positions(), self._rows, 2))

    def key_positions(self) -> ir.Value:
        return self._once("t", lambda: self._cut(self._whole.key_positions(), self._keys, 0))

    def _visible(self, parts: frozenset[str]) -> np.ndarray | None:
        """[s, t] bool where the tile's positions are numbers and nothing else decides."""
        if self._known is None or not parts or parts - POSITION_PARTS:
            return None
        if "causal" in parts and self._operands.prefix_lengths is not None:
            return None
        i_s, t = self._known
        if i_s.size * t.size > _LARGEST_CONSTANT:
            return None
        return visible(self._spec.mask, i_s, t)

    def _documents(self) -> ir.Value:
        ids = self._shared("ids", lambda: cast(self._scope, self._document_ids(), _INT64))
        own = self._own_documents(ids)
        seen = unsqueeze(self._scope, self._cut(ids, self._keys, 1), 1, 2)
        return self._bool("Equal", unsqueeze(self._scope, own, 1, 3), seen)

    def _document_ids(self) -> ir.Value:
        assert self._operands.document_ids is not None
        return self._operands.document_ids

    def _padding(self) -> ir.Value:
        return self._cut(self._shared("padding", super()._padding), self._keys, 3)

    def _keep(self) -> ir.Value:
        assert self._spec.mask.keep is not None
        return self._cut_operand(self._shared("keep", super()._keep), self._spec.mask.keep)

    def _bias(self) -> ir.Value:
        shape = self._spec.mask.bias
        assert shape is not None
        whole = self._whole
        return self._once("bias", lambda: self._cut_operand(whole._bias(), shape))

    def _per_row(self, value: ir.Value | None) -> ir.Value:
        assert value is not None
        make = super()._per_row
        return self._shared(f"row {id(value)}", lambda: make(value))

    def _cut_operand(self, value: ir.Value, shape: tuple[Dim, ...]) -> ir.Value:
        """A rank-4 keep-mask or bias of the stated shape, whose key axis is complete."""
        value = self._cut(value, self._keys, 3)
        rows = shape[-2] if len(shape) > 1 else 1
        if rows == 1:
            return value
        if rows == self._spec.q_len:
            return self._cut(value, self._rows, 2)
        return self._cut_broadcast(value, self._rows, 2)

    def _cut_broadcast(self, value: ir.Value, span: Span, axis: int) -> ir.Value:
        """Cut an axis that is whole or 1: of a size of 1, every span is index 0."""
        size = self._counts.of(
            self._shared(f"size {id(value)} {axis}", lambda: dimension(self._scope, value, axis))
        )
        counts = self._counts
        start = counts.least(span.start, counts.sub(size, 1))
        cut = Span(start=start, end=counts.least(span.end, size))
        return counts.rows(value, cut, axis, of=size)

    def _cut(self, value: ir.Value, span: Span, axis: int) -> ir.Value:
        return self._counts.rows(value, span, axis)

    def _once(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _shared(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that all tiles use, kept with the whole mask."""
        made = self._whole._made
        if name not in made:
            made[name] = make()
        return made[name]


_INT64 = ir.DataType.INT64


def visible(mask: MaskSpec, i_s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """[s, t]: which keys the position parts of a mask let the queries at ``i_s`` see."""
    i, seen = i_s[:, None], np.ones((i_s.size, t.size), np.bool_)
    if mask.causal is not None:
        seen &= t <= i
    if mask.left_window is not None:
        seen &= t >= i - mask.left_window
    if mask.right_window is not None:
        seen &= t <= i + mask.right_window
    if mask.block is not None:
        seen &= i // mask.block == t // mask.block
    return seen


def _known_positions(
    rows: Span, keys: Span, offset: Count | None
) -> tuple[np.ndarray, np.ndarray] | None:
    counts = (rows.start, rows.end, keys.start, keys.end, offset)
    numbers = [count for count in counts if isinstance(count, int)]
    if len(numbers) < len(counts):
        return None
    first, last, lo, hi, at = numbers
    return np.arange(first, last) + at, np.arange(lo, hi)
