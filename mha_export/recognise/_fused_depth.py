"""What the operands of a fused node went through before: sharing, cache, rotation, normalisation.

The same lifting that serves an attention found around a softmax, so that an attention means the
same whether a graph spells it out or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import onnx_ir as ir

from mha_export.errors import SpecError
from mha_export.operands import Heads, Layout
from mha_export.recognise._agree import Common, agree
from mha_export.recognise._axes import Axis, View, axis_size, coalesced, identity, reshaped
from mha_export.recognise._binding import Bound, Meeting, bind
from mha_export.recognise._finish import dimension
from mha_export.recognise._fused_heads import with_derived_heads
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site
from mha_export.recognise._static import all_follow
from mha_export.recognise.fused._mask_reading import named
from mha_export.recognise.fused._node import FusedNode
from mha_export.spec import CacheSpec, EmptyRow, MaskSpec


def deepened(site: Site, scenes: Sequence[Scene]) -> Site | None:
    """The site with more of its graph folded in; None where nothing more is found."""
    spec, has_past = site.spec, site.operands.past_key is not None
    if spec.value_source != "own":
        return None
    if spec.qk_norm is not None:
        return None
    found: list[Bound] = []
    meetings: list[Meeting] = []
    for scene in scenes:
        meeting = _meeting(site, scene)
        bound = None if meeting is None else bind(meeting, scene)
        if meeting is None or bound is None:
            return None
        meetings.append(meeting)
        found.append(bound)
    found = with_derived_heads(found, meetings, scenes, site.anchor)
    if not all(map(_is_bound, found)):
        return None
    first = found[0]
    if has_past and not _fits_past(site, first):
        return None
    if spec.uses_lengths and not has_past and not _in_buffer(site, first, scenes):
        return None
    common = agree(first.query.stage, first.key.stage)
    if common is None or any(_stated(b) != _stated(first) for b in found[1:]):
        return None
    if spec.rotary is not None and (common.rotary is not None or first.key.past is not None):
        return None  # two rotations, or keys rotated after the cache
    try:
        return _with(site, first, common, scenes)
    except SpecError:
        return None


def _is_bound(bound: Bound) -> bool:
    held = (bound.query.heads, bound.key.heads, bound.value.heads, bound.output)
    return all(heads is not None for heads in held)


def _fits_past(site: Site, bound: Bound) -> bool:
    """Whether what the node's own past holds is what is folded in."""
    held, scale = bound.key.heads, bound.key.stage.scale
    return held is not None and held.heads == site.spec.kv_heads and scale == 1.0


def _in_buffer(site: Site, bound: Bound, scenes: Sequence[Scene]) -> bool:
    """Whether keys and values have no past, or one in buffers written where the lengths say."""
    pasts = [tensor.stage.past for tensor in (bound.key, bound.value)]
    if all(past is None for past in pasts):
        return True
    writes = [None if past is None else past.write for past in pasts]
    return all_follow(writes, site.operands.kv_lengths, scenes)


def _stated(bound: Bound) -> tuple[Any, ...]:
    """What must not depend on the sizes chosen."""
    tensors = (bound.query, bound.key, bound.value)
    held = [(t.heads, t.past, t.present, t.stage.scale) for t in tensors]
    return (
        *held,
        bound.output,
        bound.mean,
        bound.prefix,
        bound.roles.q_heads,
        bound.roles.size(bound.kv_shared),
    )


def _with(site: Site, bound: Bound, common: Common, scenes: Sequence[Scene]) -> Site:
    query, key, value, output = bound.query, bound.key, bound.value, bound.output
    assert query.heads is not None
    assert key.heads is not None
    assert value.heads is not None
    assert output is not None
    norms = [tensor.stage.norm for tensor in (query, key)] if common.norm is not None else []
    changes: dict[str, Any] = {}
    for side, norm in zip(("q", "k"), norms, strict=False):
        if norm is not None:
            changes[f"{side}_norm_weight"] = norm.weight
            changes[f"{side}_norm_bias"] = norm.bias
    operands = dataclasses.replace(
        site.operands,
        query=query.heads,
        key=key.heads,
        value=value.heads,
        past_key=key.past or site.operands.past_key,
        past_value=value.past or site.operands.past_value,
        rotary=common.tables or site.operands.rotary,
        **changes,
    )
    mask, carried = _mask(site, bound, scenes[0])
    cache = site.spec.cache
    if key.past is not None:
        by_length = key.past.layout is Layout.BSHD
        layout: Literal["bhsd", "bshd"] = "bshd" if by_length else "bhsd"
        cache = CacheSpec(growth="concat", layout=layout)
        if site.spec.uses_lengths:
            longest = dimension(key.past.value, 1 if by_length else 2, scenes, "max_length")
            cache = CacheSpec(growth="static", layout=layout, max_length=longest)
            mask = _without_lengths(mask)
    spec = site.spec.replace(
        kv_heads=key.heads.heads,
        scale=site.spec.effective_scale * query.stage.scale * key.stage.scale,
        rotary=common.rotary or site.spec.rotary,
        qk_norm=common.norm,
        cache=cache,
        value_source="key_prefix" if bound.prefix else "own",
        combine="mean" if bound.mean else site.spec.combine,
        cross=False if cache is not None else site.spec.cross,
        mask=mask,
    )
    return dataclasses.replace(
        site,
        spec=spec,
        operands=dataclasses.replace(operands, **carried),
        output=output,
        present_key=key.present or site.present_key,
        present_value=value.present or site.present_value,
    )


