"""A rotation of some channels of a key whose others come from elsewhere (latent attention).

DeepSeek's keys are ``nope_dim`` channels of each head, expanded from the latent, and ``rope_dim``
channels that all heads share, rotated before they are spread over the heads and put beside the
others, by Concat or by writing both into a buffer. No value of the graph is the whole key before
rotation: it is derived, with the shared channels spread unrotated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise import _region
from mha_export.recognise._evaluate import Context, SizedView
from mha_export.recognise._region import Region
from mha_export.recognise.rotary import OPS, Floats, PeeledRotary, Within, peel_region

_JOINING = OPS | {"ScatterND"}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Key:
    """A joined key: its value, where [b, heads, length, channels] lie, and its shape as such."""

    value: ir.Value
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def by_head(self, array: Floats) -> Floats | None:
        return array.transpose(self.axes) if array.ndim == 4 else None


def peel_joined(
    joined: ir.Value, axes: Sequence[int], *, context: Context, anchor: ir.Node
) -> PeeledRotary | None:
    """Take the rotation off the channels of a key that were rotated before they were joined.

    Args:
        joined: the whole key.
        axes: where its batch, heads, length and channels lie.
        context: as for :func:`mha_export.recognise.rotary.peel_rotary`.
        anchor: likewise.

    Returns:
        ``before`` is derived, [b, heads, length, channels]; None where there is no such rotation.
    """
    sizes = _region.sizes_of(context, joined)
    view = None if sizes is None else context.sized(sizes)
    shape = None if view is None else view.shape(joined)
    if sizes is None or view is None or shape is None or len(shape) != 4:
        return None
    whole = tuple(shape[axis] for axis in axes)
    key = _Key(value=joined, axes=tuple(axes), shape=whole)
    for before, nodes in _region.upward(joined, _JOINING):
        own = view.shape(before)
        if own is None or len(own) != 4 or own[-1] % 2 or not 1 < own[-1] < whole[-1]:
            continue
        if own[0] != whole[0] or own[1] not in (1, whole[1]) or own[2] != whole[2]:
            continue
        region = _region.region_of(context, before, joined, nodes)
        if len(region.sides) < 3:  # cosine, sine and the other channels
            continue
        for rest, place in _others(key, region, own[-1], view, context, sizes):
            found = _peeled(key, region, rest, place, own, context, sizes, anchor)
            if found is not None:
                return found
    return None


def _others(
    key: _Key,
    region: Region,
    turned: int,
    view: SizedView,
    context: Context,
    sizes: Mapping[str, int],
) -> Iterator[tuple[tuple[ir.Value, ir.Value], int]]:
    """((what enters the region, the other channels [b, heads, length, rest]), first turned one)."""
    rest = (*key.shape[:3], key.shape[-1] - turned)
    random = np.random.default_rng(29)
    for side in region.sides:
        above = [side, *(value for value, _ in _region.upward(side, _JOINING))]
        for value in above:
            if view.shape(value) != rest:
                continue
            content = random.standard_normal(rest)
            contents = {value: content, region.before: np.zeros(view.shape(region.before) or ())}
            contents |= {
                other: np.zeros(view.shape(other) or ())
                for other in region.sides
                if other is not side
            }
            array = context.sized(sizes, contents, wide=True).array(key.value)
            whole = None if array is None else key.by_head(array)
            if whole is None:
                continue
            for place in (0, rest[-1]):
                kept = np.delete(whole, np.s_[place : place + turned], axis=-1)
                if np.array_equal(kept, content):
                    yield (side, value), place
                    break


def _peeled(
    key: _Key,
    region: Region,
    rest: tuple[ir.Value, ir.Value],
    place: int,
    own: tuple[int, ...],
    context: Context,
    sizes: Mapping[str, int],
    anchor: ir.Node,
) -> PeeledRotary | None:
    def part(array: Floats) -> Floats | None:
        whole = key.by_head(array)
        if whole is None:
            return None
        channels: Floats = whole[..., place : place + own[-1]]
        alike = own[1] != 1 or np.array_equal(channels, np.repeat(channels[:, :1], own_heads, 1))
        return channels[:, : own[1]] if alike else None

    own_heads = key.shape[1]
    side, others = rest
    shape = context.sized(sizes).shape(side)
    if shape is None:
        return None
    given = {side: np.random.default_rng(31).standard_normal(shape)}
    tables = dataclasses.replace(region, sides=tuple(v for v in region.sides if v is not side))
    found = peel_region(
        tables, sizes, context=context, anchor=anchor, within=Within(given=given, part=part)
    )
    if found is None or found.spec.offset or found.spec.dim != own[-1]:
        return None
    pair = [others, _spread(region.before, own[1], key.shape[1], context, anchor)]
    if not place:
        pair.reverse()
    (before,) = context.derive("Concat", pair, {"axis": -1}, before=anchor)
    _typed_as(before, others.dtype or key.value.dtype)
    return dataclasses.replace(
        found,
        spec=dataclasses.replace(found.spec, offset=place),
        before=before,
        derived=tuple(_derived([before, pair[0], pair[1]], rest[1], region.before)),
    )


def _spread(
    value: ir.Value, heads: int, wanted: int, context: Context, anchor: ir.Node
) -> ir.Value:
    """Channels that all heads share, once for each of them."""
    if heads == wanted:
        return value
    shape = np.array([1, wanted, 1, 1], np.int64)
    (spread,) = context.derive("Expand", [value, shape], before=anchor)
    _typed_as(spread, value.dtype)
    return spread


def _typed_as(value: ir.Value, dtype: ir.DataType | None) -> None:
    if dtype is not None:
        value.dtype = dtype


def _derived(values: Sequence[ir.Value], *given: ir.Value) -> Iterator[ir.Node]:
    """The nodes that were put into the graph for them, those read by others first."""
    seen: dict[ir.Node, None] = {}
    for value in reversed(values):
        node = value.producer()
        if node is None or value in given:
            continue
        for entry in node.inputs:
            maker = None if entry is None else entry.producer()
            if maker is not None and maker.op_type == "Constant":
                seen.setdefault(maker)
        seen.setdefault(node)
    yield from seen
