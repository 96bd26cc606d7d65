"""Axis algebra: a value's axes as ordered products of factors of the value it is a view of.

A factor is (size, stride): how many steps, and how far each step moves in the row-major order of
the *source* value. An axis is a list of factors, outermost first. So

* a head split is one axis cut into two: ``(h*d, 1) -> (h, d), (d, 1)``;
* a Transpose only permutes axes, a Reshape only cuts and joins factors;
* a broadcast is a factor of stride 0, and where it stands tells interleaving from tiling:
  ``[(k, d), (g, 0)]`` repeats each key/value head g times in a row, ``[(g, 0), (k, d)]`` tiles.

Two spellings of one rearrangement give the same view, whatever ops they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

Factor = tuple[int, int]
Axis = tuple[Factor, ...]


def coalesced(factors: Iterable[Factor]) -> Axis:
    """Factors without units, neighbours joined where one continues the other."""
    result: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def axis_size(axis: Axis) -> int:
    return math.prod(size for size, _ in axis)


def row_major(dims: Sequence[int]) -> list[int]:
    """The stride of each axis of a contiguous array."""
    strides = [1] * len(dims)
    for place in range(len(dims) - 2, -1, -1):
        strides[place] = strides[place + 1] * dims[place + 1]
    return strides


@dataclass(frozen=True)
class View:
    """``view[i, j, ...] = source.flat[offset + sum of digit * stride]``."""

    source: ir.Value
    offset: int
    axes: tuple[Axis, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(map(axis_size, self.axes))


def identity(value: ir.Value, dims: Sequence[int]) -> View:
    return View(
        value,
        0,
        tuple(
            coalesced([(size, stride)]) for size, stride in zip(dims, row_major(dims), strict=True)
        ),
    )


def transposed(view: View, perm: Sequence[int]) -> View:
    return View(view.source, view.offset, tuple(view.axes[place] for place in perm))


def reshaped(view: View, dims: Sequence[int]) -> View | None:
    """The same elements in order under new sizes; None where a cut falls inside a factor."""
    pending = list(coalesced(factor for axis in view.axes for factor in axis))[::-1]
    axes: list[Axis] = []
    for dim in dims:
        taken: list[Factor] = []
        left = dim
        while left > 1:
            if not pending:
                return None
            size, stride = pending.pop()
            if left % size == 0:
                taken.append((size, stride))
                left //= size
            elif size % left == 0:
                rest = size // left
                taken.append((left, stride * rest))
                pending.append((rest, stride))
                left = 1
            else:
                return None
        if left == 0:
            return None
        axes.append(coalesced(taken))
    return None if pending else View(view.source, view.offset, tuple(axes))


def sliced(view: View, place: int, start: int, step: int, count: int) -> View | None:
    """``count`` elements of one axis; None where they don't line up with its factors."""
    cut = _cut(view.axes[place], start, step, count)
    if cut is None:
        return None
    offset, axis = cut
    axes = (*view.axes[:place], axis, *view.axes[place + 1 :])
    return View(view.source, view.offset + offset, axes)