def _without_lengths(mask: MaskSpec) -> MaskSpec:
    """A static cache implies the lengths, and no row of it is without a key by them alone."""
    spec = dataclasses.replace(mask, lengths=False)
    return (
        spec
        if spec.may_empty_a_row
        else dataclasses.replace(spec, empty_row=EmptyRow.NOT_APPLICABLE)
    )


def _mask(site: Site, bound: Bound, scene: Scene) -> tuple[MaskSpec, dict[str, Any]]:
    """The mask, read anew where a past was found: query 0 then stands after it."""
    spec, operands = site.spec.mask, site.operands
    past = bound.key.past
    query, key = bound.query.heads, bound.key.heads
    if past is None or query is None or key is None:
        return spec, {}
    bias, keep = operands.bias, operands.keep
    mask = bias if keep is None else keep
    if mask is None or (bias is not None and keep is not None) or spec.alibi_slopes is not None:
        return spec, {}
    if spec.causal is not None or spec.left_window is not None or spec.padding:
        return spec, {}
    read = named(
        FusedNode(site.anchor, scene.context),
        mask,
        kind="additive" if keep is None else "keep",
        scores=ScoreShape(
            query=query.value,
            key=key.value,
            heads=query.heads,
            query_axis=_length_axis(query),
            key_axis=_length_axis(key),
            past=past.value,
            past_axis=_length_axis(past),
            element=scene.dtype(query.value) or ir.DataType.FLOAT,
        ),
        cached=True,
    )
    if read is None:
        return spec, {}
    return read.spec, {"bias": None, "keep": None, **read.operands}


def _length_axis(heads: Heads) -> int:
    return 2 if heads.layout is Layout.BHSD else 1


def _meeting(site: Site, scene: Scene) -> Meeting | None:
    """The site's operands over [b, h, s, t] and their channels."""
    operands = site.operands
    query, key = _by_head(operands.query, scene), _by_head(operands.key, scene)
    value, output = _by_head(operands.value, scene), _itself(site.output, scene)
    if query is None or key is None or value is None or output is None:
        return None
    sizes = [axis_size(query.axes[i]) for i in range(3)]
    total = axis_size(key.axes[2])
    group = site.spec.group
    along_keys, along_queries = _still(total), _still(sizes[2])

    def shared(view: View) -> View:
        heads = coalesced([*view.axes[1], (group, 0)])
        axes = (view.axes[0], heads, along_queries, view.axes[2], view.axes[3])
        return View(view.source, view.offset, axes)

    def asked(view: View) -> View:
        axes = (*view.axes[:3], along_keys, view.axes[3])
        return View(view.source, view.offset, axes)

    return Meeting(
        space=(sizes[0], sizes[1], sizes[2], total),
        keys=3,
        summed=1,
        weighted=False,
        query=(operands.query.value, asked(query)),
        key=(operands.key.value, shared(key)),
        value=(operands.value.value, shared(value)),
        output=(site.output.value, asked(output)),
        anchor=site.anchor,
        appends=operands.past_key is None,
        static=operands.kv_lengths is not None,
    )


def _still(size: int) -> Axis:
    return ((size, 0),) if size > 1 else ()


def _by_head(heads: Heads, scene: Scene) -> View | None:
    """[b, heads, length, channels] as a view of where they come from."""
    view = scene.views.of(heads.value)
    return None if view is None else _split(heads, view)


def _itself(heads: Heads, scene: Scene) -> View | None:
    """The same as a view of the value itself."""
    dims = scene.dims(heads.value)
    return None if dims is None else _split(heads, identity(heads.value, dims))


def _split(heads: Heads, seen: View) -> View | None:
    view: View | None = seen
    if heads.layout is Layout.BSM:
        view = reshaped(seen, (*seen.dims[:2], heads.heads, heads.dim))
    if view is None or len(view.axes) != 4:
        return None
    if heads.layout is Layout.BHSD:
        return view
    batch, length, by_head, channels = view.axes
    return View(view.source, view.offset, (batch, by_head, length, channels))
