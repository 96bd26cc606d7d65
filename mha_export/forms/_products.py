"""Scores, softmax and context of some queries, the keys in pieces that are masked or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._counts import Count, Counts
from mha_export.forms._grouping import Groups
from mha_export.forms._hiding import Hiding
from mha_export.forms._layout import Sizes, cast, floating, ints
from mha_export.forms._mask import Mask
from mha_export.forms._prepare import scaled
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Operands, ir_dtype
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some keys as :meth:`Groups.keys` arranges them, and the mask of their scores, if any."""

    keys: ir.Value
    count: Count
    mask: Mask | None


@dataclass(frozen=True, kw_only=True)
class Products:
    """Emits ``Softmax(mask(cap(Q Kᵀ))) V`` for queries that are already scaled.

    Attributes:
        few: whether the queries are few, so that weights are smaller than values.
    """

    scope: Scope
    spec: AttentionSpec
    operands: Operands
    sizes: Sizes
    counts: Counts
    groups: Groups
    hiding: Hiding
    few: bool

    def context(
        self,
        q_bhsd: ir.Value,
        rows: Count,
        pieces: Sequence[Piece],
        values: ir.Value,
        parts: frozenset[str],
        *,
        by_head: bool,
    ) -> ir.Value:
        """[b, h, rows, e]: the attention of ``rows`` queries to the keys of all pieces.

        Args:
            q_bhsd: the queries [b, h, rows, d], scaled.
            rows: how many.
            pieces: all keys, in order.
            values: of those keys, arranged as they are.
            parts: what a piece with a mask hides.
            by_head: masks have a head or batch axis, so they meet the scores as [b, h, s, t].
        """
        queries = self.groups.queries(q_bhsd)
        wide = ir_dtype(self.spec.effective_softmax_dtype)
        scores = [
            cast(self.scope, self._scores(queries, rows, piece, parts, by_head=by_head), wide)
            for piece in pieces
        ]
        if self.operands.sinks is not None:
            scores.append(self._sink_column(self.operands.sinks, rows, by_head=by_head))
        joined = scores[0]
        if len(scores) > 1:
            joined = self.scope.op("Concat", scores, {"axis": -1}, dtype=joined.dtype)
        weights = self.scope.op("Softmax", [joined], {"axis": -1}, dtype=wide)
        weights = cast(self.scope, weights, ir_dtype(self.spec.io_dtype))
        columns: Count = 0
        if self.operands.sinks is not None and self.few:
            weights = self._without_sink(weights)
        elif self.operands.sinks is not None:
            values, columns = self._with_zero_row(values), 1
        if by_head:
            for piece in pieces:
                columns = self.counts.add(columns, piece.count)
            weights = self.groups.arranged(weights, rows, columns)
        return self.groups.context(weights, values)

    def _scores(
        self,
        queries: ir.Value,
        rows: Count,
        piece: Piece,
        parts: frozenset[str],
        *,
        by_head: bool,
    ) -> ir.Value:
        scores = self._capped(self.groups.scores(queries, piece.keys))
        if by_head:
            scores = self.groups.by_head(scores, rows, piece.count)
        if piece.mask is None:
            return scores
        return self.hiding.apply(self.scope, piece.mask, scores, parts)

    def _capped(self, scores: ir.Value) -> ir.Value:
        cap, scope = self.spec.softcap, self.scope
        if cap is None:
            return scores
        constant = floating(scope, cap, self.spec.io_dtype)
        shrunk = scope.op("Div", [scores, constant], dtype=scores.dtype)
        bent = scope.op("Tanh", [shrunk], dtype=scores.dtype)
        return scope.op("Mul", [bent, constant], dtype=scores.dtype)

    def _sink_column(self, sinks: ir.Value, rows: Count, *, by_head: bool) -> ir.Value:
        """The sinks as the scores of one more key: [b, h, rows, 1], or as the product has them."""
        scope = self.scope
        heads = [self.spec.q_heads] if by_head else self.groups.head_sizes
        each = ints(scope, 1, *heads, 1, 1)
        column = scope.op("Reshape", [sinks, each], dtype=sinks.dtype)
        column = cast(scope, column, ir_dtype(self.spec.effective_softmax_dtype))
        lead = [self.sizes.batch, ints(scope, *heads), self.counts.value(rows), ints(scope, 1)]
        shape = scope.op("Concat", lead, {"axis": 0}, dtype=ir.DataType.INT64)
        return scope.op("Expand", [column, shape], dtype=column.dtype)

    def _without_sink(self, weights: ir.Value) -> ir.Value:
        """Few queries: the weights are smaller than the values, so that they are what is copied."""
        inputs = [weights, *(ints(self.scope, n) for n in (0, -1, -1))]
        return self.scope.op("Slice", inputs, dtype=weights.dtype)

    def _with_zero_row(self, values: ir.Value) -> ir.Value:
        """Many queries: the sink gets a value of nothing, cheaper than cutting its weights off."""
        axis = self.groups.key_axis
        pads = [0] * (2 * (axis + 2))
        pads[axis + 2 + axis] = 1
        return self.scope.op("Pad", [values, ints(self.scope, *pads)], dtype=values.dtype)


def scaled_query(scope: Scope, spec: AttentionSpec, query: Heads) -> Heads:
    """The queries times the whole scale: fewer numbers than scores."""
    scale = spec.effective_scale
    return query if scale == 1.0 else scaled(scope, spec, query, scale)
