"""From P·V down to where the heads are merged again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._axes import Axis, View, composed, identity
from mha_export.recognise._bind import Pattern
from mha_export.recognise._movement import moved_inputs
from mha_export.recognise._scene import Scene

_SHAPE_ONLY = frozenset({"Shape", "Size"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Landing:
    """A value below P·V that holds nothing but its elements, as a view of the product's output."""

    value: ir.Value
    view: View
    cast: bool


def landings(output: ir.Value, scene: Scene) -> list[Landing]:
    """The output and every rearrangement of it that alone goes on, nearest to the product first."""
    dims = scene.dims(output)
    if dims is None:
        return []
    found = [Landing(value=output, view=identity(output, dims), cast=False)]
    base, onto = output, identity(output, dims)
    while True:
        last = found[-1]
        value = _only_use(last.value)
        if value is None:
            return found
        if _is_cast(value):
            kind = scene.dtype(value)
            if kind is None or not kind.is_floating_point():
                return found
            base, onto = value, last.view
            found.append(Landing(value=value, view=last.view, cast=True))
            continue
        view = scene.views.of(value)
        if view is None or view.source is not base:
            return found
        seen = composed(view, onto)
        if seen is None:
            return found
        found.append(Landing(value=value, view=seen, cast=last.cast))


def _is_cast(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Cast"


def readers_of(value: ir.Value) -> list[ir.Node]:
    """The nodes that read the value's content (not only its shape)."""
    users = dict.fromkeys(node for node, _ in value.uses())
    return [node for node in users if node.op_type not in _SHAPE_ONLY]


def _only_use(value: ir.Value) -> ir.Value | None:
    """What the value becomes when one node rearranges or casts it, or pieces are joined again."""
    if value.is_graph_output():
        return None
    users = readers_of(value)
    if len(users) > 1:
        return _rejoined(users)
    if len(users) != 1:
        return None
    node = users[0]
    output = node.outputs[0]
    if node.op_type == "Cast" or moved_inputs(output) == (value,):
        if len(node.outputs) > 1 and node.op_type != "Dropout":
            return _rejoined(users)
        return output
    return None


def _rejoined(users: list[ir.Node]) -> ir.Value | None:
    """The Concat that all pieces cut by ``users`` go into: heads taken one by one, stacked."""
    pieces = [value for node in users for value in node.outputs]
    for _ in range(3):
        following: dict[ir.Node, None] = {}
        for value in pieces:
            if value.is_graph_output() or not moved_inputs(value):
                return None
            following.update(dict.fromkeys(readers_of(value)))
        nodes = list(following)
        if len(nodes) == 1:
            return nodes[0].outputs[0] if nodes[0].op_type == "Concat" else None
        pieces = [value for node in nodes for value in node.outputs]
    return None


def merged_with_channels(places: list[Landing], channels: Axis) -> Axis:
    """The factors that some rearrangement joins with the channels into one axis."""
    for landing in places:
        for axis in landing.view.axes:
            rest = _beside(axis, channels)
            if rest:
                return rest
    return ()


def _beside(axis: Axis, channels: Axis) -> Axis:
    if len(channels) != 1 or not axis:
        return ()
    width, stride = channels[0]
    size, last = axis[-1]
    if last != stride or size % width:
        return ()
    rest = axis[:-1]
    return rest if size == width else (*rest, (size // width, stride * width))


def graph_outputs(value: ir.Value, scene: Scene) -> Iterator[tuple[ir.Value, View]]:
    """``value`` and its rearrangements that leave the graph, as views of it."""
    return ((v, view) for v, view in rearranged(value, scene) if v.is_graph_output())


def rearranged(value: ir.Value, scene: Scene) -> Iterator[tuple[ir.Value, View]]:
    """``value`` and its rearrangements, as views of it."""
    pending = [value]
    while pending:
        current = pending.pop()
        view = scene.views.of(current)
        if view is None or view.source is not value:
            continue
        yield current, view
        for node, _ in current.uses():
            pending.extend(out for out in node.outputs if moved_inputs(out) == (current,))


def averaged(landing: Landing, pattern: Pattern, scene: Scene) -> Heads | None:
    """The mean over exactly the heads, when that is all that is read of the context."""
    users = readers_of(landing.value)
    if len(users) != 1 or users[0].op_type != "ReduceMean" or landing.value.is_graph_output():
        return None
    layout = pattern.layout(landing.view)
    if layout not in (Layout.BHSD, Layout.BSHD):
        return None
    node = users[0]
    axes = scene.views.facts(node).steering(1, "axes")
    heads = 1 if layout is Layout.BHSD else 2
    if axes is None or [axis % 4 for axis in axes] != [heads]:
        return None
    kept = bool(node.attributes.get_int("keepdims", 1))
    return Heads(
        value=node.outputs[0],
        layout=layout if kept else Layout.BSM,
        heads=1,
        dim=pattern.width,
    )
