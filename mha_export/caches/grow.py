"""Giving a decoder a cache, or another kind of cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.caches._apply import CachedGraph
from mha_export.caches._causal import check_sites
from mha_export.caches._refusal import Refused
from mha_export.caches._strip import Pasts, without_past
from mha_export.caches._walk import walk
from mha_export.decode import CacheLayout
from mha_export.decode.layout import KEY, Growth
from mha_export.recognise import Reason, Recognition
from mha_export.rewrite._splice import restore_order
from mha_export.spec import MaskSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached:
    """A decoder with a cache, its attentions in plain ops, not yet proven.

    Attributes:
        recognition: the attentions of ``model``.
        rows: outputs of each new token, and the axis they are along; other outputs are the last's.
        reach: tokens it takes to look past every window and chunk.
    """

    model: ir.Model
    recognition: Recognition
    layout: CacheLayout
    rows: Mapping[str, int]
    reach: int


def with_cache(recognition: Recognition, growth: Growth) -> Cached | Reason:
    """The decoder with a cache that grows by ``growth``, or why it cannot have one.

    A decoder without a cache gets past inputs and present outputs, one with a concat cache gets
    buffers. Everything else that speaks of tokens is rewired: what is fed are the new tokens, and
    positions, tables, masks and shapes are those of all of them. ``recognition.model`` is not
    changed.

    The result is an unproven claim: :func:`mha_export.caches.prove_steps` proves it.
    """
    try:
        return _with_cache(recognition, growth)
    except Refused as refused:
        return refused.reason


def _with_cache(recognition: Recognition, growth: Growth) -> Cached:
    restore_order(recognition.model)
    sites = check_sites(recognition, growth)
    model = recognition.model
    pasts: Pasts = {}
    if sites[0].spec.cache is not None:
        emptied = without_past(model, sites)
        model, sites, pasts = emptied.model, emptied.sites, emptied.pasts
    found = walk(model, sites)
    graph = CachedGraph(model, sites, found, growth, pasts)
    layout = graph.build()
    graph.model.metadata_props[KEY] = layout.to_text()
    outputs = {value: value.name or "" for value in model.graph.outputs}
    rows = {name: found.states[v].axis for v, name in outputs.items() if v in found.states}
    reach = max(_reach(site.spec.mask) for site in sites)
    return Cached(
        model=graph.model,
        recognition=graph.recognition(recognition.verdicts),
        layout=layout,
        rows=rows,
        reach=reach,
    )


def _reach(mask: MaskSpec) -> int:
    sizes = (mask.left_window, mask.block)
    return max((size for size in sizes if size is not None), default=0)
