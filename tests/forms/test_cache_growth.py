"""A cache that grows outside a fused op: by concatenation, or written in place."""

from __future__ import annotations

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._cache import append
from mha_export.forms._layout import Sizes
from mha_export.operands import Layout, Operands
from mha_export.spec import AttentionSpec, CacheSpec

RNG = np.random.default_rng(2)
PAST = RNG.normal(size=(2, 3, 7, 4)).astype(np.float32)
NEW = RNG.normal(size=(2, 3, 2, 4)).astype(np.float32)
LENGTHS = np.array([2, 6])
"""After the new tokens: they go to 0 and 1, and to 4 and 5."""

CACHES = [Layout.BHSD, Layout.BSHD]


def _grown(bench: Bench, growth: str, past: Layout, new: Layout, op: bool = True) -> np.ndarray:
    spec = AttentionSpec(
        q_heads=3,
        kv_heads=3,
        head_dim=4,
        cache=CacheSpec(growth=growth, layout=past.value),  # type: ignore[arg-type]
    )
    heads, added = bench.heads("past", PAST, past), bench.heads("new", NEW, new)
    lengths = None if growth == "concat" else bench.value("lengths", LENGTHS)
    sizes = Sizes(bench.scope, spec, Operands(query=added, key=added, value=added, past_key=heads))
    grown = append(bench.scope, spec, heads, added, lengths, sizes, op=op)
    assert (grown.layout, grown.heads, grown.dim) == (past, 3, 4)
    (found,) = bench.run(grown.value)
    return heads_of(found, grown)


@pytest.mark.parametrize("new", list(Layout))
@pytest.mark.parametrize("past", CACHES)
def test_new_tokens_come_after_the_past(past: Layout, new: Layout) -> None:
    found = _grown(Bench(), "concat", past, new)
    np.testing.assert_array_equal(found, np.concatenate([PAST, NEW], axis=2))


@pytest.mark.parametrize(
    ("opset", "op", "write"),
    [
        (24, True, "TensorScatter"),
        (24, False, "ScatterElements"),
        (23, True, "ScatterElements"),
        (13, True, "ScatterElements"),
    ],
)
@pytest.mark.parametrize("growth", ["static", "shared_buffer"])
@pytest.mark.parametrize("past", CACHES)
def test_new_tokens_end_at_the_length(
    past: Layout, growth: str, opset: int, op: bool, write: str
) -> None:
    bench = Bench(opset=opset)
    found = _grown(bench, growth, past, Layout.BSM, op)
    assert [name for name in bench.types if "Scatter" in name] == [write]
    expected = PAST.copy()
    expected[0, :, 0:2], expected[1, :, 4:6] = NEW[0], NEW[1]
    np.testing.assert_array_equal(found, expected)
