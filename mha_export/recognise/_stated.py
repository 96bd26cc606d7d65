"""Attentions that their own nodes state: a rewrite cut them into pieces no reader could join again.

A statement is believed only where the graph still fits it: its operands have the shapes it says,
and nothing but them decides what the nodes give. That they give it is for a proof to show, without
which nothing takes their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._fused_site import relaid, with_nodes
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site
from mha_export.statement import SOFTMAXES, Statement, statements

_SHAPES = frozenset({"Shape", "Size"})


def stated_sites(model: ir.Model, scenes: Sequence[Scene]) -> Mapping[ir.Node, Site]:
    """The site of each softmax that is a piece of a stated attention."""
    found: dict[ir.Node, Site] = {}
    for statement in statements(model.graph.all_nodes()):
        region = _region(statement, scenes[0])
        if region is None or not all(_fits(statement, scene) for scene in scenes):
            continue
        softmaxes = {node for node in region if node.op_type in SOFTMAXES}
        site = _site(statement, scenes)
        if site is not None and softmaxes <= set(site.nodes) and not softmaxes & set(found):
            found.update(dict.fromkeys(softmaxes, site))
    return found


def _site(statement: Statement, scenes: Sequence[Scene]) -> Site | None:
    graph = statement.node.graph
    if graph is None:
        return None
    site = Site(
        id="",
        spec=statement.spec,
        graph=graph,
        operands=statement.operands,
        output=statement.gives["output"],
        anchor=statement.node,
        nodes=(),
        present_key=statement.gives.get("present_key"),
        present_value=statement.gives.get("present_value"),
        stated_as=statement.form,
    )
    return with_nodes(relaid(site, scenes))


def _region(statement: Statement, scene: Scene) -> set[ir.Node] | None:
    """The nodes between operands and outputs; None where they read the content of anything else."""
    ends = {value for _, value in statement.operands.values()}
    pending = [heads.value for heads in statement.gives.values()]
    region: set[ir.Node] = set()
    while pending:
        value = pending.pop()
        if value in ends or value.const_value is not None or not scene.context.sources(value):
            continue
        node = value.producer()
        if node is None:
            return None
        if node not in region and node.op_type not in _SHAPES:
            region.add(node)
            pending += [item for item in node.inputs if item is not None]
    return region


def _fits(statement: Statement, scene: Scene) -> bool:
    """Whether queries, keys, values and outputs have the axes they are said to have.

    The shape of an output may depend on data: the tiles of a static cache do.
    """
    operands = statement.operands
    said = [operands.query, operands.key, operands.value, operands.past_key, operands.past_value]
    if any(scene.shapes.dims(heads.value) is None for heads in said if heads is not None):
        return False
    return all(_has_axes(heads, scene) for heads in (*said, *statement.gives.values()) if heads)


def _has_axes(heads: Heads, scene: Scene) -> bool:
    dims = scene.shapes.dims(heads.value)
    if dims is None:
        return True
    if heads.layout is Layout.BSM:
        return len(dims) == 3 and dims[2] == heads.heads * heads.dim
    places = (1, 3) if heads.layout is Layout.BHSD else (2, 3)
    return len(dims) == 4 and tuple(dims[place] for place in places) == (heads.heads, heads.dim)
