"""From an operand of a product up to the projection that made it, one stage per op passed.

Passed: rearrangements, multiplication by one number, casts between floats, a rotation, a
normalisation, and the Concat that appends new keys to a cache. Each stage is one place where the
operand could be bound, with what lies between it and the product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise._axes import (
    Axis,
    View,
    axis_size,
    coalesced,
    composed,
    row_major,
    split_by_axis,
)
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._movement import moved_inputs
from mha_export.recognise._rotary_joined import peel_joined
from mha_export.recognise._scene import Scene
from mha_export.recognise._static import Written, written
from mha_export.recognise.norms import PeeledNorm, peel_norm
from mha_export.recognise.rotary import PeeledRotary, peel_rotary


@dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """The part of a key or value that a cache holds.

    ``view`` has the axes of the operand's view, the key axis being as long as the past;
    ``whole`` is the output of the Concat, or of the ``write`` into a buffer.
    """

    value: ir.Value
    view: View
    whole: ir.Value
    whole_view: View
    write: Written | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """The operand seen from one value on the way up.

    ``entry`` is the value read by the op below; the view's source is its rearrangement's source.
    """

    entry: ir.Value
    view: View
    scale: float = 1.0
    cast: bool = False
    rotary: PeeledRotary | None = None
    norm: PeeledNorm | None = None
    past: Past | None = None

    def places(self, scene: Scene) -> Iterator[tuple[ir.Value, View]]:
        """Values from the source to the entry, in that order, with their views."""
        chain = [self.entry]
        while chain[-1] is not self.view.source:
            inputs = moved_inputs(chain[-1])
            view = scene.views.of(chain[-1])
            if view is None or view.source is not self.view.source or not inputs:
                break
            if len(inputs) > 1 and any(value is not inputs[0] for value in inputs):
                chain.append(self.view.source)
                break
            chain.append(inputs[0])
        for value in reversed(chain):
            view = scene.views.of(value)
            if view is not None and view.source is self.view.source:
                yield value, view


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """What may be met on the way up.

    Attributes:
        keys: which axis of the view is the keys', for a key or value that may have a cache.
        own: how many trailing axes of the view are channels.
        rotates: whether factors, rotations and normalisations are taken off (not off a value).
        anchor: a node of the attention, for what has to be derived.
        static: whether a buffer that is written into may be a cache.
    """

    keys: int | None
    own: int
    rotates: bool
    anchor: ir.Node
    static: bool = False


def lifted(operand: ir.Value, view: View, way: Way, scene: Scene) -> list[Stage]:
    """Every stage from ``operand`` up, the lowest first.

    ``view`` is the operand over the axes of the score space and its own.
    """
    stages = [Stage(entry=operand, view=view)]
    while True:
        following = _next(stages[-1], way, scene)
        if following is None:
            return stages
        stages.append(following)


def _next(stage: Stage, way: Way, scene: Scene) -> Stage | None:
    source = stage.view.source
    node = source.producer()
    if node is None:
        return None
    if way.rotates and node.op_type in ("Mul", "Div"):
        found = _scaled(stage, node, scene)
        if found is not None:
            return found
    if way.rotates:
        found = _rotated(stage, way, scene) or _normed(stage, way, scene)
        if found is not None:
            return found
    if node.op_type == "Cast":
        return _cast(stage, node, scene)
    if way.keys is None or stage.past is not None or stage.rotary or stage.norm:
        return None
    if node.op_type == "Concat":
        return _appended(stage, node, way.keys, scene)
    write = written(node, scene) if way.static else None
    return None if write is None else _after_write(stage, write, way.keys, scene)


def _rotated(stage: Stage, way: Way, scene: Scene) -> Stage | None:
    """Above a rotation of whole heads; one after a normalisation has no name."""
    if stage.rotary is not None or stage.norm is not None:
        return None
    seen = _regrouped(stage, scene)
    whole = next((found for each in seen if (found := _turned(each, way, scene))), None)
    return whole or _turned_in_part(stage, way, scene)


def _regrouped(stage: Stage, scene: Scene) -> Iterator[Stage]:
    """The stage, and the same seen from values that hold its source's elements in their order.

    Pairs that were joined on an axis of their own are channels only after the Reshape.
    """
    yield stage
    for value, view in stage.places(scene):
        dims = scene.dims(value)
        if value is view.source or dims is None or view.offset or 0 in dims:
            continue
        flat = coalesced(factor for axis in view.axes for factor in axis)
        if flat == coalesced([(math.prod(dims), 1)]):
            seen = View(value, stage.view.offset, stage.view.axes)
            yield dataclasses.replace(stage, view=seen)


def _turned(stage: Stage, way: Way, scene: Scene) -> Stage | None:
    source = stage.view.source
    dims, width = scene.dims(source), channels_of(stage.view, way.own)
    if dims is None or len(dims) < 3:
        return None
    whole = dims[-1] == axis_size(width) and width == coalesced([(dims[-1], 1)])
    node = source.producer()
    if not whole and (node is None or node.op_type != "RotaryEmbedding"):
        return None
    heads = dims[-1] // max(1, axis_size(width)) if len(dims) == 3 else None
    key = ("rotary", source, heads)
    memo = scene.context.memo
    if key not in memo:
        memo[key] = peel_rotary(source, context=scene.context, anchor=way.anchor, heads=heads)
    found: PeeledRotary | None = memo[key]
    if found is None or found.spec.offset + found.spec.dim > axis_size(width):
        return None
    return _onto(stage, found.before, scene, rotary=found)


def _turned_in_part(stage: Stage, way: Way, scene: Scene) -> Stage | None:
    """Above a key some channels of which were rotated before they were joined with the others."""
    source, node = stage.view.source, stage.view.source.producer()
    dims = scene.dims(source)
    if node is None or node.op_type not in ("Concat", "ScatterND") or way.keys is None:
        return None
    pieces = None if dims is None or len(dims) != 4 else split_by_axis(stage.view, dims)
    if dims is None or pieces is None or stage.view.offset or way.own != 1:
        return None
    channels, length = pieces[-1], pieces[way.keys]
    if any(len(p) != 1 or p[0][2] != 1 or p[0][0] != dims[p[0][1]] for p in (channels, length)):
        return None
    last = (length[0][1], channels[0][1])
    lead = dict.fromkeys(p for axis in pieces for _, p, _ in axis if p >= 0 and p not in last)
    if len(lead) != 2:
        return None
    axes = (*lead, *last)
    key = ("joined rotary", source, axes)
    memo = scene.context.memo
    if key not in memo:
        memo[key] = peel_joined(source, axes, context=scene.context, anchor=way.anchor)
    found: PeeledRotary | None = memo[key]
    if found is None:
        return None
    for made in found.derived:
        scene.shapes.learn(made)
    sizes = scene.dims(found.before)
    if sizes is None or sizes != tuple(dims[axis] for axis in axes):
        return None
    strides = dict(zip(axes, row_major(sizes), strict=True))
    turned = tuple(
        tuple((n, 0 if p < 0 else step * strides[p]) for n, p, step in axis) for axis in pieces
    )
    view = View(found.before, 0, turned)
    return dataclasses.replace(stage, entry=found.before, view=view, rotary=found)


def _normed(stage: Stage, way: Way, scene: Scene) -> Stage | None:
    """Above a normalisation of each head, or of all heads together."""
    source = stage.view.source
    if stage.norm is not None:
        return None
    dims, width = scene.dims(source), channels_of(stage.view, way.own)
    if dims is None or not width:
        return None
    head_dim = axis_size(width)
    key = ("norm", source, head_dim)
    memo = scene.context.memo
    if key not in memo:
        memo[key] = peel_norm(source, head_dim=head_dim, context=scene.context, anchor=way.anchor)
    found: PeeledNorm | None = memo[key]
    if found is None:
        return None
    return _onto(stage, found.before, scene, norm=found)


def channels_of(view: View, own: int) -> Axis:
    """The factors of a head's channels."""
    return coalesced(factor for axis in view.axes[-own:] for factor in axis)


