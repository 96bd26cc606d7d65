"""What a mask reads besides positions: candidates for the operand, and the patterns fed to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from mha_export.recognise._evaluate import Context

MAX_NODES = 2000
"""A mask computed by more nodes than this is not searched for operands."""

_LARGE = 1 << 24
"""Whole numbers from here on are no longer exact in float32."""

_BOOLEAN = frozenset(
    {
        "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual",
        "Not", "Or", "Xor",
    }
)  # fmt: skip
_PASSING = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad",
        "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip


def dtype_of(value: ir.Value) -> ir.DataType | None:
    """The annotated dtype, or the one that the producing ops imply."""
    current = value
    for _ in range(64):
        if current.dtype is not None:
            return current.dtype
        node = current.producer()
        if node is None:
            return None
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        if node.op_type in _BOOLEAN:
            return ir.DataType.BOOL
        if node.op_type not in _PASSING or node.inputs[0] is None:
            return None
        current = node.inputs[0]
    return None


def cuts(context: Context, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Values that alone, with sizes and constants, decide ``values``; graph inputs first."""
    order = _ancestors(context, values)
    if order is None:
        return []
    reachable = [v for v in order if _decides(context, values, v)]
    return sorted(reachable, key=lambda v: not v.is_graph_input())


def _ancestors(context: Context, values: Sequence[ir.Value]) -> list[ir.Value] | None:
    """Values with sources that ``values`` are computed from, sources first; None: too many."""
    order: list[ir.Value] = []
    seen: set[ir.Value] = set()
    stack = [(value, False) for value in reversed(values)]
    while stack:
        value, done = stack.pop()
        if done:
            order.append(value)
            continue
        if value in seen or not context.sources(value):
            continue
        seen.add(value)
        if len(seen) > MAX_NODES:
            return None
        stack.append((value, True))
        if context.sources(value) != frozenset({value}):
            stack.extend((item, False) for item in reversed(context.content_inputs(value)))
    return order


def _decides(context: Context, values: Sequence[ir.Value], cut: ir.Value) -> bool:
    stack, seen = list(values), {cut}
    while stack:
        value = stack.pop()
        if value in seen or not context.sources(value):
            continue
        seen.add(value)
        if context.sources(value) == frozenset({value}):
            return False
        stack.extend(context.content_inputs(value))
    return True


def padding_feeds(batch: int, keys: int) -> Iterator[np.ndarray]:
    """0/1 arrays [b, t]: none, right, left padding, holes, a lone key, all; rows differ."""
    rows = np.ones((7, keys), np.int64)
    rows[1, (keys + 1) // 2 :] = 0
    rows[2, : keys // 2] = 0
    rows[3, 1::3] = 0
    rows[4, : keys - 1] = 0
    rows[5] = np.random.default_rng(7).integers(0, 2, keys)
    rows[6] = 0
    yield np.ones((batch, keys), np.int64)
    count = -(-len(rows) // batch)
    for turn in range(count):
        yield rows[[(turn * batch + i) % len(rows) for i in range(batch)]]


def rich_feed(batch: int, keys: int, numbers: Iterable[int]) -> np.ndarray:
    """Integers that are no flags: they tell a test for non-zero from another test, or arithmetic.

    Among them those around ``numbers``, that the mask may compare them with.
    """
    beside = {n + step for n in numbers if n < _LARGE for step in (-1, 0, 1)} - {0}
    pattern = np.asarray([1, 0, 2, 5, 1, 3, 0, 7, *sorted(beside)], np.int64)
    return np.stack([np.resize(np.roll(pattern, i), keys) for i in range(batch)])


def length_feeds(batch: int, keys: int) -> Iterator[np.ndarray]:
    """Numbers of keys [b]: all, none, and some."""
    yield np.full(batch, keys, np.int64)
    yield np.zeros(batch, np.int64)
    rng = np.random.default_rng(11)
    for _ in range(3):
        yield rng.integers(0, keys + 1, batch)


def document_feeds(batch: int, keys: int) -> Iterator[np.ndarray]:
    """Document ids [b, t], one document first."""
    yield np.ones((batch, keys), np.int64)
    rng = np.random.default_rng(13)
    for _ in range(2):
        yield np.sort(rng.integers(0, 3, (batch, keys)), axis=1)
    yield rng.integers(0, 4, (batch, keys))
    yield rng.choice([1, 2, 1 + 2**20, 1 + 10**6], (batch, keys))
