"""The two products with g query heads to a key/value head, which is never repeated.

``broadcast``: ``[b, k, g, s, d] x [b, k, 1, d, t]``, one product a query head.
``rows``: ``[b, k, g * s, d] x [b, k, d, t]``, the queries of a group are rows of one product: each
key is read once for all of them, which is what a decode step pays for.

Query heads interleave (head ``k * g + j`` belongs to key/value head ``k``), so both are reshapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._counts import Count, Counts
from mha_export.forms._layout import ints, unsqueeze
from mha_export.forms._scope import Scope
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Emits both products; ``scores`` are in its own arrangement until :meth:`by_head`.

    Attributes:
        rows: the queries of a group as rows, else broadcast over a group axis.
    """

    scope: Scope
    spec: AttentionSpec
    counts: Counts
    rows: bool

    @property
    def _split(self) -> bool:
        """Whether there is a group axis: with one query head to a key/value head there is none."""
        return self.spec.group > 1 and not self.rows

    @property
    def head_sizes(self) -> list[int]:
        """The axes of heads of scores as the product gives them (not with groups as rows)."""
        return [self.spec.kv_heads, self.spec.group] if self._split else [self.spec.q_heads]

    def queries(self, q_bhsd: ir.Value) -> ir.Value:
        """Queries [b, h, s, d] as the product reads them."""
        if self.spec.group == 1:
            return q_bhsd
        k, g, d = self.spec.kv_heads, self.spec.group, self.spec.head_dim
        return (
            self._reshape(q_bhsd, 0, k, -1, d)
            if self.rows
            else self._reshape(q_bhsd, 0, k, g, -1, d)
        )

    def keys(self, heads_bktd: ir.Value) -> ir.Value:
        """Keys or values [b, k, t, d], ready to be cut along their axis :attr:`key_axis`."""
        return unsqueeze(self.scope, heads_bktd, 2) if self._split else heads_bktd

    @property
    def key_axis(self) -> int:
        """The axis of keys in what :meth:`keys` gives."""
        return 3 if self._split else 2

    def scores(self, queries: ir.Value, keys: ir.Value) -> ir.Value:
        """Q Kᵀ, heads arranged as the queries are."""
        perm = [0, 1, 2, 4, 3] if self._split else [0, 1, 3, 2]
        turned = self.scope.op("Transpose", [keys], {"perm": perm}, dtype=keys.dtype)
        return self.scope.op("MatMul", [queries, turned], dtype=queries.dtype)

    def by_head(self, scores: ir.Value, s: Count, t: Count) -> ir.Value:
        """[b, h, s, t], as masks are."""
        if self.spec.group == 1:
            return scores
        h = self.spec.q_heads
        if self.rows:
            return self._rows_of(scores, h, s)
        return self._shaped(scores, [h], s, t)

    def arranged(self, by_head: ir.Value, s: Count, t: Count) -> ir.Value:
        """[b, h, s, t] back as the product reads it."""
        if self.spec.group == 1:
            return by_head
        k, g = self.spec.kv_heads, self.spec.group
        return (
            self._reshape(by_head, 0, k, -1, 0)
            if self.rows
            else self._shaped(by_head, [k, g], s, t)
        )

    def context(self, probabilities: ir.Value, values: ir.Value) -> ir.Value:
        """P V as [b, h, s, e]."""
        context = self.scope.op("MatMul", [probabilities, values], dtype=values.dtype)
        if self.spec.group == 1:
            return context
        return self._reshape(context, 0, self.spec.q_heads, -1, self.spec.value_dim)

    def _rows_of(self, scores: ir.Value, heads: int, s: Count) -> ir.Value:
        """``scores`` as [b, heads, s, t]. Never by -1: a piece of no keys has no elements."""
        if isinstance(s, int):
            return self._reshape(scores, 0, heads, s, 0)
        parts = [ints(self.scope, 0, heads), s, ints(self.scope, 0)]
        shape = self.scope.op("Concat", parts, {"axis": 0}, dtype=ir.DataType.INT64)
        return self.scope.op("Reshape", [scores, shape], dtype=scores.dtype)

    def _shaped(self, value: ir.Value, heads: list[int], s: Count, t: Count) -> ir.Value:
        """``value`` as [b, *heads, s, t]; a size of 0 would be read as "keep", but none is."""
        if isinstance(s, int) and isinstance(t, int):
            return self._reshape(value, 0, *heads, s, t)
        parts = [ints(self.scope, 0, *heads), self.counts.value(s), self.counts.value(t)]
        shape = self.scope.op("Concat", parts, {"axis": 0}, dtype=ir.DataType.INT64)
        return self.scope.op("Reshape", [value, shape], dtype=value.dtype)

    def _reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        return self.scope.op("Reshape", [value, ints(self.scope, *shape)], dtype=value.dtype)
