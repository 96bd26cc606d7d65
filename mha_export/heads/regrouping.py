"""Fewer key/value heads: the cache divided by h/g, the weights by averaging (Ainslie et al. 2023).

Query heads that are to share keys and values are put next to each other first, an exact
permutation of the heads through W_O; the heads of a group are turned towards one another, exact as
well (:mod:`mha_export.heads.alignment`); then each group's key heads and value heads are averaged,
weights and biases. Which heads go together is chosen by what averaging them loses (``similar``), or
taken as they stand (``contiguous``, what the paper does). The reverse, repeating key/value heads
until every query head has its own, is exact.

Source: "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints".
Without further training, quality falls; that is what the report of a regrouping is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.heads._affine import Affine, Floats
from mha_export.heads._layers import HeadModel, Layer
from mha_export.heads._rebuild import Rewiring, rebuilt
from mha_export.heads.alignment import distances, stacked, turned

Grouping = Literal["similar", "contiguous"]
Groups = tuple[tuple[int, ...], ...]
"""Old key/value heads by new one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Regrouped:
    """A model with other key/value heads, and for each layer which old ones each new one is.

    ``spread`` by layer: the squared distance of the averaged weights from what they stand for,
    relative to the weights' own square; 0 where nothing was averaged.
    """

    model: ir.Model
    groups: Mapping[int, Groups]
    spread: Mapping[int, float]


