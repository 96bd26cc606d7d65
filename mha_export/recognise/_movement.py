"""Which ops only move elements, and the view each makes of its input.

``Views.of(value)`` is the view of the nearest ancestor that is not such an op; memoised, so a
graph costs one view per value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from mha_export.recognise._axes import (
    View,
    broadcast_to,
    identity,
    indexed,
    joined,
    repeated,
    reshaped,
    sliced,
    transposed,
)
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._movement_laws import slice_bounds, slice_range, split_sizes
from mha_export.recognise._shape_laws import Facts
from mha_export.recognise._shapes import Shapes

RENAMING = frozenset({"Identity", "Dropout"})
"""Ops whose first output is their first input, at inference."""


class Views:
    """Views of every value of one graph at one choice of sizes.

    At sizes that a Reshape contradicts (blocks of 4 cut from 5 tokens) its output is no view, nor
    anything that could be read: what the graph says of it there would be made up.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self._views: dict[ir.Value, View | None] = {}

    def of(self, value: ir.Value) -> View | None:
        """The view of ``value``; None where its shape is unknown or contradicts itself."""
        pending = [value]
        while pending:
            current = pending[-1]
            if current in self._views:
                pending.pop()
                continue
            inputs = [v for v in moved_inputs(current) if v not in self._views]
            if inputs:
                pending.extend(inputs)
                continue
            self._views[current] = self._made(current)
            pending.pop()
        return self._views[value]

    def source(self, value: ir.Value) -> ir.Value:
        """The value ``value`` is a view of (itself where nothing moves)."""
        view = self.of(value)
        return value if view is None else view.source

    def _made(self, value: ir.Value) -> View | None:
        dims = self.shapes.dims(value)
        if dims is None or 0 in dims:
            return None
        node = value.producer()
        if node is not None and moved_inputs(value):
            view = LAWS[node.op_type](self, value, node)
            if view is not None and view.dims == dims:
                return view
            if LAWS[node.op_type] is _regroup and not self._holds_as_many(node, dims):
                return None
        return identity(value, dims)

    def _holds_as_many(self, node: ir.Node, dims: tuple[int, ...]) -> bool:
        """Whether the input of a Reshape has the elements that are asked for at these sizes."""
        source = node.inputs[0]
        given = None if source is None else self.shapes.dims(source)
        return given is None or math.prod(given) == math.prod(dims)

    def facts(self, node: ir.Node) -> Facts:
        return Facts(
            [None if v is None else self.shapes.shape(v) for v in node.inputs],
            [self.shapes.content(v) for v in node.inputs],
            attributes_of(node),
            len(node.outputs),
            [],
        )


def moved_inputs(value: ir.Value) -> tuple[ir.Value, ...]:
    """The inputs whose elements ``value``'s producer moves; empty where it computes."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in LAWS:
        return ()
    if node.op_type == "Concat":
        return tuple(v for v in node.inputs if v is not None)
    if node.op_type == "Dropout" and value.index() != 0:
        return ()
    first = node.inputs[0]
    return () if first is None else (first,)


Law = Callable[[Views, ir.Value, ir.Node], View | None]


def _input_view(views: Views, node: ir.Node) -> View | None:
    source = node.inputs[0]
    return None if source is None else views.of(source)


def _rename(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    return _input_view(views, node)


def _regroup(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    """Reshape, Squeeze, Unsqueeze, Flatten: the order of elements stays."""
    view, dims = _input_view(views, node), views.shapes.dims(value)
    return None if view is None or dims is None else reshaped(view, dims)


def _transpose(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view = _input_view(views, node)
    if view is None:
        return None
    perm = attributes_of(node).get("perm") or range(len(view.axes))[::-1]
    return transposed(view, perm)


def _expand(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view, dims = _input_view(views, node), views.shapes.dims(value)
    return None if view is None or dims is None else broadcast_to(view, dims)


def _tile(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view, repeats = _input_view(views, node), views.facts(node).content(1)
    return None if view is None or repeats is None else repeated(view, repeats)


def _slice(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view = _input_view(views, node)
    if view is None:
        return None
    bounds = slice_bounds(views.facts(node), len(view.axes))
    if bounds is None:
        return None
    dims = view.dims
    for place, start, end, step in bounds:
        if start is None or end is None:
            return None
        taken = slice_range(start, end, step, dims[place])
        cut = sliced(view, place, taken.start, taken.step, len(taken))
        if cut is None:
            return None
        view = cut
    return view


def _split(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view = _input_view(views, node)
    index = value.index()
    if view is None or index is None:
        return None
    facts = views.facts(node)
    place = facts.attributes.get("axis", 0) % len(view.axes)
    sizes = split_sizes(facts, view.dims[place])
    return sliced(view, place, sum(sizes[:index]), 1, sizes[index])


def _gather(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    view, facts = _input_view(views, node), views.facts(node)
    indices, shape = facts.contents[1], facts.shapes[1]
    if view is None or indices is None or shape is None:
        return None
    place = facts.attributes.get("axis", 0) % len(view.axes)
    size = view.dims[place]
    numbers = [int(n) + size if n < 0 else int(n) for n in indices.reshape(-1)]
    if any(not 0 <= n < size for n in numbers):
        return None
    if len(shape) == 0:
        cut = sliced(view, place, numbers[0], 1, 1)
        if cut is None:
            return None
        return View(cut.source, cut.offset, (*cut.axes[:place], *cut.axes[place + 1 :]))
    found = indexed(view, place, numbers)
    if found is None or len(shape) == 1:
        return found
    dims = views.shapes.dims(value)
    return None if dims is None else reshaped(found, dims)


def _concat(views: Views, value: ir.Value, node: ir.Node) -> View | None:
    parts = [None if v is None else views.of(v) for v in node.inputs]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    place = attributes_of(node)["axis"] % len(known[0].axes)
    return known[0] if len(known) == 1 else joined(known, place)


LAWS: dict[str, Law] = {
    "Concat": _concat,
    "Dropout": _rename,
    "Expand": _expand,
    "Flatten": _regroup,
    "Gather": _gather,
    "Identity": _rename,
    "Reshape": _regroup,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _regroup,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _regroup,
}
