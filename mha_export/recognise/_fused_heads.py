"""Keys and values of a fused node that some value holds under more axes than a form reads.

Heads that are told over again for each group often stand on an axis of their own, beside one of
size one that is spread: [batch, length, heads, 1, channels]. A Reshape makes them what is bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._adapt import Deriver, ints
from mha_export.recognise._axes import Axis, View, axis_size, coalesced
from mha_export.recognise._binding import Bound, Meeting, Tensor
from mha_export.recognise._lift import channels_of
from mha_export.recognise._roles import along
from mha_export.recognise._scene import Scene


def with_derived_heads(
    found: Sequence[Bound], meetings: Sequence[Meeting], scenes: Sequence[Scene], anchor: ir.Node
) -> list[Bound]:
    """The same at each choice of sizes, with keys and values that a Reshape makes bound."""
    changed = list(found)
    for name in ("key", "value"):
        tensors: list[Tensor] = [getattr(bound, name) for bound in changed]
        if not all(tensor.derivable and tensor.heads is None for tensor in tensors):
            continue
        shapes = [
            _reshaped(bound, tensor, meeting, scene)
            for bound, tensor, meeting, scene in zip(
                changed, tensors, meetings, scenes, strict=True
            )
        ]
        first = shapes[0]
        if first is None or any(shape != first for shape in shapes):
            continue
        value, layout, heads, dim = first
        lengths = [0, 0, heads, dim] if layout is Layout.BSHD else [0, heads, -1, dim]
        made = Deriver(scenes, anchor)("Reshape", [value, ints(*lengths)])
        bound_heads = Heads(value=made, layout=layout, heads=heads, dim=dim)
        derived: list[dict[str, Any]] = [
            {name: dataclasses.replace(tensor, heads=bound_heads)} for tensor in tensors
        ]
        changed = [
            dataclasses.replace(bound, **parts)
            for bound, parts in zip(changed, derived, strict=True)
        ]
    return changed


def _reshaped(
    bound: Bound, tensor: Tensor, meeting: Meeting, scene: Scene
) -> tuple[ir.Value, Layout, int, int] | None:
    """(value, layout, heads, channels) of a Reshape that makes the shared heads."""
    roles, view = bound.roles, tensor.stage.view
    strides = roles.strides(view)
    if strides is None:
        return None
    own = 1 if tensor is bound.value else meeting.summed
    heads = along(roles.heads[: len(roles.heads) - bound.kv_shared], strides)
    channels = channels_of(view, own)
    batch, length = along(roles.batch, strides), coalesced(view.axes[meeting.keys])
    for value, seen in tensor.stage.places(scene):
        layout = (
            None if seen.offset != view.offset else _layout(seen, batch, length, heads, channels)
        )
        if layout is not None:
            return value, layout, axis_size(heads), axis_size(channels)
    return None


def _layout(seen: View, batch: Axis, length: Axis, heads: Axis, channels: Axis) -> Layout | None:
    """What the axes become where all but one of batch, length and channels are joined."""
    axes = [coalesced(axis) for axis in seen.axes]
    if len(axes) < 4 or axes[0] != batch or axes[-1] != channels:
        return None
    if axes[1] == length and coalesced(f for axis in axes[2:-1] for f in axis) == heads:
        return Layout.BSHD
    if axes[-2] == length and coalesced(f for axis in axes[1:-2] for f in axis) == heads:
        return Layout.BHSD
    return None
