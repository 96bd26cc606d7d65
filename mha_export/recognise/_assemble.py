"""From drafts at concrete sizes to a site: spec and operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.errors import SpecError
from mha_export.operands import Layout, Operands, dtype_of
from mha_export.recognise._afterwards import policy_afterwards
from mha_export.recognise._agree import Common, agree
from mha_export.recognise._axes import View, composed
from mha_export.recognise._draft import Draft
from mha_export.recognise._finish import dimension
from mha_export.recognise._fit import Fitting
from mha_export.recognise._lift import Stage
from mha_export.recognise._mask_binding import BoundMask, bound_mask
from mha_export.recognise._replaceable import replaceable_site
from mha_export.recognise._roles import along
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason, Site
from mha_export.recognise._static import all_follow
from mha_export.recognise._weighting import with_weightings
from mha_export.spec import AttentionSpec, CacheSpec, DType, EmptyRow


def _disagreement(drafts: Sequence[Draft]) -> Reason:
    """What is another at other batch and sequence lengths."""
    draft = drafts[0]
    found: dict[str, list[float]] = {
        "q_heads": [d.roles.q_heads for d in drafts],
        "kv_heads": [d.kv_heads for d in drafts],
        "head_dim": [d.head_dim for d in drafts],
        "v_head_dim": [d.v_head_dim for d in drafts],
        "scale": [d.scale for d in drafts],
    }
    varying = [name for name, numbers in found.items() if len(set(numbers)) > 1]
    numbers = [f"{name} is {' or '.join(map(str, found[name]))}" for name in varying]
    what = "; ".join(numbers) or "its operands are other values"
    return Reason(
        code=f"{varying[0].replace('_', '-')}-varies" if varying else "sizes-disagree",
        message=f"the attention reads differently at other batch and sequence lengths: {what}",
        value=draft.anchor.probabilities.name,
        nodes=(draft.anchor.node.name or draft.anchor.node.op_type,),
    )


def assemble(drafts: Sequence[Draft], scenes: Sequence[Scene]) -> Site | Reason:
    """The site that drafts at every choice of sizes agree on."""
    draft = drafts[0]
    if any(other.signature() != draft.signature() for other in drafts[1:]):
        return _disagreement(drafts)
    policy = policy_afterwards(draft, scenes[0])
    if isinstance(policy, Reason):
        return policy
    fitting = Fitting(drafts, scenes, empty_row=policy)
    full = fitting.completed()
    if isinstance(full, Reason):
        return full
    if full.scores.weightings:
        weighted = with_weightings(fitting)
        if isinstance(weighted, Reason):
            return weighted
        full = weighted
    mask = bound_mask(fitting, full.scores.terms)
    if isinstance(mask, Reason):
        return mask
    if full.is_static:
        held = _in_buffer(full, mask, scenes)
        if isinstance(held, Reason):
            return held
        mask = held
    return _site(full, fitting, mask)


def _in_buffer(draft: Draft, mask: BoundMask, scenes: Sequence[Scene]) -> BoundMask | Reason:
    """The mask without the lengths that a static cache implies, where the writes follow them."""
    lengths: ir.Value | None = mask.operands.get("kv_lengths")
    pasts = [tensor.stage.past for tensor in (draft.key, draft.value)]
    writes = [None if past is None else past.write for past in pasts]
    if not all_follow(writes, lengths, scenes):
        return Reason(
            code="static-cache",
            message="new keys are written into a buffer at places that the mask does not follow",
            value=draft.anchor.probabilities.name,
        )
    spec = dataclasses.replace(mask.spec, lengths=False, empty_row=EmptyRow.FINITE)
    if not spec.may_empty_a_row:
        spec = dataclasses.replace(spec, empty_row=EmptyRow.NOT_APPLICABLE)
    else:
        spec = dataclasses.replace(spec, empty_row=mask.spec.empty_row)
    return BoundMask(spec=spec, operands=mask.operands)


def _site(draft: Draft, fitting: Fitting, mask: BoundMask) -> Site | Reason:
    scenes = fitting.scenes
    scene = scenes[0]
    query, key, value = draft.query.heads, draft.key.heads, draft.value.heads
    assert query is not None
    assert key is not None
    assert value is not None
    sinks = None
    if draft.scores.sink is not None:
        sinks = _sinks(draft, scene)
        if sinks is None:
            return Reason(
                code="sink-layout",
                message="the extra column before softmax is not one number a head",
                value=draft.scores.sink.value.name,
            )
    io_dtype = dtype_of(scene.dtype(query.value) or ir.DataType.FLOAT)
    if io_dtype is None:
        return Reason(
            code="dtype",
            message=f"queries of type {scene.dtype(query.value)} are not floating point",
            value=query.value.name,
        )
    common = agree(draft.query.stage, draft.key.stage)
    assert common is not None
    try:
        spec = _spec(draft, scenes, mask, common, io_dtype)
    except SpecError as error:
        return Reason(
            code="spec", message=str(error), value=draft.anchor.probabilities.name, nodes=()
        )
    operands = Operands(
        query=query,
        key=key,
        value=value,
        past_key=draft.key.past,
        past_value=draft.value.past,
        sinks=sinks,
        rotary=common.tables,
        **mask.operands,
        **_norm_operands(draft, common),
    )
    site = replaceable_site(fitting, spec, operands)
    if mask.kept is not None and site.cannot_replace is None:
        return dataclasses.replace(site, cannot_replace=mask.kept)
    return site


def _norm_operands(draft: Draft, common: Common) -> dict[str, Any]:
    if common.norm is None:
        return {}
    query, key = draft.query.stage.norm, draft.key.stage.norm
    return {
        "q_norm_weight": None if query is None else query.weight,
        "q_norm_bias": None if query is None else query.bias,
        "k_norm_weight": None if key is None else key.weight,
        "k_norm_bias": None if key is None else key.bias,
    }


def _sinks(draft: Draft, scene: Scene) -> ir.Value | None:
    """One number a head, [h], of the element type that joins the scores."""
    sink = draft.scores.sink
    assert sink is not None
    number, kind = scene.uniform(sink.value), scene.dtype(sink.value)
    if number is not None and kind is not None:
        alike = np.full(draft.roles.q_heads, number).astype(kind.numpy())
        (made,) = scene.context.derive("Identity", [alike], before=draft.anchor.node)
        made.type, made.shape = ir.TensorType(kind), ir.Shape(alike.shape)
        return made
    entry, view = sink.value, sink.view
    while True:
        own = scene.views.of(entry)
        seen = None if own is None else composed(view, own)
        if seen is None:
            return None
        found = _per_head(draft, Stage(entry=entry, view=seen), scene)
        node = seen.source.producer()
        if found is not None or node is None or node.op_type != "Cast" or node.inputs[0] is None:
            break
        entry, view = node.inputs[0], View(node.inputs[0], seen.offset, seen.axes)
    if found is None or kind is None or scene.dtype(found) == kind:
        return found
    (cast,) = scene.context.derive("Cast", [found], {"to": int(kind)}, before=draft.anchor.node)
    return cast


def _per_head(draft: Draft, stage: Stage, scene: Scene) -> ir.Value | None:
    """The value on the way of a sink that is [h], or can be flattened to it."""
    roles = draft.roles
    strides = roles.strides(stage.view)
    if strides is None or stage.view.offset:
        return None
    if any(strides[atom] for atom in (*roles.batch, *roles.queries)):
        return None
    wanted = along(roles.heads, strides)
    for value, seen in stage.places(scene):
        if seen.axes == (wanted,) and not seen.offset:
            return value
    for value, seen in stage.places(scene):
        if [axis for axis in seen.axes if axis] == ([wanted] if wanted else []):
            (flat,) = scene.context.derive(
                "Reshape", [value, np.array([-1], np.int64)], before=draft.anchor.node
            )
            return flat
    return None


def _spec(
    draft: Draft, scenes: Sequence[Scene], mask: BoundMask, common: Common, io_dtype: DType
) -> AttentionSpec:
    scene = scenes[0]
    softmax = dtype_of(scene.dtype(draft.anchor.logits) or ir.DataType.FLOAT)
    cache = None
    if draft.key.past is not None:
        by_length = draft.key.past.layout is Layout.BSHD
        buffer = dimension(draft.key.past.value, 1 if by_length else 2, scenes, "max_length")
        cache = CacheSpec(
            growth="static" if draft.is_static else "concat",
            layout="bshd" if by_length else "bhsd",
            max_length=buffer if draft.is_static else None,
        )
    return AttentionSpec(
        q_heads=draft.roles.q_heads,
        kv_heads=draft.kv_heads,
        head_dim=draft.head_dim,
        v_head_dim=draft.v_head_dim,
        scale=draft.scale,
        softcap=draft.scores.softcap,
        sinks=draft.scores.sink is not None,
        mask=mask.spec,
        rotary=common.rotary,
        qk_norm=common.norm,
        cache=cache,
        cross=False,
        value_source="key_prefix" if draft.bound.prefix else "own",
        combine="mean" if draft.bound.mean else "concat",
        io_dtype=io_dtype,
        softmax_dtype=softmax,
        batch="batch",
        q_len="q_len",
        kv_len="kv_len",
    )