def _cut(axis: Axis, start: int, step: int, count: int) -> tuple[int, Axis] | None:
    if count < 1:
        return None
    if not axis:
        return (0, ()) if start == 0 and count == 1 else None
    stride = axis[0][1]
    if len(axis) == 1:
        return start * stride, coalesced([(count, step * stride)])
    inner = axis_size(axis[1:])
    if start % inner == 0 and step == 1 and count % inner == 0:
        return start // inner * stride, coalesced([(count // inner, stride), *axis[1:]])
    if step % inner == 0:
        found = _cut(axis[1:], start % inner, 1, 1)
        if found is None:
            return None
        outer = (count, step // inner * stride)
        return start // inner * stride + found[0], coalesced([outer])
    last = start + (count - 1) * step
    if start // inner == last // inner and step > 0:
        found = _cut(axis[1:], start % inner, step, count)
        return None if found is None else (start // inner * stride + found[0], found[1])
    return None


def broadcast_to(view: View, dims: Sequence[int]) -> View | None:
    """numpy broadcasting: missing and unit axes become factors of stride 0."""
    lead = len(dims) - len(view.axes)
    if lead < 0:
        return None
    axes: list[Axis] = [coalesced([(dim, 0)]) for dim in dims[:lead]]
    for axis, dim in zip(view.axes, dims[lead:], strict=True):
        size = axis_size(axis)
        if size == dim:
            axes.append(axis)
        elif size == 1:
            axes.append(((dim, 0),))
        else:
            return None
    return View(view.source, view.offset, tuple(axes))


def repeated(view: View, repeats: Sequence[int]) -> View:
    """Tile: the repetition is the outer factor."""
    axes = tuple(
        coalesced([(count, 0), *axis]) for axis, count in zip(view.axes, repeats, strict=True)
    )
    return View(view.source, view.offset, axes)


def indexed(view: View, place: int, indices: Sequence[int]) -> View | None:
    """Constant indices into one axis, which stays; None where they are no product of factors."""
    progression = factorised(indices)
    if progression is None:
        return None
    offset, factors = progression
    found: list[Factor] = []
    shift = 0
    start = _cut(view.axes[place], offset, 1, 1)
    if start is None:
        return None
    shift += start[0]
    for size, stride in factors:
        if stride == 0:
            found.append((size, 0))
            continue
        piece = _cut(view.axes[place], offset, stride, size) if stride > 0 else None
        if piece is None or piece[0] != start[0]:
            return None
        found.extend(piece[1])
    if len(view.axes[place]) > 1 and len(factors) > 1:
        return None
    axes = (*view.axes[:place], coalesced(found), *view.axes[place + 1 :])
    return View(view.source, view.offset + shift, axes)


def factorised(indices: Sequence[int]) -> tuple[int, list[Factor]] | None:
    """(offset, factors) with ``indices == offset + mixed-radix sum``, or None."""
    if not indices:
        return None
    base = [index - indices[0] for index in indices]
    factors: list[Factor] = []
    while len(base) > 1:
        stride = base[1]
        run = 1
        while run < len(base) and base[run] == run * stride:
            run += 1
        while len(base) % run:
            run -= 1
        if run == 1:
            return None
        heads = base[::run]
        if any(
            base[place] != heads[place // run] + place % run * stride for place in range(len(base))
        ):
            return None
        factors.insert(0, (run, stride))
        base = heads
    return indices[0], factors


def joined(views: Sequence[View], place: int) -> View | None:
    """Concat of views of one source that differ by regular offsets only."""
    first = views[0]
    if any(view.source is not first.source or view.axes != first.axes for view in views):
        return None
    progression = factorised([view.offset for view in views])
    if progression is None:
        return None
    axis = coalesced([*progression[1], *first.axes[place]])
    axes = (*first.axes[:place], axis, *first.axes[place + 1 :])
    return View(first.source, first.offset, axes)


def composed(outer: View, inner: View) -> View | None:
    """``outer`` is a view of a value that is itself ``inner``: the same view of inner's source.

    None where a factor of ``outer`` straddles factors of ``inner`` unevenly.
    """
    ladder = _ladder(inner)
    extents = [0] * len(ladder)
    axes: list[Axis] = []
    for axis in outer.axes:
        factors: list[Factor] = []
        for size, stride in axis:
            pieces = _through(size, stride, ladder, extents)
            if pieces is None:
                return None
            factors.extend(pieces)
        axes.append(coalesced(factors))
    offset = inner.offset
    rest = outer.offset
    for place, (size, stride, step) in enumerate(ladder):
        digit, rest = divmod(rest, step)
        if digit + extents[place] >= size:
            return None
        offset += digit * stride
    return None if rest else View(inner.source, offset, tuple(axes))


def _ladder(inner: View) -> list[tuple[int, int, int]]:
    """(size, stride in the source, stride in the row-major order of the view), outermost first."""
    factors = [factor for axis in inner.axes for factor in axis]
    steps = row_major([size for size, _ in factors])
    return [(size, stride, step) for (size, stride), step in zip(factors, steps, strict=True)]


def _through(
    size: int, stride: int, ladder: list[tuple[int, int, int]], extents: list[int]
) -> list[Factor] | None:
    """One factor of the outer view as factors of the source, innermost rung first then reversed."""
    if stride == 0 or size == 1:
        return [(size, 0)] if size > 1 else []
    pieces: list[Factor] = []
    place = len(ladder) - 1
    while size > 1:
        while place >= 0 and not ladder[place][2] <= stride < ladder[place][2] * ladder[place][0]:
            place -= 1
        if place < 0:
            return None
        rungs, below, step = ladder[place]
        if stride % step:
            return None
        jump = stride // step
        if (size - 1) * jump < rungs:
            taken = size
        elif rungs % jump or size % (rungs // jump):
            return None
        else:
            taken = rungs // jump
        pieces.append((taken, jump * below))
        extents[place] += (taken - 1) * jump
        size //= taken
        stride = step * rungs
    return pieces[::-1]


def split_by_axis(view: View, dims: Sequence[int]) -> list[list[tuple[int, int, int]]] | None:
    """Each axis of ``view`` as (size, axis of the source, step in that axis) pieces.

    Broadcast factors are (size, -1, 0). None where a factor straddles source axes unevenly.
    """
    strides = row_major(dims)
    result: list[list[tuple[int, int, int]]] = []
    for axis in view.axes:
        pieces: list[tuple[int, int, int]] = []
        for size, stride in axis:
            found = _by_axis(size, stride, dims, strides)
            if found is None:
                return None
            pieces.extend(found)
        result.append(pieces)
    return result


def _by_axis(
    size: int, stride: int, dims: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    if stride == 0:
        return [(size, -1, 0)]
    if stride < 0:
        return None
    pieces: list[tuple[int, int, int]] = []
    while size > 1:
        place = next(
            (i for i, dim in enumerate(dims) if strides[i] <= stride < strides[i] * dim), None
        )
        if place is None or stride % strides[place]:
            return None
        jump = stride // strides[place]
        if (size - 1) * jump < dims[place]:
            taken = size
        elif dims[place] % jump or size % (dims[place] // jump):
            return None
        else:
            taken = dims[place] // jump
        pieces.append((taken, place, jump))
        size //= taken
        stride = strides[place] * dims[place]
    return pieces[::-1]
