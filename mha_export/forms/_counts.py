"""Sizes and cuts, known while emitting or only at run time: one arithmetic for both.

A count is a Python number where every length it depends on is one, and else an int64 tensor of
shape [1] that the graph computes. Numbers fold: a graph of static lengths holds no size arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._layout import ints
from mha_export.forms._scope import Scope

_INT64 = ir.DataType.INT64

Count = int | ir.Value
"""A size or a position: a number, or an int64 tensor of shape [1]."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Indices ``start`` .. ``end - 1`` of one axis."""

    start: Count
    end: Count


class Counts:
    """Emits the arithmetic of counts into a scope, each result at most once."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._made: dict[tuple[object, ...], ir.Value] = {}

    def of(self, value: ir.Value) -> Count:
        """A count of a [1] tensor: its number where it is a constant."""
        known = value.const_value
        return value if known is None else int(known.numpy().item())

    def value(self, count: Count) -> ir.Value:
        """A count as an int64 tensor of shape [1]."""
        return ints(self._scope, count) if isinstance(count, int) else count

    def add(self, a: Count, b: Count) -> Count:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        return a if b == 0 else b if a == 0 else self._op("Add", a, b)

    def sub(self, a: Count, b: Count) -> Count:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return 0 if a is b else a if b == 0 else self._op("Sub", a, b)

    def mul(self, a: Count, b: Count) -> Count:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 0 or b == 0:
            return 0
        return a if b == 1 else b if a == 1 else self._op("Mul", a, b)

    def div(self, a: Count, b: int) -> Count:
        """``a // b`` of a count that is not negative (ONNX's Div truncates towards zero)."""
        if isinstance(a, int):
            return a // b
        return a if b == 1 else self._op("Div", a, b)

    def least(self, *counts: Count) -> Count:
        """The smallest of them."""
        return self._extreme("Min", counts)

    def most(self, *counts: Count) -> Count:
        """The largest of them."""
        return self._extreme("Max", counts)

    def rows(self, value: ir.Value, span: Span, axis: int, *, of: Count | None = None) -> ir.Value:
        """``value`` cut to ``span`` on ``axis``; itself where that is the whole of its size."""
        if span.start == 0 and same(span.end, of):
            return value
        inputs = [value, self.value(span.start), self.value(span.end), ints(self._scope, axis)]
        return self._scope.op("Slice", inputs, dtype=value.dtype)

    def once(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """What ``make`` emits, the first time that ``key`` is asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _extreme(self, op_type: str, counts: tuple[Count, ...]) -> Count:
        pick = min if op_type == "Min" else max
        numbers = [count for count in counts if isinstance(count, int)]
        rest: list[Count] = []
        for count in counts:
            if not isinstance(count, int) and not any(count is other for other in rest):
                rest.append(count)
        if numbers:
            rest.append(pick(numbers))
        return rest[0] if len(rest) == 1 else self._op(op_type, *rest)

    def _op(self, op_type: str, *counts: Count) -> ir.Value:
        return self.once(
            (op_type, *counts),
            lambda: self._scope.op(
                op_type, [self.value(count) for count in counts], dtype=_INT64, shape=[1]
            ),
        )


def same(a: Count | None, b: Count | None) -> bool:
    """Whether two counts are provably equal."""
    return a is not None and a == b
