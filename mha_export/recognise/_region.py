"""A small region of a graph between one value and another, run on data of our own.

Rotary embedding and qk-norm are laws from one tensor ``before`` to another, with a few side inputs
(tables, weights). The region between is found by walking up, fed, and evaluated without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise import _masks_sizes as graph_sizes
from mha_export.recognise._evaluate import Context, SizedView

MAX_NODES = 48

_STEERED = frozenset(
    {
        "Cast", "Expand", "Gather", "Identity", "Pad", "ReduceL2", "ReduceMean", "ReduceSum",
        "ReduceSumSquare", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip
"""Ops whose first input alone is data; the others are shapes, axes and indices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """All that lies between ``before`` and ``after``.

    Attributes:
        nodes: in the order found, from ``after`` upward.
        sides: float values of more than one element that enter from outside, in order.
    """

    before: ir.Value
    after: ir.Value
    nodes: tuple[ir.Node, ...]
    sides: tuple[ir.Value, ...]


def regions(
    context: Context, after: ir.Value, ops: frozenset[str], *, sizes: Mapping[str, int]
) -> Iterator[Region]:
    """Regions of ``ops`` below each value of the same shape as ``after``, the nearest first."""
    view = context.sized(sizes)
    shape = view.shape(after)
    reached = _reached(after, ops)
    for before in _values_above(after, reached):
        if before is after or view.shape(before) != shape:
            continue
        nodes = _between(before, after, reached)
        if nodes is not None:
            sides = _sides(context, before, nodes)
            yield Region(before=before, after=after, nodes=tuple(nodes), sides=sides)


def upward(after: ir.Value, ops: frozenset[str]) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """Each value above ``after`` through nodes of ``ops``, with the nodes between, lowest first."""
    reached = _reached(after, ops)
    for before in _values_above(after, reached):
        nodes = _between(before, after, reached)
        if nodes is not None:
            yield before, nodes


def region_of(context: Context, before: ir.Value, after: ir.Value, nodes: list[ir.Node]) -> Region:
    """The region of the nodes between two values."""
    sides = _sides(context, before, nodes)
    return Region(before=before, after=after, nodes=tuple(nodes), sides=sides)


def sizes_of(context: Context, value: ir.Value) -> Mapping[str, int] | None:
    """Sizes, all different and above one where they can be, at which the value has a shape."""
    kept = context.memo.get("region sizes")
    if kept is not None and context.sized(kept).shape(value) is not None:
        found: Mapping[str, int] = kept
        return found
    plans = graph_sizes.plans(context, scores=value, inputs=())
    if not plans:
        return None
    context.memo["region sizes"] = plans[0]
    return plans[0]


def run(
    context: Context,
    region: Region,
    contents: Mapping[ir.Value, np.ndarray],
    sizes: Mapping[str, int],
) -> tuple[SizedView, np.ndarray | None]:
    """The view with ``contents`` fed, and what it makes of ``after``, in float64."""
    view = context.sized(sizes, contents, wide=True)
    return view, view.array(region.after)


def _reached(after: ir.Value, ops: frozenset[str]) -> list[ir.Node]:
    """Nodes above ``after`` that are made of ``ops``, breadth first."""
    nodes: dict[ir.Node, None] = {}
    front = [after]
    while front and len(nodes) < MAX_NODES:
        following: list[ir.Value] = []
        for value in front:
            node = value.producer()
            if node is not None and node.op_type in ops and node not in nodes:
                nodes[node] = None
                following += data_inputs(node)
        front = following
    return list(nodes)


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs that carry numbers through the node, not shapes, axes or indices."""
    inputs = node.inputs[:1] if node.op_type in _STEERED else node.inputs
    if node.op_type == "ScatterND":
        inputs = (node.inputs[0], node.inputs[2])
    return [value for value in inputs if value is not None]


def _values_above(after: ir.Value, nodes: Sequence[ir.Node]) -> Iterator[ir.Value]:
    seen = {after}
    for node in nodes:
        for value in data_inputs(node):
            if value not in seen:
                seen.add(value)
                yield value


def _between(before: ir.Value, after: ir.Value, reached: Sequence[ir.Node]) -> list[ir.Node] | None:
    """The reached nodes that compute ``after`` from ``before``; None where none does."""
    allowed = set(reached)
    depends: dict[ir.Value, bool] = {before: True}
    stack = [after]
    while stack:
        value = stack[-1]
        node = value.producer()
        if value in depends:
            stack.pop()
            continue
        if node is None or node not in allowed:
            depends[value] = False
            stack.pop()
            continue
        inner = data_inputs(node)
        missing = [item for item in inner if item not in depends]
        if missing:
            stack.extend(missing)
            continue
        depends[value] = any(depends[item] for item in inner)
        stack.pop()
    if not depends[after]:
        return None
    return [
        node
        for node in reached
        if any(depends.get(output, False) and output is not before for output in node.outputs)
    ]


def _sides(context: Context, before: ir.Value, nodes: Sequence[ir.Node]) -> tuple[ir.Value, ...]:
    made = {output for node in nodes for output in node.outputs}
    sides: dict[ir.Value, None] = {}
    for node in nodes:
        for value in data_inputs(node):
            if value is before or value in made:
                continue
            constant = context.literal(value)
            if constant is None or (constant.size > 1 and constant.dtype.kind not in "iub"):
                sides[value] = None
    return tuple(sides)
