"""Values that the graph does not hold, made from those it does: a transposed key, a split batch.

A form reads heads in one of three layouts and masks as [batch, heads, queries, keys]. Where the
graph only has another arrangement (keys already transposed, batch merged into heads, a context
split over image rows), the missing value is derived in the recogniser's copy by Reshape, Transpose
and Expand. Sizes come from the attention's operands, never from its scores, so that nothing inside
the attention is kept alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.recognise._axes import Axis
from mha_export.recognise._scene import Scene

Size = int | ir.Value
"""A size: a number, or a value [1] int64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A factor of some axis.

    Attributes:
        size: at the sizes of the first scene. stride: where the axis is described.
        dim: the size in the graph: a number, or what derives it when it is needed.
    """

    role: str
    size: int
    stride: int
    dim: int | Callable[[], Size]

    def resolved(self) -> Size:
        return self.dim if isinstance(self.dim, int) else self.dim()


class Deriver:
    """Makes values before one node and lets every scene know their shapes."""

    def __init__(self, scenes: Sequence[Scene], before: ir.Node) -> None:
        self.scenes = scenes
        self.before = before

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | np.ndarray | None],
        attributes: Mapping[str, Any] | None = None,
    ) -> ir.Value:
        (value,) = self.scenes[0].context.derive(op_type, inputs, attributes, before=self.before)
        node = value.producer()
        assert node is not None
        for scene in self.scenes:
            for given in node.inputs:
                maker = None if given is None else given.producer()
                if maker is not None and maker.op_type == "Constant":
                    scene.shapes.learn(maker)
            scene.shapes.learn(node)
        source = next((v for v in inputs if isinstance(v, ir.Value)), None)
        dtype = None if source is None else self.scenes[0].dtype(source)
        if value.dtype is None and dtype is not None and op_type in _KEEPING:
            value.dtype = dtype
        return value

    def size(self, value: ir.Value, axis: int) -> Size:
        """The size of one axis: a number where it is the same in every scene."""
        known = [scene.dims(value) for scene in self.scenes]
        if len({None if dims is None else dims[axis] for dims in known}) == 1 and known[0]:
            return known[0][axis]
        shape = self("Shape", [value])
        return self("Slice", [shape, ints(axis), ints(axis + 1), ints(0)])

    def shape(
        self, before: Sequence[Sequence[Part]], axes: Sequence[Sequence[Part]]
    ) -> ir.Value | np.ndarray:
        """A shape for Reshape from axes ``before`` to ``axes``, each some parts joined.

        An unknown size that stays in its place is copied: beside a length that is a number in the
        graph, a size left open would make up for any other length. One more is left open.
        """
        unknown = [
            place
            for place, axis in enumerate(axes)
            if any(not isinstance(part.dim, int) for part in axis)
        ]
        copied = [
            place
            for place in unknown
            if place < len(before) and list(before[place]) == list(axes[place])
        ]
        if len(unknown) > len(copied) + 1:
            return self.exact_shape(axes)
        return ints(
            *(
                0 if place in copied else -1 if place in unknown else _static(axis)
                for place, axis in enumerate(axes)
            )
        )

    def exact_shape(self, axes: Sequence[Sequence[Part]]) -> ir.Value | np.ndarray:
        """A shape for Expand: every size stated."""
        sizes = [self.joined(axis) for axis in axes]
        if all(isinstance(size, int) for size in sizes):
            return ints(*(size for size in sizes if isinstance(size, int)))
        parts = [ints(size) if isinstance(size, int) else size for size in sizes]
        return self("Concat", parts, {"axis": 0}) if len(parts) > 1 else parts[0]

    def joined(self, parts: Sequence[Part]) -> Size:
        """The size of several factors together."""
        number = _static([part for part in parts if isinstance(part.dim, int)])
        total: ir.Value | None = None
        for part in parts:
            if isinstance(part.dim, int):
                continue
            size = part.resolved()
            if isinstance(size, int):
                number *= size
            else:
                total = size if total is None else self("Mul", [total, size])
        if total is None:
            return number
        return total if number == 1 else self("Mul", [total, ints(number)])

    def total(self, sizes: Sequence[Size]) -> Size:
        """Sizes added."""
        first, *rest = sizes
        for size in rest:
            if isinstance(first, int) and isinstance(size, int):
                first += size
            else:
                pair = [ints(n) if isinstance(n, int) else n for n in (first, size)]
                first = self("Add", pair)
        return first

    def quotient(self, size: Size, divisor: int) -> Size:
        if isinstance(size, int):
            return size // divisor
        return size if divisor == 1 else self("Div", [size, ints(divisor)])

    def reshape(
        self, value: ir.Value, before: Sequence[Sequence[Part]], axes: Sequence[Sequence[Part]]
    ) -> ir.Value:
        return self("Reshape", [value, self.shape(before, axes)])

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        if list(perm) == sorted(perm):
            return value
        return self("Transpose", [value], {"perm": list(perm)})


_KEEPING = frozenset({"Reshape", "Transpose", "Expand", "Slice", "Unsqueeze", "Mul", "Neg", "Not"})


def ints(*numbers: int) -> np.ndarray:
    """Numbers as ONNX wants shapes, axes and bounds: int64 of rank 1."""
    return np.array(numbers, np.int64)


def _static(parts: Sequence[Part]) -> int:
    return math.prod(part.dim for part in parts if isinstance(part.dim, int))


def partitioned(axes: Sequence[Axis], parts: Sequence[Part]) -> list[list[Part]] | None:
    """Each axis as the parts it consists of; None unless every part is used just once."""
    unused = [part for part in parts if part.size > 1]
    result: list[list[Part]] = []
    for axis in axes:
        found: list[Part] = []
        pending = list(axis)
        while pending:
            size, stride = pending[-1]
            part = next((p for p in unused if p.stride == stride and size % p.size == 0), None)
            if part is None:
                return None
            unused.remove(part)
            found.insert(0, part)
            if size == part.size:
                pending.pop()
            else:
                pending[-1] = (size // part.size, stride * part.size)
        result.append(found)
    return None if unused else result


def arranged(
    value: ir.Value,
    axes: Sequence[Sequence[Part]],
    order: Sequence[Sequence[Part]],
    derive: Deriver,
) -> ir.Value:
    """``value``, whose axes consist of ``axes``, with the axes ``order``.

    Parts that stay neighbours are moved as one: a pure regrouping is one Reshape.
    """
    flat = [part for axis in axes for part in axis]
    wanted = [part for axis in order for part in axis]
    runs: list[list[Part]] = []
    for part in flat:
        place = wanted.index(part)
        if runs and place and wanted[place - 1] is runs[-1][-1]:
            runs[-1].append(part)
        else:
            runs.append([part])
    moved = sorted(range(len(runs)), key=lambda index: wanted.index(runs[index][0]))
    if moved != list(range(len(runs))):
        if [list(axis) for axis in axes] != runs:
            value = derive.reshape(value, axes, runs)
        value = derive.transpose(value, moved)
        axes = [runs[index] for index in moved]
    if [list(axis) for axis in axes] != [list(axis) for axis in order]:
        value = derive.reshape(value, axes, order)
    return value
