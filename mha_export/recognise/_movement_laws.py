"""Shapes of the ops that only move elements: Reshape, Transpose, Slice, Concat and their kin."""

from __future__ import annotations

from collections.abc import Sequence

from mha_export.recognise._shape_laws import Facts, Law, Shape, broadcast


def _product(dims: Sequence[int | None]) -> int | None:
    total = 1
    for dim in dims:
        if dim is None:
            return None
        total *= dim
    return total


def _reshape(facts: Facts) -> Sequence[Shape | None]:
    source, target = facts.shapes[0], facts.content(1) if len(facts.shapes) > 1 else None
    if target is None:
        target = facts.steering(1, "shape")
    if target is None:
        return (None,)
    dims: list[int | None] = list(target)
    if not facts.attributes.get("allowzero", 0):
        for axis, dim in enumerate(dims):
            if dim == 0:
                dims[axis] = source[axis] if source is not None and axis < len(source) else None
    if -1 in dims:
        hole = dims.index(-1)
        rest = _product(dims[:hole] + dims[hole + 1 :])
        total = None if source is None else _product(source)
        if total is None and source is not None and rest is not None:
            dims[hole] = None
        elif total is None or not rest or total % rest:
            if total is not None and rest:
                facts.conflicts.append((total, rest))
            dims[hole] = None
        else:
            dims[hole] = total // rest
    elif source is not None:
        total, made = _product(source), _product(dims)
        if total is not None and made is not None and total != made:
            facts.conflicts.append((total, made))
    return (tuple(dims),)


def _transpose(facts: Facts) -> Sequence[Shape | None]:
    source = facts.shapes[0]
    if source is None:
        return (None,)
    perm = facts.attributes.get("perm") or range(len(source))[::-1]
    return (tuple(source[axis] for axis in perm),)


def _unsqueeze(facts: Facts) -> Sequence[Shape | None]:
    source, axes = facts.shapes[0], facts.steering(1, "axes")
    if source is None or axes is None:
        return (None,)
    rank = len(source) + len(axes)
    places = {axis % rank for axis in axes}
    dims = iter(source)
    return (tuple(1 if axis in places else next(dims) for axis in range(rank)),)


def _squeeze(facts: Facts) -> Sequence[Shape | None]:
    source, axes = facts.shapes[0], facts.steering(1, "axes")
    if source is None:
        return (None,)
    if axes is None:
        if facts.given(1):
            return (None,)
        return (tuple(dim for dim in source if dim != 1),)
    places = {axis % len(source) for axis in axes}
    return (tuple(dim for axis, dim in enumerate(source) if axis not in places),)


def _flatten(facts: Facts) -> Sequence[Shape | None]:
    source = facts.shapes[0]
    if source is None:
        return ((None, None),)
    axis = facts.attributes.get("axis", 1)
    axis = axis + len(source) if axis < 0 else axis
    return ((_product(source[:axis]), _product(source[axis:])),)


def _expand(facts: Facts) -> Sequence[Shape | None]:
    target = facts.content(1)
    if target is None:
        return (None,)
    return (broadcast([facts.shapes[0], tuple(target)], facts.conflicts),)


def _tile(facts: Facts) -> Sequence[Shape | None]:
    source, repeats = facts.shapes[0], facts.content(1)
    if source is None or repeats is None:
        return (None,)
    return (tuple(None if d is None else d * r for d, r in zip(source, repeats, strict=True)),)


def slice_bounds(facts: Facts, rank: int) -> list[tuple[int, int | None, int | None, int]] | None:
    """(axis, start, end, step) as written, or None where they are unknown."""
    starts, ends = facts.steering(1, "starts"), facts.steering(2, "ends")
    if starts is None or ends is None:
        return None
    axes = facts.steering(3, "axes")
    if axes is None:
        if facts.given(3):
            return None
        axes = list(range(len(starts)))
    steps = facts.content(4)
    if steps is None:
        if facts.given(4):
            return None
        steps = [1] * len(starts)
    return [
        (axis % rank, start, end, step)
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]


