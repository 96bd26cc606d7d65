"""How far from the first token a mask may still change its rule.

Positions enter a mask linearly, and its rule changes where they are compared. ``i - t > 250`` does
so at 250, ``i // 100 - t // 100 > 1`` at 200, though no number there is above 100; a logarithm
of positions may do so anywhere. Each value is followed as a linear part, how large a constant it
is off by and how coarse its steps are; a comparison changes no later than where
``slope * position`` passes the constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise._evaluate import Context
from mha_export.recognise._evaluate_contents import STEERING

Fixed = Mapping[ir.Value, NDArray[Any]]

SENTINEL = 1 << 30
"""Whole numbers from here on mean "to the end"; a fill is no width either."""

_SMALL = 64
"""Elements of the largest constant that is numbers and not a table."""

_MEETING = 3
"""Changes that can meet in one place: a line each through queries, keys and the length."""

_DENOMINATOR = 4096
"""The finest part of a whole that a factor of positions is told from."""

_KEPT = frozenset(
    {
        "Ceil", "Expand", "Flatten", "Floor", "Identity", "Neg", "ReduceMax", "ReduceMin",
        "Reshape", "Round", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_COMPARED = frozenset(
    {
        "Abs", "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min",
        "Relu", "Sign",
    }
)  # fmt: skip
_UNREAD = {
    op: places for op, places in STEERING.items() if op not in ("Pad", "Range", "Slice", "Trilu")
}
"""Inputs that only say where the elements go."""

_LOGICAL = frozenset({"And", "IsInf", "IsNaN", "Not", "Or", "Xor"})
_JOINED = frozenset({"Concat", "Pad", "ScatterElements", "ScatterND"})
_COUNTED = frozenset({"CumSum", "NonZero", "ReduceSum", "Shape", "Size"})


@dataclass(frozen=True, kw_only=True)
class _Part:
    """``slope * position + constants`` between two changes of the rule.

    Attributes:
        linear: whether positions are in it at all (else one of some numbers: flags, a table's).
        constants: the largest sum of the constants.
        steps: positions that the value needs to rise by one; a whole number or a fraction of any
            size, infinite where the slope is no fraction that could be told.
        size: whether this is a length and no position: what is a part of it grows with it.
        number: the constant that this is.
    """

    linear: bool = False
    size: bool = False
    constants: float = 0.0
    steps: float = 1.0
    number: NDArray[Any] | None = None


class _Walk:
    """Follows one mask's computation; ``changes`` are where a rule in it may change."""

    def __init__(self, context: Context, fixed: Fixed) -> None:
        self.context, self.fixed = context, fixed
        self.changes: set[float] = set()
        self.parts: dict[ir.Value, _Part] = {}

    def follow(self, value: ir.Value) -> None:
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self.parts:
                stack.pop()
                continue
            needed = self._needed(current)
            missing = [v for v in needed if v not in self.parts]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self.parts[current] = self._part(current)

    def _needed(self, value: ir.Value) -> list[ir.Value]:
        if self._number(value) is not None:
            return []
        if self.context.sources(value) == frozenset({value}):
            return []
        node = value.producer()
        places = () if node is None else _UNREAD.get(node.op_type, ())
        inputs = () if node is None else node.inputs
        shapes = {inputs[place] for place in places if place < len(inputs)}
        return [item for item in self.context.content_inputs(value) if item not in shapes]

    def _number(self, value: ir.Value) -> NDArray[Any] | None:
        if value in self.fixed:
            return self.fixed[value]
        return self.context.literal(value)

    def _part(self, value: ir.Value) -> _Part:
        number = self._number(value)
        if number is not None:
            return self._constant(number)
        node = value.producer()
        if node is None or self.context.sources(value) == frozenset({value}):
            return _Part()
        parts = [None if v is None else self.parts.get(v) for v in node.inputs]
        if node.op_type not in _COUNTED and all(p is None or p.number is not None for p in parts):
            computed = None if self.fixed else self.context.constant(value)
            if computed is not None:
                return self._constant(computed)
        return self._made(node, [part for part in parts if part is not None])

    def _constant(self, array: NDArray[Any]) -> _Part:
        if array.dtype.kind not in "iufb" or array.size == 0:
            return _Part()
        if array.dtype.kind == "b":
            return _Part(constants=1.0, number=array)
        flat = np.ravel(array).astype(np.float64)
        counts = array.size > _SMALL and bool(np.isfinite(flat).all())
        if counts and bool(np.all(np.diff(array, axis=-1) == 1)):
            return _Part(linear=True, constants=abs(float(flat[0])))
        if array.size > _SMALL and array.ndim == 1:
            self.changes.add(array.size)
        near = np.abs(flat[np.isfinite(flat) & (np.abs(flat) < SENTINEL)])
        return _Part(constants=float(near.max(initial=0)), number=array)

    def _made(self, node: ir.Node, parts: Sequence[_Part]) -> _Part:
        op = node.op_type
        linear = any(part.linear for part in parts)
        if op in ("Shape", "Size"):
            return _Part(linear=True, size=True)
        if op in _COUNTED:
            return _Part(linear=True, constants=max((p.constants for p in parts), default=0.0))
        if op == "Range":
            return _Part(linear=True, constants=parts[0].constants, steps=parts[0].steps)
        if op in ("Trilu", "EyeLike"):
            diagonal = parts[1] if len(parts) > 1 else _Part()
            self._compare([diagonal, _Part(constants=float(node.attributes.get_int("k", 0)))])
            return parts[0] if parts else _Part(constants=1.0)
        if op == "Cast":
            return self._cast(node, parts[0])
        if op in _COMPARED:
            self._compare(parts)
            if op in ("Abs", "Clip", "Max", "Min", "Relu"):
                return _joined(parts)
            return _Part(constants=1.0)
        if op in _LOGICAL:
            return _Part(constants=1.0)
        if op in _KEPT:
            return parts[0]
        if op in ("Gather", "GatherElements", "GatherND"):
            return self._looked_up(parts)
        if op == "Slice":
            shift = sum(part.constants for part in parts[1:2])
            return replace(parts[0], constants=parts[0].constants + shift, number=None)
        if op in ("Add", "Sub", "Sum"):
            return _Part(
                linear=linear,
                size=linear and all(part.size for part in parts if part.linear),
                constants=sum(part.constants for part in parts),
                steps=_together(parts),
            )
        if op in ("Mul", "Div") and len(parts) == 2:
            return self._scaled(node, parts)
        if op == "Mod" and not parts[0].size and len(parts) == 2 and parts[1].number is not None:
            return self._in_blocks(parts[0], parts[1].constants)
        if op == "Where":
            return _joined(parts[1:])
        if op in _JOINED:
            return _joined(parts)
        if op == "ConstantOfShape":
            filled = node.attributes.get_tensor("value", None)
            return _Part() if filled is None else self._constant(np.asarray(filled.numpy()))
        if linear:
            self.changes.add(math.inf)
        return _Part(constants=math.inf)

    def _compare(self, parts: Sequence[_Part]) -> None:
        """Where the rule may change: flags compared with flags change nowhere by themselves."""
        constants = sum(part.constants for part in parts)
        if any(part.linear for part in parts) or all(part.number is not None for part in parts):
            self.changes.add((constants + 1) * _together(parts))

    def _cast(self, node: ir.Node, part: _Part) -> _Part:
        to = ir.DataType(node.attributes["to"].as_int())
        if to is ir.DataType.BOOL:
            self._compare([part])
            return _Part(constants=1.0)
        if to.is_integer() and part.linear and part.steps != 1:
            self.changes.add(part.steps)
        return part

    def _looked_up(self, parts: Sequence[_Part]) -> _Part:
        """A table read at positions has been read to its end at as many of them."""
        table, place = parts[0], parts[1]
        if table.number is None:
            return table
        if place.linear:
            ends = max(table.number.shape, default=1)
            self.changes.add((ends + place.constants) * place.steps)
        return _Part(constants=table.constants)

    def _scaled(self, node: ir.Node, parts: Sequence[_Part]) -> _Part:
        left, right = parts
        if node.op_type == "Mul" and not left.linear:
            left, right = right, left
        if right.linear or left.size:  # a place in a flattened array, a part of a length
            return _Part(linear=True, constants=math.inf, steps=math.inf)
        if not left.linear:
            factor = right.constants if node.op_type == "Mul" else 1.0
            return _Part(constants=left.constants * factor if left.constants and factor else 0.0)
        if right.number is None:
            return _Part(
                linear=True,
                constants=left.constants * max(1.0, right.constants),
                steps=left.steps,
            )
        whole = node.inputs[0] is not None and right.number.dtype.kind in "iu"
        if node.op_type == "Div" and whole:
            return self._in_blocks(left, right.constants)
        return _stretched(left, right.number, inverse=node.op_type == "Div")

    def _in_blocks(self, part: _Part, size: float) -> _Part:
        """Positions divided into blocks, or counted anew in each."""
        if not part.linear:
            return _Part(constants=part.constants + 1)
        steps = part.steps * max(1.0, size)
        self.changes.add(steps + part.constants)
        return _Part(linear=True, constants=part.constants + 1, steps=steps)


def _together(parts: Sequence[_Part]) -> float:
    """Positions after which all of the values have risen by whole numbers."""
    steps = [part.steps for part in parts if part.linear]
    if not all(map(math.isfinite, steps)):
        return math.inf
    return float(math.lcm(*(math.ceil(n) for n in steps)))


def _joined(parts: Sequence[_Part]) -> _Part:
    """One of several values, or the places of both."""
    linear = [part for part in parts if part.linear]
    return _Part(
        linear=bool(linear),
        size=bool(linear) and all(part.size for part in linear),
        constants=max((part.constants for part in parts), default=0.0),
        steps=_together(parts),
    )


def _stretched(part: _Part, numbers: NDArray[Any], *, inverse: bool) -> _Part:
    """A linear part times (or divided by) constants."""
    steps, largest = part.steps, 1.0
    factors = np.unique(numbers.astype(np.float64))
    if factors.size > _SMALL:
        steps = math.inf
    for factor in factors[:_SMALL]:
        if not math.isfinite(factor) or factor == 0:
            continue
        exact = 1 / factor if inverse else factor
        near = Fraction(exact).limit_denominator(_DENOMINATOR)
        told = abs(float(near) - exact) <= 1e-6 * abs(exact)
        steps = steps * near.denominator if told else math.inf
        largest = max(largest, abs(exact))
    return _Part(linear=True, constants=part.constants * largest, steps=steps)


def reach_of(context: Context, values: Sequence[ir.Value], fixed: Fixed) -> float:
    """The number of tokens at which every rule in the computation of ``values`` has shown.

    Infinite where that cannot be told.

    Args:
        context: of the graph.
        values: what a mask's steps read.
        fixed: constants given another content.
    """
    walk = _Walk(context, fixed)
    for value in values:
        walk.follow(value)
    return sum(sorted(walk.changes)[-_MEETING:])
