"""A site read off a fused node, finished with what the whole graph knows.

The reader of an op says what the node means. Here its operands are followed up, and its output
down, to where projections write and read them, and the nodes that a replacement frees are counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from mha_export.operands import Heads
from mha_export.recognise._axes import View
from mha_export.recognise._bind import Pattern, bound
from mha_export.recognise._downstream import Landing, averaged, landings
from mha_export.recognise._fused_depth import deepened
from mha_export.recognise._fused_rows import with_row_policy
from mha_export.recognise._lift import Stage
from mha_export.recognise._liveness import dying
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason, Site


def settled(site: Site, scenes: Sequence[Scene]) -> Site:
    """The site with operands and output where the graph holds them best, and all its nodes."""
    seen = with_row_policy(site, scenes)
    deep = deepened(seen, scenes) or relaid(seen, scenes)
    if seen is site:  # the mean of a row without keys may be of values before they were repeated
        deep = _with_row_policy_below(deep, scenes)
    return with_nodes(deep)


def with_rows(site: Site, scenes: Sequence[Scene]) -> Site:
    """A site of plain nodes up to and with what its rows without keys get on the context."""
    if site.cannot_replace is not None or site.qk_output is not None:
        return site
    fixed = _with_row_policy_below(site, scenes)
    return site if fixed is site else with_nodes(fixed)


def _with_row_policy_below(site: Site, scenes: Sequence[Scene]) -> Site:
    fixed = with_row_policy(site, scenes)
    return site if fixed is site else _averaged(relaid(fixed, scenes), scenes)


def _averaged(site: Site, scenes: Sequence[Scene]) -> Site:
    """The site with the mean over its heads for output, where that is all that is read of it."""
    found: list[Heads | None] = []
    for scene in scenes:
        known = _pattern(site.output, scene)
        if known is None:
            return site
        pattern, view = known
        landing = Landing(value=site.output.value, view=view, cast=False)
        found.append(averaged(landing, pattern, scene))
    output = _agreed(found, site.output)
    if output is site.output:
        return site
    return dataclasses.replace(site, output=output, spec=site.spec.replace(combine="mean"))


def with_nodes(site: Site) -> Site:
    """The site with the nodes a replacement frees, and why it frees too few of them."""
    present = [h.value for h in (site.present_key, site.present_value) if h is not None]
    replaced = [site.output.value, *present]
    if site.qk_output is not None:
        replaced.append(site.qk_output)
    nodes, dead = dying(replaced, [value for _, value in site.operands.values()])
    reason = site.cannot_replace
    if reason is None and site.anchor not in dead:
        reason = _still_read(site, set(replaced), dead)
    return dataclasses.replace(site, nodes=tuple(nodes), cannot_replace=reason)


def relaid(site: Site, scenes: Sequence[Scene]) -> Site:
    """The same operands and output, nearer to the projections."""
    operands = dataclasses.replace(
        site.operands,
        query=_raised(site.operands.query, scenes),
        key=_raised(site.operands.key, scenes),
        value=_raised(site.operands.value, scenes),
    )
    return dataclasses.replace(site, operands=operands, output=_lowered(site.output, scenes))


def _still_read(site: Site, replaced: set[ir.Value], dead: set[ir.Node]) -> Reason:
    values = [v for v in site.anchor.outputs if v not in replaced]
    users = [user for v in values for user, _ in v.uses() if user not in dead]
    shown = next((v for v in values if v.is_graph_output() or v.uses()), site.anchor.outputs[0])
    return Reason(
        code="outputs-used-elsewhere",
        message=f"{site.anchor.op_type} {site.anchor.name!r} also gives {shown.name!r}, which the "
        "attention's statement does not hold",
        value=shown.name,
        nodes=tuple(user.name or user.op_type for user in users),
    )


def _pattern(heads: Heads, scene: Scene) -> tuple[Pattern, View] | None:
    view = scene.views.of(heads.value)
    pattern = None if view is None else Pattern.of(view, heads.layout)
    return None if view is None or pattern is None else (pattern, view)


def _agreed(found: list[Heads | None], otherwise: Heads) -> Heads:
    """What every choice of sizes gives, or what there was."""
    first = found[0]
    return first if first is not None and all(item == first for item in found) else otherwise


def _raised(heads: Heads, scenes: Sequence[Scene]) -> Heads:
    found: list[Heads | None] = []
    for scene in scenes:
        known = _pattern(heads, scene)
        if known is None:
            return heads
        pattern, view = known
        found.append(bound(pattern, Stage(entry=heads.value, view=view).places(scene)))
    return _agreed(found, heads)


def _lowered(heads: Heads, scenes: Sequence[Scene]) -> Heads:
    found: list[Heads | None] = []
    for scene in scenes:
        dims = scene.dims(heads.value)
        if dims is None or len(dims) != 4:
            return heads
        places = [place for place in landings(heads.value, scene) if not place.cast]
        pattern = Pattern.of(places[0].view, heads.layout)
        if pattern is None:
            return heads
        found.append(bound(pattern, [(p.value, p.view) for p in reversed(places)]))
    return _agreed(found, heads)