def _onto(stage: Stage, inner: ir.Value | None, scene: Scene, **changes: object) -> Stage | None:
    """The stage above ``inner``, which has the same shape as the source below it."""
    if inner is None or scene.dims(inner) != scene.dims(stage.view.source):
        return None
    view = scene.views.of(inner)
    if view is None:
        return None
    above = composed(stage.view, view)
    if above is None:
        return None
    return dataclasses.replace(stage, entry=inner, view=above, **changes)  # type: ignore[arg-type]


def _scaled(stage: Stage, node: ir.Node, scene: Scene) -> Stage | None:
    if stage.norm is not None:
        return None
    left, right = node.inputs
    number = scene.uniform(right)
    if number:
        scale = stage.scale / number if node.op_type == "Div" else stage.scale * number
        return _onto(stage, left, scene, scale=scale)
    number = scene.uniform(left) if node.op_type == "Mul" else None
    if number:
        return _onto(stage, right, scene, scale=stage.scale * number)
    return None


def _cast(stage: Stage, node: ir.Node, scene: Scene) -> Stage | None:
    inner = node.inputs[0]
    if inner is None or stage.past is not None:
        return None
    kinds = [scene.dtype(value) for value in (inner, node.outputs[0])]
    if any(kind is None or not kind.is_floating_point() for kind in kinds):
        return None
    return _onto(stage, inner, scene, cast=True)


