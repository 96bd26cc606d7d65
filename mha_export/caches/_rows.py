"""The new tokens' part of values that speak of all tokens: positions, tables, masks.

``rows(v)[.., i, ..] = v[.., start + i, ..]`` for the s new tokens. Cutting is pushed up to where
it is cheap: the rows of ``cos(positions * f)`` are ``cos(rows(positions) * f)``, and those of
``Range(0, T)`` are the positions of the new tokens. A step then computes what it needs and no more.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mha_export.caches._look import Look
from mha_export.caches._rules import EACH_ENTRY
from mha_export.forms import Scope
from mha_export.forms._layout import cast
from mha_export.recognise._evaluate_contents import ELEMENTWISE, attributes_of

_INT64 = ir.DataType.INT64
_EACH = frozenset((*ELEMENTWISE, *EACH_ENTRY))


class RowTaker:
    """Emits rows of values of the original graph into ``scope``, each once.

    Args:
        look: the original graph at two lengths.
        image: a value of the original in the graph that is written.
        positions: of the new tokens, int64 [s].
        entries_set: the image of a shape vector with one entry replaced (see :mod:`._apply`).
    """

    def __init__(
        self,
        scope: Scope,
        *,
        look: Look,
        image: Callable[[ir.Value], ir.Value],
        positions: ir.Value,
        new_tokens: ir.Value,
        entries_set: Callable[[ir.Value, int, ir.Value], ir.Value],
    ) -> None:
        self._scope = scope
        self._look = look
        self._image = image
        self._positions = positions
        self._new_tokens = new_tokens
        self._entries_set = entries_set
        self._made: dict[tuple[ir.Value, int], ir.Value] = {}

    def rows(self, value: ir.Value, axis: int) -> ir.Value:
        """The rows of ``value`` along ``axis``, which is as long as all tokens."""
        key = (value, axis)
        if key not in self._made:
            pushed = self._pushed(value, axis)
            self._made[key] = self._gathered(value, axis) if pushed is None else pushed
        return self._made[key]

    def _gathered(self, value: ir.Value, axis: int) -> ir.Value:
        inputs = [self._image(value), self._positions]
        return self._scope.op("Gather", inputs, {"axis": axis}, dtype=value.dtype)

    def _pushed(self, value: ir.Value, axis: int) -> ir.Value | None:
        """The rows, computed from rows of what ``value`` is computed from; None: not that way."""
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return None
        if node.op_type in _EACH:
            return self._each(node, axis)
        way = {
            "ConstantOfShape": self._constant,
            "Expand": self._expand,
            "Gather": self._gather,
            "MatMul": self._matmul,
            "Range": self._range,
            "Squeeze": self._squeeze,
            "Transpose": self._transpose,
            "Unsqueeze": self._unsqueeze,
        }.get(node.op_type)
        return None if way is None else way(node, axis)

    def _each(self, node: ir.Node, axis: int) -> ir.Value:
        rank = self._look.rank(node.outputs[0])
        inputs: list[ir.Value | None] = []
        for item in node.inputs:
            own = -1 if item is None else axis - (rank - self._look.rank(item))
            if item is None:
                inputs.append(None)
            elif own >= 0 and self._look.shapes(item)[0][own] != 1:
                inputs.append(self.rows(item, own))
            else:
                inputs.append(self._image(item))
        return self._again(node, inputs)

    def _constant(self, node: ir.Node, axis: int) -> ir.Value:
        shape = self._entries_set(_input(node, 0), axis, self._new_tokens)
        return self._again(node, [shape])

    def _range(self, node: ir.Node, axis: int) -> ir.Value | None:
        start, _, step = (_input(node, i) for i in range(3))
        if not (self._look.is_constant(start, 0) and self._look.is_constant(step, 1)):
            return None
        return cast(self._scope, self._positions, node.outputs[0].dtype or _INT64)

    def _gather(self, node: ir.Node, axis: int) -> ir.Value | None:
        data, indices = _input(node, 0), _input(node, 1)
        own = attributes_of(node).get("axis", 0) % self._look.rank(data)
        if not own <= axis < own + self._look.rank(indices):
            return None
        return self._again(node, [self._image(data), self.rows(indices, axis - own)])

    def _matmul(self, node: ir.Node, axis: int) -> ir.Value | None:
        left, right = _input(node, 0), _input(node, 1)
        ranks = self._look.rank(left), self._look.rank(right)
        if min(ranks) < 2:
            return None
        if axis == max(ranks) - 2:
            return self._again(node, [self.rows(left, ranks[0] - 2), self._image(right)])
        if axis == max(ranks) - 1:
            return self._again(node, [self._image(left), self.rows(right, ranks[1] - 1)])
        return None

    def _expand(self, node: ir.Node, axis: int) -> ir.Value | None:
        data, shape = _input(node, 0), _input(node, 1)
        rank = self._look.rank(node.outputs[0])
        entries = self._look.shapes(shape)[0][0]
        own, entry = axis - (rank - self._look.rank(data)), axis - (rank - entries)
        grows = own >= 0 and self._look.shapes(data)[0][own] != 1
        inner = self.rows(data, own) if grows else self._image(data)
        if entry < 0:
            return self._again(node, [inner, self._image(shape)])
        one = self._new_tokens
        return self._again(node, [inner, self._entries_set(shape, entry, one)])

    def _transpose(self, node: ir.Node, axis: int) -> ir.Value:
        data = _input(node, 0)
        perm = attributes_of(node).get("perm", range(self._look.rank(data) - 1, -1, -1))
        return self._again(node, [self.rows(data, list(perm)[axis])])

    def _unsqueeze(self, node: ir.Node, axis: int) -> ir.Value | None:
        data, rank = _input(node, 0), self._look.rank(node.outputs[0])
        axes = self._axes(node, rank)
        if axes is None or axis in axes:
            return None
        own = axis - sum(new < axis for new in axes)
        return self._again(node, [self.rows(data, own), *map(self._image, _rest(node))])

    def _squeeze(self, node: ir.Node, axis: int) -> ir.Value | None:
        data = _input(node, 0)
        axes = self._axes(node, self._look.rank(data))
        if axes is None:
            return None
        kept = [i for i in range(self._look.rank(data)) if i not in axes]
        return self._again(node, [self.rows(data, kept[axis]), *map(self._image, _rest(node))])

    def _axes(self, node: ir.Node, rank: int) -> list[int] | None:
        if len(node.inputs) < 2:
            return None
        found = self._look.arrays(_input(node, 1))
        return None if found is None else [int(axis) % rank for axis in found[0].reshape(-1)]

    def _again(self, node: ir.Node, inputs: list[ir.Value | None]) -> ir.Value:
        """The node over other inputs."""
        attributes = attributes_of(node)
        return self._scope.op(node.op_type, inputs, attributes, dtype=node.outputs[0].dtype)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, f"{node.op_type} {node.name} has no input {index}"
    return value


def _rest(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[1:] if value is not None]
