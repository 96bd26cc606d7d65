"""What makes surgery by head exact, stated as checks that can be run on any layer.

* packed: projecting with all heads' weights side by side is projecting head by head;
* sum: the layer's output is the bias plus the sum over heads of ``context_i W_O,i``;
* rank: averaging h heads of width e through one W_O of width e has rank e at most, however many
  heads there are; concatenating them has rank h * e at most, the model's width;
* split: one softmax gives every value channel the same weights, so one wide head can't do what
  three heads do that look at three different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mha_export.heads._layers import Layer

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Of one layer: relative differences, which are rounding, and ranks."""

    packed: float
    summed: float
    concat_rank: int
    mean_rank: int


def identities_of(layer: Layer, *, tokens: int = 256, seed: int = 0) -> Identities:
    """Check a layer whose projections are known, on random input and a random context."""
    assert layer.query is not None
    assert layer.output is not None
    draw = np.random.default_rng(seed)
    m, h, d = layer.query.weight.shape
    x = draw.standard_normal((tokens, m))
    packed = (x @ layer.query.weight.reshape(m, h * d)).reshape(tokens, h, d)
    apart = np.stack([x @ layer.query.weight[:, head] for head in range(h)], axis=1)
    _, e, _ = layer.output.weight.shape
    context = draw.standard_normal((tokens, h, e))
    whole = context.reshape(tokens, h * e) @ layer.output.weight.reshape(h * e, -1)
    summed = sum(context[:, head] @ layer.output.weight[head] for head in range(h))
    averaged = context.mean(1) @ layer.output.weight[0]
    return Identities(
        packed=_relative(packed, apart),
        summed=_relative(whole, np.asarray(summed)),
        concat_rank=int(np.linalg.matrix_rank(whole)),
        mean_rank=int(np.linalg.matrix_rank(averaged)),
    )


def _relative(a: Floats, b: Floats) -> float:
    return float(np.abs(a - b).max() / np.abs(a).max())


@dataclass(frozen=True, kw_only=True)
class ThreeWaySplit:
    """How near attention with so many heads can come to copying three channels from three tokens.

    ``one_head`` is the least squared error of one wide head over all weights that a softmax can
    give, ``three_heads`` of three narrow ones.
    """

    one_head: float
    three_heads: float


def three_way_split(*, steps: int = 200) -> ThreeWaySplit:
    """The target: channel c of the output is token c's, for three tokens with unit values.

    One head gives every channel c the weight ``p_c`` of the one distribution p; the squared error
    ``sum_c (1 - p_c)^2`` is least, 4/3, at the uniform one. Three heads give each channel a
    distribution of its own.
    """
    best_one = np.inf
    grid = np.linspace(0.0, 1.0, steps + 1)
    for first in grid:
        second = grid[grid <= 1.0 - first]
        third = 1.0 - first - second
        errors = (1 - first) ** 2 + (1 - second) ** 2 + (1 - third) ** 2
        best_one = min(best_one, float(errors.min()))
    logits = 40.0 * np.eye(3)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return ThreeWaySplit(one_head=best_one, three_heads=float(((1 - np.diag(weights)) ** 2).sum()))
