"""Caches that are buffers: new tokens written at a place that the valid lengths give.

TensorScatter, ScatterElements or ScatterND into a buffer from outside is a static cache when the
tokens go to ``kv_lengths - s, kv_lengths - s + 1, ...``, for the lengths by which the mask hides
the rest. That is looked at with lengths of many kinds; a buffer written at places of a caller's
choosing is no cache (the attention then reads the buffer as it is, which is always exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._scene import Scene

_LOOKS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """One write: ``new`` goes into ``buffer`` along ``axis`` at ``positions``."""

    buffer: ir.Value
    new: ir.Value
    axis: int
    positions: ir.Value
    op_type: str


def written(node: ir.Node, scene: Scene) -> Written | None:
    """The write that ``node`` is, or None."""
    if len(node.inputs) < 3 or any(value is None for value in node.inputs[:3]):
        return None
    first, second, third = node.inputs[:3]
    assert first is not None
    assert second is not None
    assert third is not None
    dims = scene.dims(first)
    attributes = attributes_of(node)
    if dims is None or attributes.get("reduction", "none") not in ("none", b"none"):
        return None
    if node.op_type == "TensorScatter":
        if attributes.get("mode", "linear") != "linear":
            return None
        axis = attributes.get("axis", -2) % len(dims)
        return Written(buffer=first, new=second, axis=axis, positions=third, op_type=node.op_type)
    if node.op_type == "ScatterElements":
        axis = attributes.get("axis", 0) % len(dims)
    elif node.op_type == "ScatterND" and (scene.dims(second) or (0,))[-1] == 1:
        axis = 0
    else:
        return None
    return Written(buffer=first, new=third, axis=axis, positions=second, op_type=node.op_type)


def follows_lengths(write: Written, lengths: ir.Value, scenes: Sequence[Scene]) -> bool:
    """Whether the tokens go to the places right before ``lengths`` [b], whatever those are.

    Looked at where the buffer has room for them: sizes are chosen for each symbol by itself.
    """
    fitting = ((scene, found) for scene in scenes if (found := _counts(write, scene)) is not None)
    scene, (new, count, room) = next(fitting, (scenes[0], ((), 0, 0)))
    if not room:
        return False
    sources = scene.context.sources(write.positions) | scene.context.sources(lengths)
    random = np.random.default_rng(0)
    seen = 0
    for look in range(_LOOKS):
        contents: dict[ir.Value, np.ndarray] = {}
        for source in sorted(sources, key=lambda v: v.name or ""):
            dims, kind = scene.dims(source), scene.dtype(source)
            if dims is None or kind not in (ir.DataType.INT64, ir.DataType.INT32):
                return False
            numbers = random.integers(0 if look % 2 else count, room + 1, dims)
            contents[source] = numbers.astype(kind.numpy())
        view = scene.context.sized(scene.shapes.sizes, contents)
        ends, places = view.array(lengths), view.array(write.positions)
        if ends is None or places is None:
            return False
        if np.any(ends < count) or np.any(ends > room):
            continue
        seen += 1
        if not np.array_equal(places, _expected(write, ends - count, new)):
            return False
    return seen > 1


def all_follow(
    writes: Sequence[Written | None], lengths: ir.Value | None, scenes: Sequence[Scene]
) -> bool:
    """Whether all are writes into a buffer, to the places right before ``lengths`` [b]."""
    return lengths is not None and all(
        write is not None and follows_lengths(write, lengths, scenes) for write in writes
    )


def _counts(write: Written, scene: Scene) -> tuple[tuple[int, ...], int, int] | None:
    """The shape of the tokens, how many there are, and for how many there is room."""
    new, buffer = scene.dims(write.new), scene.dims(write.buffer)
    if new is None or buffer is None or new[write.axis] > buffer[write.axis]:
        return None
    return new, new[write.axis], buffer[write.axis]


def _expected(write: Written, start: np.ndarray, new: tuple[int, ...]) -> np.ndarray:
    """The positions that tokens after ``start`` [b] have, shaped as the op reads them."""
    count = new[write.axis]
    if write.op_type == "TensorScatter":
        return start
    if write.op_type == "ScatterND":
        same = start[0] if start.size and np.all(start == start[0]) else -1
        return same + np.arange(count)[:, None]
    shape = [1] * len(new)
    shape[write.axis] = count
    first = start.reshape(-1, *[1] * (len(new) - 1))
    return np.broadcast_to(first + np.arange(count).reshape(shape), new)
