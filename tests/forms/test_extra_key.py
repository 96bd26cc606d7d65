"""A sink as one more key: of zeros, with the sink as its bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._layout import Sizes
from mha_export.forms._sink import with_extra_key, with_sink_column
from mha_export.operands import Layout, Operands
from mha_export.spec import AttentionSpec

RNG = np.random.default_rng(9)
SINKS = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_key_of_zeros_comes_last(layout: Layout) -> None:
    bench = Bench()
    keys = RNG.standard_normal((3, 2, 5, 6)).astype(np.float32)
    longer = with_extra_key(bench.scope, bench.heads("key", keys, layout))
    assert (longer.layout, longer.heads, longer.dim) == (Layout.BHSD, 2, 6)
    found = heads_of(bench.run(longer.value)[0], longer)
    np.testing.assert_array_equal(found[:, :, :5], keys)
    np.testing.assert_array_equal(found[:, :, 5:], np.zeros((3, 2, 1, 6)))


SHAPES = {
    "none": None,
    "keys": (1, 1, 1, 7),
    "pairs": (1, 1, 5, 7),
    "rows": (3, 1, 1, 7),
    "heads": (1, 4, 5, 7),
    "all": (3, 4, 5, 7),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_sink_is_the_bias_of_the_last_column(name: str) -> None:
    bench = Bench()
    spec = AttentionSpec(q_heads=4, kv_heads=2, head_dim=6, sinks=True)
    sizes = {"query": (4, 5), "key": (2, 7), "value": (2, 7)}
    named: dict[str, Any] = {
        operand: bench.heads(operand, np.zeros((3, heads, length, 6), np.float32))
        for operand, (heads, length) in sizes.items()
    }
    operands = Operands(**named)
    shape = SHAPES[name]
    array = None if shape is None else RNG.standard_normal(shape).astype(np.float32)
    additive = None if array is None else bench.value("additive", array)
    both = with_sink_column(
        bench.scope,
        spec,
        Sizes(bench.scope, spec, operands),
        additive,
        bench.value("sinks", SINKS),
    )
    (found,) = bench.run(both)
    batch = 1 if shape is None else shape[0]
    assert found.shape == (batch, 4, 5, 8), "expanded by heads and queries, not by batch"
    expected = np.zeros(()) if array is None else array
    np.testing.assert_array_equal(found[..., :7], np.broadcast_to(expected, (batch, 4, 5, 7)))
    column = np.broadcast_to(SINKS[None, :, None], (batch, 4, 5))
    np.testing.assert_array_equal(found[..., 7], column)
