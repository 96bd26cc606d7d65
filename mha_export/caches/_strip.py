"""A decoder with a concat cache as it is before the first token: its past is empty.

With pasts of 0 tokens such a graph *is* the decoder without a cache, and is given another from
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.caches._refusal import Refused
from mha_export.forms import Scope
from mha_export.forms._layout import LENGTH_AXIS, dimension, ints
from mha_export.operands import Heads, Layout
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import ClonedModel
from mha_export.rewrite._sizes import SizedSite, sized_sites
from mha_export.rewrite._splice import restore_order
from mha_export.rewrite.opset import model_opset

Pasts = Mapping[str, tuple[Heads | None, Heads | None]]
"""The past keys and values that a site read, by its id."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Emptied:
    """The decoder without its cache, its attentions, and the inputs that held the cache."""

    model: ir.Model
    sites: Sequence[Site]
    pasts: Pasts


def without_past(model: ir.Model, sites: Sequence[Site]) -> Emptied:
    """A copy in which all tokens are new ones. Past inputs are still there, with 0 tokens."""
    samples = sized_sites(sites[0], Context(model))
    if not samples:
        raise Refused(
            "length-fixed",
            "no lengths of past and new tokens could be found that fit together",
            nodes=[sites[0].anchor],
        )
    cloned = ClonedModel(model)
    graph = cloned.model.graph
    copies = [cloned.site(site) for site in sites]
    covered = {node for site in copies for node in site.nodes}
    scope = Scope("emptied", opset=model_opset(cloned.model))
    for site in copies:
        for heads in (site.operands.past_key, site.operands.past_value):
            if heads is not None:
                _empty(heads, site, covered, scope, graph)
    graph.extend(scope.nodes)
    for value in scope.initializers:
        graph.register_initializer(value)
    new = _unite_lengths(model.graph.inputs, graph.inputs, samples, None)
    if new is None:
        raise Refused("length-fixed", "no input is as long as the new tokens")
    _unite_lengths(model.graph.outputs, graph.outputs, samples, new)
    for node in graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    restore_order(cloned.model)
    pasts = {site.id: (site.operands.past_key, site.operands.past_value) for site in copies}
    return Emptied(model=cloned.model, sites=[_uncached(site) for site in copies], pasts=pasts)


def _uncached(site: Site) -> Site:
    operands = dataclasses.replace(site.operands, past_key=None, past_value=None)
    return dataclasses.replace(site, spec=site.spec.replace(cache=None), operands=operands)


def _empty(heads: Heads, site: Site, covered: set[ir.Node], scope: Scope, graph: ir.Graph) -> None:
    past = heads.value
    if past not in graph.inputs:
        raise Refused(
            "cache-not-an-input",
            f"the cache {past.name!r} of {site.id} is computed from an input and is none itself",
            value=past,
            nodes=[site.anchor],
        )
    if past.shape is not None:
        dims = list(past.shape)
        dims[LENGTH_AXIS[heads.layout]] = 0
        past.shape = ir.Shape(dims)
    readers = [(node, index) for node, index in past.uses() if node not in covered]
    if not readers:
        return
    sizes = [heads.heads, 0] if heads.layout is Layout.BHSD else [0, heads.heads]
    batch = dimension(scope, past, 0)
    parts = [batch, ints(scope, *sizes, heads.dim)]
    shape = scope.op("Concat", parts, {"axis": 0}, dtype=ir.DataType.INT64)
    dtype = past.dtype or ir.DataType.FLOAT
    zero = ir.tensor(np.zeros(1, dtype.numpy()), name="zero")
    empty = scope.op("ConstantOfShape", [shape], {"value": zero}, dtype=dtype)
    for node, index in readers:
        node.replace_input_with(index, empty)


def _unite_lengths(
    values: Sequence[ir.Value],
    copies: Sequence[ir.Value],
    samples: Sequence[SizedSite],
    new: ir.SymbolicDim | None,
) -> ir.SymbolicDim | None:
    """Make axes as long as past and new tokens together as long as the new ones, called ``new``.

    Returns:
        What the new tokens' length is called, where none was given.
    """
    whole: list[tuple[ir.Value, int]] = []
    for value, copy in zip(values, copies, strict=True):
        shapes = [sample.view.shape(value) for sample in samples]
        for axis, dim in enumerate(copy.shape or ()):
            if isinstance(dim, int) or axis == 0:
                continue
            sizes = [None if shape is None else shape[axis] for shape in shapes]
            if sizes == [sample.s for sample in samples]:
                new = new or dim
            elif sizes == [sample.t for sample in samples]:
                whole.append((copy, axis))
    for value, axis in whole:
        assert value.shape is not None
        if new is None:
            break
        dims = list(value.shape)
        dims[axis] = new
        value.shape = ir.Shape(dims)
    return new