def _appended(stage: Stage, node: ir.Node, keys: int, scene: Scene) -> Stage | None:
    """Concat(past, new) along the keys, the past coming from outside the graph."""
    inputs = [value for value in node.inputs if value is not None]
    dims = scene.dims(stage.view.source)
    if len(inputs) != 2 or dims is None:
        return None
    place = attributes_of(node)["axis"] % len(dims)
    past, new = inputs
    return _parted(stage, (past, new), place, keys, scene)


def _after_write(stage: Stage, write: Written, keys: int, scene: Scene) -> Stage | None:
    """New tokens written into a buffer that comes from outside."""
    found = _parted(stage, (write.buffer, write.new), write.axis, keys, scene)
    if found is None or found.past is None:
        return None
    return dataclasses.replace(found, past=dataclasses.replace(found.past, write=write))


def _parted(
    stage: Stage, parts: tuple[ir.Value, ir.Value], place: int, keys: int, scene: Scene
) -> Stage | None:
    """The stage above (past, new), which lie along ``place`` of the source."""
    dims = scene.dims(stage.view.source)
    past, new = parts
    if dims is None or not _from_outside(past, scene):
        return None
    pieces = split_by_axis(stage.view, dims)
    if pieces is None or stage.view.offset or pieces[keys] != [(dims[place], place, 1)]:
        return None
    if any(p == place for i, axis in enumerate(pieces) for _, p, _ in axis if i != keys):
        return None
    above = []
    for value in parts:
        sizes, own = scene.dims(value), scene.views.of(value)
        if sizes is None or own is None or 0 in sizes:
            return None
        part = View(value, 0, _restrided(pieces, keys, place, sizes))
        seen = composed(part, own)
        if seen is None:
            return None
        above.append(seen)
    kept = Past(value=past, view=above[0], whole=stage.view.source, whole_view=stage.view)
    return dataclasses.replace(stage, entry=new, view=above[1], past=kept)


def _restrided(
    pieces: list[list[tuple[int, int, int]]], keys: int, place: int, sizes: tuple[int, ...]
) -> tuple[Axis, ...]:
    strides = row_major(sizes)
    axes: list[Axis] = []
    for index, axis in enumerate(pieces):
        if index == keys:
            axes.append(((sizes[place], strides[place]),) if sizes[place] > 1 else ())
        else:
            axes.append(tuple((n, 0 if p < 0 else step * strides[p]) for n, p, step in axis))
    return tuple(axes)


def _from_outside(value: ir.Value, scene: Scene) -> bool:
    source = scene.views.source(value)
    return source.is_graph_input() and source.const_value is None
