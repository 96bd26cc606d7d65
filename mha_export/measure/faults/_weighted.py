"""Faults in the weights: heads in the wrong order, biases lost, one projection for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mha_export.measure.faults._bases import Base
from mha_export.measure.faults._change import Change, Fault

Arrays = dict[str, np.ndarray]


def columns(base: Base, part: str) -> tuple[str, np.ndarray]:
    """The weight that projects ``q``, ``k`` or ``v``, and the columns of each head [heads, dim]."""
    spec = base.spec
    assert spec.projections is not None
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    heads, dim = {"q": (h, d), "k": (k, d), "v": (k, e)}[part]
    own = np.arange(heads * dim).reshape(heads, dim)
    if spec.projections.packing == "separate":
        return part, own
    if spec.projections.packing == "packed":
        return "qkv", own + {"q": 0, "k": h * d, "v": h * d + k * d}[part]
    g = spec.group
    width = (g + 1) * d + e
    if part == "q":
        first = [(i // g) * width + (i % g) * d for i in range(h)]
    else:
        first = [i * width + g * d + (d if part == "v" else 0) for i in range(k)]
    return "qkv", np.array(first)[:, None] + np.arange(dim)


def _moved(base: Base, part: str, to: np.ndarray, source: np.ndarray) -> Arrays:
    """Weights whose columns ``to`` of a projection, biases included, hold those at ``source``."""
    name, _ = columns(base, part)
    weights = dict(base.weights)
    for array in (f"w_{name}", f"b_{name}"):
        if array in weights:
            changed = weights[array].copy()
            changed[..., to.ravel()] = weights[array][..., source.ravel()]
            weights[array] = changed
    return weights


def _reordered(base: Base, part: str, order: Sequence[int]) -> Arrays:
    _, at = columns(base, part)
    return _moved(base, part, at, at[np.array(order)])


def _swap(count: int) -> list[int]:
    return [1, 0, *range(2, count)]


def heads_swapped(base: Base) -> Iterator[Change]:
    for part in ("q", "k", "v"):
        count = len(columns(base, part)[1])
        if count > 1:
            weights = _reordered(base, part, _swap(count))
            yield Change(detail=f"{part}: head 0 for head 1", weights=weights)


def kv_heads_shifted(base: Base) -> Iterator[Change]:
    k = base.spec.kv_heads
    if k > 1:
        order = [*range(1, k), 0]
        keys = Base(name="", spec=base.spec, weights=_reordered(base, "k", order))
        yield Change(detail="by one", weights=_reordered(keys, "v", order))


def heads_tiled(base: Base) -> Iterator[Change]:
    """Query head i reads key head ``i % k`` instead of ``i // g``."""
    spec = base.spec
    if spec.group == 1 or spec.kv_heads == 1:
        return
    source = [0] * spec.q_heads  # in the right graph, head j reads key head j // g
    for head in range(spec.q_heads):
        source[(head % spec.kv_heads) * spec.group + head // spec.kv_heads] = head
    weights = _reordered(base, "q", source)
    weights["w_o"] = _rows(base, source)
    yield Change(detail="i % k for i // g", weights=weights)


def _rows(base: Base, order: Sequence[int]) -> np.ndarray:
    blocks = np.split(base.weights["w_o"], base.spec.q_heads)
    return np.concatenate([blocks[i] for i in order])


def outputs_permuted(base: Base) -> Iterator[Change]:
    h = base.spec.q_heads
    weights = {**base.weights, "w_o": _rows(base, [*range(1, h), 0])}
    yield Change(detail="heads rolled by one", weights=weights)


def output_transposed(base: Base) -> Iterator[Change]:
    w_o = base.weights["w_o"]
    if w_o.shape[0] == w_o.shape[1]:
        turned = np.ascontiguousarray(w_o.T)
        yield Change(detail="W_O turned", weights={**base.weights, "w_o": turned})


def split_transposed(base: Base) -> Iterator[Change]:
    """Channels split [d, heads] where they are [heads, d]."""
    for part in ("q", "v"):
        _, at = columns(base, part)
        if len(at) > 1:
            turned = at.T.reshape(at.shape)
            yield Change(detail=part, weights=_moved(base, part, at, turned))


def keys_for_values(base: Base) -> Iterator[Change]:
    if base.spec.value_dim != base.spec.head_dim:
        return
    for part, other in (("v", "k"), ("k", "v")):
        name, at = columns(base, part)
        source, from_ = columns(base, other)
        if name == source:
            weights = _moved(base, part, at, from_)
        else:
            weights = {**base.weights, f"w_{part}": base.weights[f"w_{other}"]}
            if f"b_{part}" in weights and f"b_{other}" in weights:
                weights[f"b_{part}"] = weights[f"b_{other}"]
        yield Change(detail=f"{other} for {part}", weights=weights)


def bias_dropped(part: str) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        name, at = ("o", np.arange(32)) if part == "o" else columns(base, part)
        bias = base.weights.get(f"b_{name}")
        if bias is not None and bias[at.ravel()].any():
            changed = bias.copy()
            changed[at.ravel()] = 0
            yield Change(detail=f"b_{part}", weights={**base.weights, f"b_{name}": changed})

    return fault


def sinks_shifted(base: Base) -> Iterator[Change]:
    if "sinks" in base.weights:
        rolled = np.roll(base.weights["sinks"], 1)
        yield Change(detail="by one head", weights={**base.weights, "sinks": rolled})


def norms_swapped(base: Base) -> Iterator[Change]:
    if {"q_norm_weight", "k_norm_weight"} <= base.weights.keys():
        queries, keys = base.weights["q_norm_weight"], base.weights["k_norm_weight"]
        changed = {**base.weights, "q_norm_weight": keys[::-1], "k_norm_weight": queries}
        yield Change(detail="one for the other", weights=changed)


WEIGHTED: dict[str, Fault] = {
    "one head's weights swapped": heads_swapped,
    "kv heads shifted": kv_heads_shifted,
    "heads tiled": heads_tiled,
    "output heads permuted": outputs_permuted,
    "output projection transposed": output_transposed,
    "head split transposed": split_transposed,
    "K used for V": keys_for_values,
    "Q bias dropped": bias_dropped("q"),
    "K bias dropped": bias_dropped("k"),
    "V bias dropped": bias_dropped("v"),
    "output bias dropped": bias_dropped("o"),
    "sinks shifted": sinks_shifted,
    "norm weights swapped": norms_swapped,
}
