"""Attentions of one head each whose contexts are stacked: one attention of many heads.

An exporter that unrolled a loop over heads, or a model of one module a head, leaves h small
attentions and a Concat. They are one when they say the same but for the head they read, and their
operands are the heads of one value, or can be stacked into one (:mod:`._stacking`). Masks are the
same where they have the same names, or are computed alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise._adapt import Deriver
from mha_export.recognise._axes import View, coalesced, factorised
from mha_export.recognise._bind import Pattern, bound
from mha_export.recognise._lift import Stage
from mha_export.recognise._liveness import dying
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site, Verdict
from mha_export.recognise._stacking import BY_HEAD, is_same, projected, stackable, together
from mha_export.spec import AttentionSpec, MaskSpec

_HEAD_AXIS = {Layout.BSM: 2, Layout.BSHD: 2, Layout.BHSD: 1}
_MAKERS = ("query", "key", "value")
_APART = frozenset({*_MAKERS, "projection", "score_mask"})
"""Operands of each head, and what only says again what the spec says."""


def stacked(verdicts: Sequence[Verdict], scenes: Sequence[Scene]) -> list[Verdict]:
    """The verdicts, each group of stacked heads replaced by one site in place of its first."""
    owners = {v.output.value: v for v in verdicts if isinstance(v, Site)}
    merged: dict[Site, Site] = {}
    swallowed: set[Site] = set()
    for site in owners.values():
        if site in swallowed or site in merged:
            continue
        group = _group(site, owners, scenes)
        whole = None if group is None else _whole(group, scenes)
        if group is not None and whole is not None:
            merged[group[0]] = whole
            swallowed.update(group[1:])
    result: list[Verdict] = []
    for verdict in verdicts:
        if isinstance(verdict, Site):
            if verdict not in swallowed:
                result.append(merged.get(verdict, verdict))
        else:
            result.append(verdict)
    return result


def _group(site: Site, owners: dict[ir.Value, Site], scenes: Sequence[Scene]) -> list[Site] | None:
    """The sites whose outputs one Concat stacks, in its order, ``site`` the first of them."""
    users = [node for node, _ in site.output.value.uses()]
    if len(users) != 1 or users[0].op_type != "Concat" or len(users[0].inputs) < 2:
        return None
    node = users[0]
    rank = 3 if site.output.layout is Layout.BSM else 4
    if node.attributes["axis"].as_int() % rank != _HEAD_AXIS[site.output.layout]:
        return None
    found = [owners.get(value) for value in node.inputs if value is not None]
    group = [member for member in found if member is not None]
    if len(group) != len(node.inputs) or len(set(group)) != len(group) or group[0] is not site:
        return None
    return group if all(_alike(site, member, scenes) for member in group) else None


def _alike(first: Site, other: Site, scenes: Sequence[Scene]) -> bool:
    """The same attention over another head."""
    spec, operands = first.spec, first.operands
    plain = spec.cache is None and spec.qk_norm is None and spec.combine == "concat"
    same = all(
        is_same(getattr(operands, field.name), getattr(other.operands, field.name), scenes)
        or (field.name in BY_HEAD and stackable(field.name, first, other, scenes))
        for field in dataclasses.fields(Operands)
        if field.name not in _APART
    )
    return (
        plain
        and same
        and _shared_spec(other) == _shared_spec(first)
        and other.output.layout is first.output.layout
        and spec.kv_heads == spec.q_heads == 1
        and other.replaceable
        and first.qk_output is None
        and other.qk_output is None
        and all(
            getattr(operands, name).layout is getattr(other.operands, name).layout
            for name in _MAKERS
        )
    )


def _shared_spec(site: Site) -> AttentionSpec:
    """What all heads must say alike: everything but the slope of each."""
    mask = site.spec.mask
    if mask.alibi_slopes is None:
        return site.spec
    return site.spec.replace(mask=dataclasses.replace(mask, alibi_slopes=(1.0,)))


def _whole(group: list[Site], scenes: Sequence[Scene]) -> Site | None:
    """The group as one site."""
    first = group[0]
    node = next(iter(first.output.value.uses()))[0]
    derive = Deriver(scenes, node)
    tensors: dict[str, Heads] = {}
    for name in _MAKERS:
        each: list[Heads] = [getattr(member.operands, name) for member in group]
        heads = each if name == "query" else _distinct(each)
        if heads is None:
            return None
        tensors[name] = _together(heads, scenes, derive)
    if tensors["key"].heads != tensors["value"].heads:
        return None
    output = Heads(
        value=node.outputs[0],
        layout=first.output.layout,
        heads=len(group),
        dim=first.output.dim,
    )
    by_head: dict[str, Any] = {name: together(name, group, scenes, derive) for name in BY_HEAD}
    operands = dataclasses.replace(
        first.operands,
        query=tensors["query"],
        key=tensors["key"],
        value=tensors["value"],
        **by_head,
    )
    if any(value is not getattr(first.operands, name) for name, value in by_head.items()):
        operands = dataclasses.replace(operands, score_mask=None)
    nodes, _ = dying([output.value], [value for _, value in operands.values()])
    spec = first.spec.replace(
        q_heads=len(group), kv_heads=tensors["key"].heads, mask=_mask(group, operands, scenes)
    )
    return dataclasses.replace(
        first, spec=spec, operands=operands, output=output, nodes=tuple(nodes)
    )


def _mask(group: list[Site], operands: Operands, scenes: Sequence[Scene]) -> MaskSpec:
    """The mask of all heads: a slope of each, and as many heads as what was stacked has."""
    mask = group[0].spec.mask
    changes: dict[str, Any] = {}
    if mask.alibi_slopes is not None:
        slopes = [site.spec.mask.alibi_slopes or () for site in group]
        changes["alibi_slopes"] = tuple(slope for each in slopes for slope in each)
    for name in ("keep", "bias"):
        value, dims = getattr(operands, name), getattr(mask, name)
        if value is not getattr(group[0].operands, name):
            rank = len(scenes[0].dims(value) or dims)
            stated = [1] * (rank - len(dims)) + list(dims)
            stated[-3] = len(group)
            changes[name] = tuple(stated)
    return dataclasses.replace(mask, **changes)


def _distinct(heads: list[Heads]) -> list[Heads] | None:
    """Key/value heads, each once, when neighbours share one in groups of equal size."""
    runs: list[list[Heads]] = []
    for item in heads:
        if runs and runs[-1][0].value is item.value:
            runs[-1].append(item)
        else:
            runs.append([item])
    if len({len(run) for run in runs}) != 1:
        return None
    values = [run[0].value for run in runs]
    return [run[0] for run in runs] if len(set(values)) == len(values) else None


def _together(heads: list[Heads], scenes: Sequence[Scene], derive: Deriver) -> Heads:
    """The value whose heads these are; projected or stacked together where there is none."""
    if len(heads) == 1:
        return heads[0]
    found = _of_one_value(heads, scenes[0])
    if found is not None:
        return found
    layout = heads[0].layout
    values = [item.value for item in heads]
    value = projected(values, scenes) if layout is Layout.BSM else None
    if value is None:
        value = derive("Concat", values, {"axis": _HEAD_AXIS[layout]})
    return Heads(value=value, layout=layout, heads=len(heads), dim=heads[0].dim)


def _of_one_value(heads: list[Heads], scene: Scene) -> Heads | None:
    views = [scene.views.of(item.value) for item in heads]
    first = views[0]
    if first is None or any(
        view is None or view.source is not first.source or view.axes != first.axes for view in views
    ):
        return None
    steps = factorised([view.offset for view in views if view is not None])
    if steps is None or any(stride == 0 for _, stride in steps[1]):
        return None
    pattern = _pattern(first, heads[0].layout, steps)
    whole = Stage(entry=heads[0].value, view=first)
    return bound(pattern, whole.places(scene))


def _pattern(view: View, layout: Layout, steps: tuple[int, list[tuple[int, int]]]) -> Pattern:
    axes = view.axes
    if layout is Layout.BSM:
        batch, length, channels = axes
    elif layout is Layout.BSHD:
        batch, length, _, channels = axes
    else:
        batch, _, length, channels = axes
    return Pattern(
        batch=batch,
        length=length,
        heads=coalesced(steps[1]),
        channels=channels,
        offset=steps[0],
    )
