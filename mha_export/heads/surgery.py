"""Heads taken out for good: smaller projections, a smaller cache, the same numbers.

A head is its column blocks of W_Q, W_K and W_V with their biases and its row block of W_O; what
is left computes exactly what the model computes with that head's gate at zero. With grouped keys a
key/value head (and its place in the cache) goes when its last query head goes. Groups must stay of
one size: a group that keeps fewer query heads than another is padded with heads whose slices are
zero, which change nothing and cost as much as a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.heads._affine import Floats
from mha_export.heads._layers import HeadModel, Layer
from mha_export.heads._rebuild import Change, Emptied, Rewiring, rebuilt
from mha_export.heads.gates import Head


@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """What a layer has left. ``kept`` and ``kv_kept`` are old head numbers."""

    layer: int
    id: str
    before: int
    kv_before: int
    kept: tuple[int, ...]
    kv_kept: tuple[int, ...]
    padded: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """A model with heads removed, and what is left of every layer that could be told."""

    model: ir.Model
    layers: tuple[LayerHeads, ...]
    removed: tuple[Head, ...]
    folded: Mapping[int, float] = field(default_factory=dict)
    """Layers without heads: norm of the mean contribution that went into their bias."""


def prune(
    heads: HeadModel,
    removed: Collection[Head],
    *,
    means: Mapping[int, Floats] | None = None,
) -> Pruned:
    """The model without ``removed``.

    Args:
        heads: the model.
        removed: layer and query head, both from 0.
        means: by layer, the mean over tokens of what all its heads together add to the output,
            [m]; put into the bias of a layer that loses all of them. None: such a layer keeps its
            output bias alone, as with all gates at zero.

    Errors:
        InputError: no such layer or head; a layer whose heads can't be removed, with the reason;
            nothing to remove; all heads of all layers.
    """
    gone = check_removal(heads, removed)
    changes: list[Change] = []
    summary = []
    folded = {}
    for layer in heads.layers:
        if layer.site is None:
            continue
        own = frozenset(head for number, head in gone if number == layer.number)
        kept = _kept(layer, own)
        summary.append(kept)
        if not own:
            continue
        if kept.kept:
            changes.append(_without(layer, kept))
        else:
            assert layer.output is not None
            mean = (means or {}).get(layer.number)
            bias = layer.output.bias if mean is None else layer.output.bias + mean
            changes.append(Emptied(layer=layer, bias=bias))
            folded[layer.number] = 0.0 if mean is None else float(np.linalg.norm(mean))
    return Pruned(
        model=rebuilt(heads, changes),
        layers=tuple(summary),
        removed=tuple(sorted(gone)),
        folded=folded,
    )


def check_removal(heads: HeadModel, removed: Collection[Head]) -> frozenset[Head]:
    """``removed`` as a set, all of it there and removable.

    Errors:
        InputError: as :func:`prune`.
    """
    gone = frozenset(removed)
    if not gone:
        raise InputError("no head is to be removed", fix="name heads as layer:head, e.g. 0:1,1:3")
    layers = {layer.number: layer for layer in heads.layers}
    for number, head in sorted(gone):
        layer = layers.get(number) or heads.layer(str(number))
        if layer.refusal is not None:
            raise InputError(
                f"heads can't be removed from layer {number} ({layer.id}): "
                f"{layer.refusal.code}: {layer.refusal.message}",
                fix="leave the layer out",
            )
        if not 0 <= head < layer.heads:
            raise InputError(
                f"layer {number} ({layer.id}) has no head {head}",
                fix=f"its heads are 0 to {layer.heads - 1}",
            )
    if all(layer.refusal is None for layer in heads.layers) and len(gone) == sum(
        layer.heads for layer in heads.layers
    ):
        raise InputError(
            "all heads of all layers are to be removed: no token would see another",
            fix="keep one head at least",
        )
    return gone


def _kept(layer: Layer, gone: Collection[int]) -> LayerHeads:
    spec = layer.spec
    kept = tuple(head for head in range(spec.q_heads) if head not in gone)
    kv_kept = tuple(dict.fromkeys(head // spec.group for head in kept))
    return LayerHeads(
        layer=layer.number,
        id=layer.id,
        before=spec.q_heads,
        kv_before=spec.kv_heads,
        kept=kept,
        kv_kept=kv_kept,
        padded=_group(kept, spec.group) * len(kv_kept) - len(kept),
    )


def _group(kept: Collection[int], group: int) -> int:
    """Query heads in the fullest group."""
    counts: dict[int, int] = {}
    for head in kept:
        counts[head // group] = counts.get(head // group, 0) + 1
    return max(counts.values(), default=0)


def _without(layer: Layer, kept: LayerHeads) -> Rewiring:
    spec = layer.spec
    width = _group(kept.kept, spec.group)
    slots: list[int | None] = []
    for kv in kept.kv_kept:
        own: list[int | None] = [head for head in kept.kept if head // spec.group == kv]
        slots += own + [None] * (width - len(own))
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    assert query is not None
    assert key is not None
    assert value is not None
    assert output is not None
    origin = tuple(0 if slot is None else slot for slot in slots)
    real = np.array([slot is not None for slot in slots])
    rows = list(kept.kv_kept)
    return Rewiring(
        layer=layer,
        query=query.weight[:, list(origin)] * real[:, None],
        key=key.weight[:, rows],
        value=value.weight[:, rows],
        output=output.weight[list(origin)] * real[:, None, None],
        biases=(
            query.bias[list(origin)] * real[:, None],
            key.bias[rows],
            value.bias[rows],
            output.bias,
        ),
        origin=origin,
        kv_origin=kept.kv_kept,
    )
