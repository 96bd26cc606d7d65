"""The two products of grouped heads: their numbers, the axes in between, no node too many."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench

from mha_export.forms._counts import Count, Counts
from mha_export.forms._grouping import Groups
from mha_export.spec import AttentionSpec

B, S, T, D, E = 2, 3, 5, 4, 6
HEADS = [(4, 4), (4, 2), (6, 2), (3, 1), (1, 1)]
RNG = np.random.default_rng(5)


class Products:
    """Both products over arrays; ``known``: which of the lengths ``s`` and ``t`` are numbers."""

    def __init__(self, heads: tuple[int, int], *, rows: bool, known: str) -> None:
        h, k = heads
        self.arrays = {
            name: RNG.normal(size=shape).astype(np.float32)
            for name, shape in {
                "q": (B, h, S, D),
                "k": (B, k, T, D),
                "v": (B, k, T, E),
            }.items()
        }
        self.bench = Bench()
        spec = AttentionSpec(q_heads=h, kv_heads=k, head_dim=D, v_head_dim=E)
        counts = Counts(self.bench.scope)
        self.groups = Groups(scope=self.bench.scope, spec=spec, counts=counts, rows=rows)
        self.values = {name: self.bench.value(name, array) for name, array in self.arrays.items()}
        self.s: Count = S if "s" in known else self._open("s", S)
        self.t: Count = T if "t" in known else self._open("t", T)

    def _open(self, name: str, number: int) -> ir.Value:
        return self.bench.value(name, np.array([number], np.int64), shape=[1])

    def scores(self) -> ir.Value:
        groups = self.groups
        return groups.scores(groups.queries(self.values["q"]), groups.keys(self.values["k"]))


WAYS: dict[str, dict[str, Any]] = {
    f"{'rows' if rows else 'broadcast'}-{known}": {"rows": rows, "known": known}
    for rows, known in itertools.product((True, False), ("", "s", "t", "st"))
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_products_are_those_of_interleaved_heads(way: str, heads: tuple[int, int]) -> None:
    made = Products(heads, **WAYS[way])
    groups, (h, k) = made.groups, heads
    keys, values = (made.arrays[name].repeat(h // k, axis=1) for name in "kv")
    by_head = groups.by_head(made.scores(), made.s, made.t)
    arranged = groups.arranged(by_head, made.s, made.t)
    context = groups.context(arranged, groups.keys(made.values["v"]))
    found = made.bench.run(by_head, context)
    scores = made.arrays["q"] @ keys.swapaxes(2, 3)
    np.testing.assert_allclose(found[0], scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], scores @ values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_axes_are_where_the_class_says(way: str, heads: tuple[int, int]) -> None:
    made = Products(heads, **WAYS[way])
    keys = made.groups.keys(made.values["k"])
    scores, turned = made.bench.run(made.scores(), keys)
    assert turned.shape[made.groups.key_axis] == T
    h, k = heads
    if made.groups.rows:
        assert scores.shape == (B, k, h // k * S, T)
    else:
        assert scores.shape == (B, *made.groups.head_sizes, S, T)
        assert len(made.groups.head_sizes) == (1 if h == k else 2)


def test_a_head_of_its_own_is_not_moved() -> None:
    made = Products((4, 4), rows=False, known="st")
    scores = made.scores()
    groups = made.groups
    assert groups.arranged(groups.by_head(scores, S, T), S, T) is scores
    groups.context(scores, groups.keys(made.values["v"]))
    assert made.bench.types == ["Transpose", "MatMul", "MatMul"]


@pytest.mark.parametrize("way", WAYS)
def test_known_lengths_need_no_size_arithmetic(way: str) -> None:
    made = Products((4, 2), **WAYS[way])
    made.groups.arranged(made.groups.by_head(made.scores(), made.s, made.t), made.s, made.t)
    # Rows of a group are told apart by the number of queries, and join again without it.
    known = WAYS[way]["known"]
    expected = "s" not in known if WAYS[way]["rows"] else 0 if known == "st" else 2
    assert made.bench.types.count("Concat") == expected


@pytest.mark.parametrize("known", ["s", ""], ids=["known", "open"])
def test_a_piece_without_keys_keeps_its_shape(known: str) -> None:
    """Rows of a group are never found by -1: nothing tells how many there are of no elements."""
    made = Products((4, 2), rows=True, known=known)
    scores = made.bench.value("scores", np.zeros((B, 2, 2 * S, 0), np.float32))
    (found,) = made.bench.run(made.groups.by_head(scores, made.s, made.t))
    assert found.shape == (B, 4, S, 0)