def slice_range(start: int, end: int, step: int, size: int) -> range:
    """The indices ONNX Slice takes from an axis of ``size``."""
    stop = None if step < 0 and end < -size else end
    return range(*slice(start, stop, step).indices(size))


def _slice(facts: Facts) -> Sequence[Shape | None]:
    source = facts.shapes[0]
    if source is None:
        return (None,)
    bounds = slice_bounds(facts, len(source))
    dims = list(source)
    if bounds is None:
        axes = facts.steering(3, "axes")
        for axis in range(len(dims)) if axes is None else axes:
            dims[axis] = None
        return (tuple(dims),)
    for axis, start, end, step in bounds:
        size = dims[axis]
        dims[axis] = (
            None
            if size is None or start is None or end is None
            else len(slice_range(start, end, step, size))
        )
    return (tuple(dims),)


def split_sizes(facts: Facts, size: int) -> list[int]:
    """The lengths a Split cuts an axis of ``size`` into."""
    sizes = facts.steering(1, "split")
    if sizes is None:
        parts = facts.attributes.get("num_outputs", facts.outputs)
        chunk = -(-size // parts)
        sizes = [chunk] * (parts - 1) + [size - chunk * (parts - 1)]
    return sizes


def _split(facts: Facts) -> Sequence[Shape | None]:
    source = facts.shapes[0]
    if source is None:
        return (None,) * facts.outputs
    axis = facts.attributes.get("axis", 0) % len(source)
    size = source[axis]
    if size is None:
        return ((*source[:axis], None, *source[axis + 1 :]),) * facts.outputs
    return [(*source[:axis], n, *source[axis + 1 :]) for n in split_sizes(facts, size)]


def _gather(facts: Facts) -> Sequence[Shape | None]:
    data, indices = facts.shapes[0], facts.shapes[1]
    if data is None or indices is None:
        return (None,)
    axis = facts.attributes.get("axis", 0) % len(data)
    return (data[:axis] + indices + data[axis + 1 :],)


def _gather_nd(facts: Facts) -> Sequence[Shape | None]:
    data, indices = facts.shapes[0], facts.shapes[1]
    if data is None or indices is None or indices[-1] is None:
        return (None,)
    lead = facts.attributes.get("batch_dims", 0)
    return (indices[:-1] + data[lead + indices[-1] :],)


def _of_indices(facts: Facts) -> Sequence[Shape | None]:
    return (facts.shapes[1],)


def _concat(facts: Facts) -> Sequence[Shape | None]:
    shapes = [shape for shape in facts.shapes if shape is not None]
    if not shapes:
        return (None,)
    axis = facts.attributes["axis"] % len(shapes[0])
    dims: list[int | None] = list(shapes[0])
    for other in shapes[1:]:
        for place, dim in enumerate(other):
            if place == axis or dim == dims[place]:
                continue
            if dims[place] is None:
                dims[place] = dim
            elif dim is not None:
                facts.conflicts.append((dims[place] or 0, dim))
    lengths = [None if shape is None else shape[axis] for shape in facts.shapes]
    dims[axis] = None if None in lengths else sum(n for n in lengths if n is not None)
    return (tuple(dims),)


def _pad(facts: Facts) -> Sequence[Shape | None]:
    source, pads = facts.shapes[0], facts.steering(1, "pads")
    if source is None:
        return (None,)
    if pads is None:
        return ((None,) * len(source),)
    half = len(pads) // 2
    axes = facts.content(3) if facts.given(3) else list(range(half))
    dims = list(source)
    for place, axis in enumerate(axes or []):
        size = dims[axis]
        dims[axis] = None if size is None else size + pads[place] + pads[place + half]
    return (tuple(dims),)


MOVES: dict[str, Law] = {
    "Concat": _concat,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _of_indices,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
