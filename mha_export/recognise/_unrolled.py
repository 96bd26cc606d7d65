"""Attentions of one head each whose contexts are stacked: one attention of many heads.

An exporter that unrolled a loop over heads leaves h small attentions and a Concat. They are one
when they say the same but for the head they read, and their operands are the heads of one value,
or can be stacked into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise._adapt import Deriver
from mha_export.recognise._axes import View, coalesced, factorised
from mha_export.recognise._bind import Pattern, bound
from mha_export.recognise._lift import Stage
from mha_export.recognise._liveness import dying
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site, Verdict

_HEAD_AXIS = {Layout.BSM: 2, Layout.BSHD: 2, Layout.BHSD: 1}
_MAKERS = ("query", "key", "value")


def stacked(verdicts: Sequence[Verdict], scenes: Sequence[Scene]) -> list[Verdict]:
    """The verdicts, each group of stacked heads replaced by one site in place of its first."""
    owners = {v.output.value: v for v in verdicts if isinstance(v, Site)}
    merged: dict[Site, Site] = {}
    swallowed: set[Site] = set()
    for site in owners.values():
        if site in swallowed or site in merged:
            continue
        group = _group(site, owners)
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


def _group(site: Site, owners: dict[ir.Value, Site]) -> list[Site] | None:
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
    return group if all(_alike(site, member) for member in group) else None


def _alike(first: Site, other: Site) -> bool:
    """The same attention over another head; masks and tables are the very same values."""
    spec, operands = first.spec, first.operands
    plain = spec.cache is None and spec.qk_norm is None and spec.combine == "concat"
    same = all(
        getattr(operands, field.name) is getattr(other.operands, field.name)
        or _same_parts(getattr(operands, field.name), getattr(other.operands, field.name))
        for field in dataclasses.fields(Operands)
        if field.name not in _MAKERS
    )
    return (
        plain
        and same
        and other.spec == spec
        and other.output.layout is first.output.layout
        and spec.kv_heads == spec.q_heads == 1
        and not spec.sinks
        and other.replaceable
        and first.qk_output is None
        and other.qk_output is None
        and all(
            getattr(operands, name).layout is getattr(other.operands, name).layout
            for name in _MAKERS
        )
    )


def _same_parts(left: object, right: object) -> bool:
    if left is None or right is None or type(left) is not type(right):
        return False
    if not dataclasses.is_dataclass(left):
        return False
    return all(
        getattr(left, field.name) is getattr(right, field.name)
        or getattr(left, field.name) == getattr(right, field.name)
        for field in dataclasses.fields(left)
    )


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
        tensors[name] = _together(heads, scenes[0], derive)
    if tensors["key"].heads != tensors["value"].heads:
        return None
    output = Heads(
        value=node.outputs[0],
        layout=first.output.layout,
        heads=len(group),
        dim=first.output.dim,
    )
    operands = dataclasses.replace(
        first.operands, query=tensors["query"], key=tensors["key"], value=tensors["value"]
    )
    nodes, _ = dying([output.value], [value for _, value in operands.values()])
    spec = first.spec.replace(q_heads=len(group), kv_heads=tensors["key"].heads)
    return dataclasses.replace(
        first, spec=spec, operands=operands, output=output, nodes=tuple(nodes)
    )


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


def _together(heads: list[Heads], scene: Scene, derive: Deriver) -> Heads:
    """The value whose heads these are; stacked by a Concat where there is none."""
    if len(heads) == 1:
        return heads[0]
    found = _of_one_value(heads, scene)
    if found is not None:
        return found
    layout = heads[0].layout
    value = derive("Concat", [item.value for item in heads], {"axis": _HEAD_AXIS[layout]})
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
