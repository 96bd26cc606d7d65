"""Whether attentions are of a kind that can be cached: no token sees a later one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from mha_export.caches._look import Look
from mha_export.caches._refusal import Refused
from mha_export.decode.layout import Growth
from mha_export.recognise import Recognition, Site
from mha_export.spec import AttentionSpec

HIDDEN = -1e4
"""A number added to a score at or below which the key is as good as hidden."""


def check_sites(recognition: Recognition, growth: Growth) -> Sequence[Site]:
    """The attentions of a decoder that can be given a cache of this growth.

    Raises Refused with the first reason against it.
    """
    rejected = recognition.rejections
    if rejected:
        reason = rejected[0].reason
        raise Refused(
            "unrecognised-attention",
            f"a softmax was not recognised ({reason.code}: {reason.message})",
            nodes=[rejected[0].anchor],
        )
    sites = recognition.sites
    if not sites:
        raise Refused("no-attention", "there is no attention to cache")
    _check_caches(sites, growth)
    look: Look | None = None
    for site in sites:
        _check(site, recognition.model)
        if not _is_causal_by_rule(site.spec):
            if not _masks(site):
                raise _sees_later(site)
            look = look or Look(recognition.model, sites)
            _check_causal_by_data(site, look)
    return sites


def _check_caches(sites: Sequence[Site], growth: Growth) -> None:
    kinds = {site.id: None if (c := site.spec.cache) is None else c.growth for site in sites}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name}: {kind or 'none'}" for name, kind in kinds.items())
        raise Refused("mixed-caches", f"the attentions have different caches ({listed})")
    (kind,) = set(kinds.values())
    if kind is not None and kind != "concat":
        raise Refused(
            "static-cache",
            f"the model has a cache of fixed length already, which can't become {growth}",
            nodes=[sites[0].anchor],
        )


def _check(site: Site, model: ir.Model) -> None:
    if site.cannot_replace is not None:
        reason = site.cannot_replace
        raise Refused(reason.code, f"{site.id}: {reason.message}", nodes=[site.anchor])
    if site.graph is not model.graph:
        raise Refused(
            "control-flow", f"{site.id} lies in a body of control flow", nodes=[site.anchor]
        )
    if site.spec.cross:
        raise Refused(
            "cross-attention",
            f"{site.id} attends to another sequence, whose keys do not grow with the tokens",
            nodes=[site.anchor],
        )
    if site.spec.mask.prefix:
        raise Refused(
            "bidirectional",
            f"{site.id}: tokens of the prefix see later ones",
            nodes=[site.anchor],
        )


def _is_causal_by_rule(spec: AttentionSpec) -> bool:
    return spec.mask.causal is not None or spec.mask.right_window == 0


def _check_causal_by_data(site: Site, look: Look) -> None:
    """A mask that is data: does it hide every later key, whatever a padding mask says?"""
    for value in _masks(site):
        roots = look.context.sources(value)
        pairs = [root for root in roots if len(look.growing(root)) > 1]
        if pairs:
            raise Refused(
                "mask-is-an-input",
                f"{site.id}: the input {pairs[0].name!r} says for each pair of tokens whether one "
                "sees the other: whether a token sees later ones is up to the caller",
                value=pairs[0],
                nodes=[site.anchor],
            )
        if _hides_later(value, look):
            return
    raise _sees_later(site)


def _masks(site: Site) -> list[ir.Value]:
    return [value for value in (site.operands.keep, site.operands.bias) if value is not None]


def _sees_later(site: Site) -> Refused:
    return Refused(
        "bidirectional",
        f"{site.id} lets tokens see later ones: what is computed for a token changes with every "
        "token that follows",
        nodes=[site.anchor],
    )


def _hides_later(value: ir.Value, look: Look) -> bool:
    shape = look.views[0].shape(value)
    if shape is None or len(shape) < 2 or shape[-2:] != (look.lengths[0],) * 2:
        return False
    contents = {}
    for source in look.context.sources(value):
        dims, dtype = look.views[0].shape(source), source.dtype
        if dims is None or dtype is None or source.producer() is not None:
            return False
        contents[source] = np.ones(dims, dtype.numpy())
    view = look.context.sized(look.numbers, contents) if contents else look.views[0]
    mask = view.array(value)
    if mask is None:
        return False
    later = np.triu(np.ones(mask.shape[-2:], bool), 1)
    hidden = ~mask if mask.dtype.kind == "b" else mask <= HIDDEN
    return bool(np.all(hidden[..., later]))
