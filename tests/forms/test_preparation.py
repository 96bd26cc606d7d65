"""What comes before the product: in which order, and what is left out where the op does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._layout import Sizes
from mha_export.forms._prepare import Prepared, finished, mean_of_heads, prepare
from mha_export.operands import Heads, Layout, Operands, RotaryTables
from mha_export.oracle import OracleInputs, RotaryInputs, attention
from mha_export.spec import AttentionSpec, CacheSpec, QkNormSpec, RotarySpec

B, S, PAST, D, E = 3, 2, 4, 8, 6
RNG = np.random.default_rng(13)
RMS = QkNormSpec(kind="rms", epsilon=0.1)


class Ready:
    """``prepare`` on given operands, and the oracle's queries and keys for the same."""

    def __init__(
        self, *, after_cache: bool = False, rotates: bool = True, grows: bool = True, **fields: Any
    ) -> None:
        stated = {"q_heads": 4, "kv_heads": 2, "head_dim": D, "v_head_dim": E} | fields
        self.spec = spec = AttentionSpec(**stated)
        self.bench = bench = Bench()
        self.arrays: dict[str, np.ndarray] = {
            "query": RNG.standard_normal((B, 4, S, D)),
            "key": RNG.standard_normal((B, 2, S, D)),
        }
        own = spec.value_source == "own"
        if own:
            self.arrays["value"] = RNG.standard_normal((B, 2, S, E))
        if spec.cache is not None:
            self.arrays["past_key"] = RNG.standard_normal((B, 2, PAST, D))
            if own:
                self.arrays["past_value"] = RNG.standard_normal((B, 2, PAST, E))
        named: dict[str, Any] = {
            name: bench.heads(
                name,
                array.astype(np.float32),
                Layout.BSM if name in ("query", "key", "value") else Layout.BHSD,
            )
            for name, array in self.arrays.items()
        }
        named.setdefault("value", named["key"])
        if spec.qk_norm is not None:
            for name in ("q_norm_weight", "k_norm_weight"):
                self.arrays[name] = RNG.standard_normal(D)
                named[name] = bench.value(name, self.arrays[name].astype(np.float32))
        self.tables: dict[str, np.ndarray] = {}
        if spec.rotary is not None:
            lengths = {"cos": S, "sin": S} | (
                {"key_cos": S + PAST, "key_sin": S + PAST} if after_cache else {}
            )
            self.tables = {
                name: RNG.standard_normal((1, length, spec.rotary.dim // 2))
                for name, length in lengths.items()
            }
            named["rotary"] = RotaryTables(
                **{name: bench.value(name, t.astype(np.float32)) for name, t in self.tables.items()}
            )
        operands = Operands(**named)
        sizes = Sizes(bench.scope, spec, operands)
        self.ready: Prepared = prepare(
            bench.scope, spec, operands, sizes, ops=False, rotary=rotates, cache=grows
        )

    def found(self, name: str) -> np.ndarray:
        heads = getattr(self.ready, name)
        return heads_of(self.bench.run(heads.value)[0], heads)

    def scores(self) -> np.ndarray:
        """Q Kᵀ of what was prepared."""
        query, key = self.found("query"), np.repeat(self.found("key"), 2, axis=1)
        return query @ key.swapaxes(2, 3)

    def exact(self) -> Any:
        rotary = RotaryInputs(**self.tables) if self.tables else None
        spec = self.spec.replace(scale=1.0)
        return attention(spec, OracleInputs(**self.arrays, rotary=rotary))


TURNED = {"rotary": RotarySpec(dim=D)}
QUERY_TURNED = {"rotary": RotarySpec(dim=D, key=False)}
CACHE = {"cache": CacheSpec()}
PREFIX = {"value_source": "key_prefix"}
CASES: dict[str, dict[str, Any]] = {
    "bare": {},
    "norm": {"qk_norm": RMS},
    "norm-of-queries": {"qk_norm": QkNormSpec(kind="rms", epsilon=0.1, key=False)},
    "rotary": TURNED,
    "rotary-of-queries": QUERY_TURNED,
    "norm-then-rotary": {"qk_norm": RMS} | TURNED,
    "cache": CACHE,
    "cache-of-rotated-keys": CACHE | TURNED,
    "cache-of-other-keys": CACHE | TURNED | {"after_cache": True},
    "cache-beside-rotated-queries": CACHE | QUERY_TURNED | {"after_cache": True},
    "prefix": PREFIX,
    "prefix-of-cached-keys": PREFIX | CACHE | TURNED,
    "prefix-of-keys-rotated-later": PREFIX | CACHE | TURNED | {"after_cache": True},
    "prefix-whole": PREFIX | {"v_head_dim": D},
}


def _norm_weights(ready: Ready) -> None:
    if ready.spec.qk_norm is not None and not ready.spec.qk_norm.key:
        del ready.arrays["k_norm_weight"]


@pytest.mark.parametrize("name", CASES)
def test_queries_keys_and_values_are_ready(name: str) -> None:
    ready = Ready(**CASES[name])
    _norm_weights(ready)
    exact = ready.exact()
    np.testing.assert_allclose(ready.scores(), exact.raw, rtol=1e-4, atol=1e-5)
    value = np.repeat(ready.found("value"), 2, axis=1)
    np.testing.assert_allclose(exact.probabilities @ value, exact.output, rtol=1e-4, atol=1e-5)
    grows = ready.spec.cache is not None
    assert (ready.ready.present_key is not None) is grows
    assert (ready.ready.present_value is not None) is (grows and "value" in ready.arrays)
    if grows:
        np.testing.assert_allclose(
            ready.found("present_key"), exact.present_key, rtol=1e-5, atol=1e-6
        )


def test_a_prefix_that_is_the_whole_key_is_the_key() -> None:
    ready = Ready(**CASES["prefix-whole"]).ready
    assert ready.value is ready.key
    assert Ready(**CASES["prefix"]).bench.types.count("Slice") == 1


def test_what_the_op_does_is_left_to_it() -> None:
    ready = Ready(**CACHE, **TURNED, rotates=False, grows=False)
    assert ready.bench.types == []
    assert ready.ready.present_key is ready.ready.present_value is None
    np.testing.assert_allclose(ready.found("key"), ready.arrays["key"], rtol=1e-6)


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("layout", list(Layout))
def test_the_mean_of_heads_is_one_head(layout: Layout, opset: int) -> None:
    bench = Bench(opset=opset)
    x = RNG.standard_normal((B, 4, S, E)).astype(np.float32)
    heads = bench.heads("x", x, layout)
    mean = mean_of_heads(bench.scope, heads)
    assert (mean.layout, mean.heads, mean.dim) == (Layout.BSM, 1, E)
    np.testing.assert_allclose(bench.run(mean.value)[0], x.mean(axis=1), rtol=1e-5, atol=1e-6)
    assert _finished(bench, heads, "concat") is heads
    assert _finished(bench, heads, "mean").heads == 1


def _finished(bench: Bench, heads: Heads, combine: Any) -> Heads:
    spec = AttentionSpec(q_heads=4, kv_heads=4, head_dim=E, combine=combine)
    return finished(bench.scope, spec, heads)
