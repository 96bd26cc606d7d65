"""Heads turned towards one another before they are averaged: exact, and then less is lost.

A head's channels have no basis of their own: keys ``K R`` with queries ``Q R``, or values ``V R``
with ``R^T W_O``, compute the same for every orthogonal R. Two trained heads that do alike things
do them in different bases, so the mean of their weights as they stand is the mean of unlike
things. What averaging a group loses is the squared distance of its heads' weights to their mean,
and the turns of the orthogonal Procrustes problem for many make it least (Gower 1975). Values
that are equal already stay so, whatever W_O makes of them. Keys that are normed or rotated by
position after their projection stay as they are: a turn of their channels would not pass through.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from mha_export.heads._affine import Affine, Floats, OutputMap
from mha_export.heads._layers import Layer

ROUNDS = 20
"""Of turning every head towards the mean of all; the error never rises from one to the next."""


def keys_turn(layer: Layer) -> bool:
    """Whether keys enter the product with the queries as they were projected."""
    spec = layer.spec
    joint = spec.projections is not None and spec.projections.joint is not None
    return spec.rotary is None and spec.qk_norm is None and not joint


def turned(layer: Layer, groups: Sequence[Sequence[int]]) -> Layer:
    """The layer, computing the same, with the heads of each group turned towards their mean.

    Args:
        layer: one whose four projections are known.
        groups: key/value heads that are to be averaged.
    """
    query, key, value, output = _parts(layer)
    by_key = [np.eye(key.weight.shape[2])] * key.weight.shape[1]
    by_value = [np.eye(value.weight.shape[2])] * value.weight.shape[1]
    for group in groups:
        if keys_turn(layer):
            _put(by_key, group, turns_of(stacked(key)[list(group)]))
        _put(by_value, group, turns_of(stacked(value)[list(group)]))
    repeated = [head // layer.spec.group for head in range(layer.heads)]
    back = np.stack([by_value[kv].T for kv in repeated])
    return dataclasses.replace(
        layer,
        query=_times(query, [by_key[kv] for kv in repeated]),
        key=_times(key, by_key),
        value=_times(value, by_value),
        output=dataclasses.replace(output, weight=back @ output.weight),
    )


def _parts(layer: Layer) -> tuple[Affine, Affine, Affine, OutputMap]:
    query, key, value, output = layer.query, layer.key, layer.value, layer.output
    assert query is not None
    assert key is not None
    assert value is not None
    assert output is not None
    return query, key, value, output


def _put(turns: list[Floats], group: Sequence[int], found: Sequence[Floats]) -> None:
    for head, turn in zip(group, found, strict=True):
        turns[head] = turn


def _times(part: Affine, turns: Sequence[Floats]) -> Affine:
    by_head = np.stack(turns)
    return dataclasses.replace(
        part,
        weight=np.einsum("mhd,hde->mhe", part.weight, by_head),
        bias=np.einsum("hd,hde->he", part.bias, by_head),
    )


def stacked(part: Affine) -> Floats:
    """[h, m + 1, d]: the weights of every head, its bias as the last row."""
    return np.concatenate([part.weight, part.bias[None]]).swapaxes(0, 1)


def turns_of(heads: Floats) -> list[Floats]:
    """An orthogonal [d, d] for each of ``heads`` [n, m, d] that brings them close to one mean."""
    mean, turns = heads[0], [np.eye(heads.shape[2])] * len(heads)
    for _ in range(ROUNDS if len(heads) > 1 else 0):
        turns = [_nearest_turn(head.T @ mean) for head in heads]
        mean = np.mean([head @ turn for head, turn in zip(heads, turns, strict=True)], axis=0)
    return turns


def _nearest_turn(cross: Floats) -> Floats:
    left, _, right = np.linalg.svd(cross)
    turn: Floats = left @ right
    return turn


def distances(layer: Layer, *, align: bool = True) -> Floats:
    """[kv, kv]: twice what is lost by averaging two heads' keys and values, turned first.

    Squared distance of weights and biases, of keys and of values each relative to the squares of
    all heads of the layer. ``align`` False: of the weights as they stand.
    """
    _, key, value, _ = _parts(layer)
    return _distances(key, turn=align and keys_turn(layer)) + _distances(value, turn=align)


def _distances(part: Affine, *, turn: bool) -> Floats:
    heads = stacked(part)
    squares = (heads**2).sum((1, 2))
    found = np.zeros((len(heads), len(heads)))
    for i, j in itertools.combinations(range(len(heads)), 2):
        cross = heads[i].T @ heads[j]
        # the trace of the cross product after the best turn is the sum of its singular values
        shared = np.linalg.svd(cross, compute_uv=False).sum() if turn else np.trace(cross)
        found[i, j] = found[j, i] = max(squares[i] + squares[j] - 2 * shared, 0.0)
    apart: Floats = found / max(float(squares.sum()), 1e-30)
    return apart