def regroup(
    heads: HeadModel, kv_heads: int, *, grouping: Grouping = "similar", align: bool = True
) -> Regrouped:
    """The model with ``kv_heads`` key/value heads in every layer.

    Args:
        heads: the model.
        kv_heads: fewer than now: averaged; more: repeated. A divisor of the query heads, and of
            the key/value heads there are or a multiple of them.
        grouping: which heads to average.
        align: turn the heads of a group towards one another first.

    Errors:
        InputError: a layer that can't be changed, a number that doesn't divide, or no change.
    """
    for layer in heads.layers:
        _check(layer, kv_heads)
    if not heads.layers:
        raise InputError("the model has no attention", fix="see `mha-export inspect`")
    changes, groups, spread = [], {}, {}
    for layer in heads.layers:
        now = layer.spec.kv_heads
        if kv_heads == now:
            continue
        if kv_heads > now:
            chosen: Groups = tuple((head // (kv_heads // now),) for head in range(kv_heads))
        elif grouping == "similar":
            chosen = similar_groups(distances(layer, align=align), kv_heads)
        else:
            chosen = contiguous_groups(now, kv_heads)
        ready = turned(layer, chosen) if align and kv_heads < now else layer
        groups[layer.number] = chosen
        spread[layer.number] = spread_of(_vectors(ready), chosen)
        changes.append(_rewired(ready, chosen))
    if not changes:
        raise InputError(
            f"every layer has {kv_heads} key/value heads already", fix="give another --kv-heads"
        )
    return Regrouped(model=rebuilt(heads, changes), groups=groups, spread=spread)


def _check(layer: Layer, kv_heads: int) -> None:
    where = f"layer {layer.number} ({layer.id})"
    if layer.refusal is not None:
        raise InputError(
            f"{where} can't be regrouped: {layer.refusal.code}: {layer.refusal.message}",
            fix="all layers of a model are regrouped, or none",
        )
    h, now = layer.spec.q_heads, layer.spec.kv_heads
    fits = kv_heads >= 1 and h % kv_heads == 0
    if not fits or (now % kv_heads and kv_heads % now):
        could = [n for n in range(1, h + 1) if h % n == 0 and (now % n == 0 or n % now == 0)]
        raise InputError(
            f"{where} has {h} query heads and {now} key/value heads; {kv_heads} doesn't divide",
            fix=f"--kv-heads may be one of {', '.join(map(str, could))}",
        )


def contiguous_groups(now: int, wanted: int) -> Groups:
    """Heads as they stand: 0 and 1, 2 and 3, ..."""
    size = now // wanted
    return tuple(tuple(range(start, start + size)) for start in range(0, now, size))


def similar_groups(apart: Floats, wanted: int) -> Groups:
    """Groups of one size whose members are alike: least squared distance to their mean.

    ``apart`` [h, h] holds the squared distances between two heads.

    Each group grows around the head farthest from all others by its nearest neighbours; then pairs
    of heads of different groups change places as long as that helps.
    """
    count = len(apart)
    size = count // wanted
    starts = [contiguous_groups(count, wanted), _grown(apart, wanted, size)]
    settled = [_swapped(apart, [list(group) for group in start]) for start in starts]
    best = min(settled, key=lambda groups: _cost(apart, groups))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def _grown(apart: Floats, wanted: int, size: int) -> Groups:
    left = set(range(len(apart)))
    groups = []
    for _ in range(wanted):
        seed = max(left, key=lambda head: (sum(apart[head][o] for o in left), -head))
        near = sorted(left, key=lambda head: (apart[seed][head], head))[:size]
        groups.append(tuple(near))
        left -= set(near)
    return tuple(groups)


def _swapped(apart: Floats, groups: list[list[int]]) -> list[list[int]]:
    improved = True
    while improved:
        improved = False
        for one, other in itertools.combinations(groups, 2):
            for i, j in itertools.product(range(len(one)), range(len(other))):
                before = _cost(apart, [one, other])
                one[i], other[j] = other[j], one[i]
                if _cost(apart, [one, other]) < before - 1e-12 * (1.0 + before):
                    improved = True
                else:
                    one[i], other[j] = other[j], one[i]
    return groups


def _cost(apart: Floats, groups: Sequence[Sequence[int]]) -> float:
    """Sum over groups of squared distances to the mean, from distances between members."""
    return float(sum(apart[np.ix_(group, group)].sum() / (2 * len(group)) for group in groups))


def _vectors(layer: Layer) -> Floats:
    """One vector a key/value head: its key and value weights, each to the same total size."""
    parts = []
    for part in (layer.key, layer.value):
        assert part is not None
        flat = stacked(part).reshape(part.weight.shape[1], -1)
        parts.append(flat / max(float(np.sqrt((flat**2).sum())), 1e-30))
    return np.concatenate(parts, axis=1)


def spread_of(vectors: Floats, groups: Groups) -> float:
    """Squared distance of heads from their group's mean, relative to the squares of all."""
    apart = sum(float(((vectors[list(g)] - vectors[list(g)].mean(0)) ** 2).sum()) for g in groups)
    return apart / max(float((vectors**2).sum()), 1e-30)


def _rewired(layer: Layer, groups: Groups) -> Rewiring:
    old = layer.spec
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    assert query is not None
    assert key is not None
    assert value is not None
    assert output is not None
    repeats = len(groups) > old.kv_heads
    if repeats:
        order = list(range(old.q_heads))
    else:
        order = [kv * old.group + i for group in groups for kv in group for i in range(old.group)]
    mean_key, mean_value = _averaged(key, groups), _averaged(value, groups)
    return Rewiring(
        layer=layer,
        query=query.weight[:, order],
        key=mean_key[0],
        value=mean_value[0],
        output=output.weight[order],
        biases=(query.bias[order], mean_key[1], mean_value[1], output.bias),
        origin=tuple(order),
        kv_origin=tuple(group[0] for group in groups),
    )


def _averaged(part: Affine, groups: Groups) -> tuple[Floats, Floats]:
    weight = np.stack([part.weight[:, list(group)].mean(1) for group in groups], axis=1)
    bias = np.stack([part.bias[list(group)].mean(0) for group in groups])
    return weight, bias


def cache_bytes(heads: HeadModel) -> int:
    """Bytes of keys and values that one token adds to the caches of all layers, or would add."""
    sizes = {"fp16": 2, "bf16": 2, "fp64": 8}
    return sum(
        layer.spec.kv_heads
        * (layer.spec.head_dim + layer.spec.value_dim)
        * sizes.get(layer.spec.io_dtype.value, 4)
        for layer in heads.layers
        if layer.site is not None and layer.spec.kv_source == "own"
    )
