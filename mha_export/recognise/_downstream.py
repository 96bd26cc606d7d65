"""From P·V down to where the heads are merged again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise._axes import Axis, View, composed, identity
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
        following = _only_use(last.value)
        if following is None:
            return found
        value, cast = following
        if cast:
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


def _only_use(value: ir.Value) -> tuple[ir.Value, bool] | None:
    """What the value becomes when one node rearranges or casts it; (value, is a cast)."""
    if value.is_graph_output():
        return None
    users = [node for node, _ in value.uses() if node.op_type not in _SHAPE_ONLY]
    if len(users) != 1:
        return None
    node = users[0]
    output = node.outputs[0]
    if node.op_type == "Cast":
        return output, True
    if len(node.outputs) > 1 and node.op_type != "Dropout":
        return None
    if moved_inputs(output) == (value,):
        return output, False
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
    pending = [value]
    while pending:
        current = pending.pop()
        view = scene.views.of(current)
        if view is None or view.source is not value:
            continue
        if current.is_graph_output():
            yield current, view
        for node, _ in current.uses():
            pending.extend(out for out in node.outputs if moved_inputs(out) == (current,))
