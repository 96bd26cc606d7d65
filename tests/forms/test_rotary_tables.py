"""Rotary tables of a canonical graph: the oracle's at every way of stretching, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mha_export.forms._tables import DEFAULT_POSITIONS, cache_tables
from mha_export.oracle import rotary_tables
from mha_export.spec import DType, RotaryScaling, RotarySpec


def _rotary(dim: int = 16, **scaling: Any) -> RotarySpec:
    stretched = RotaryScaling(**{"original_max_positions": 64} | scaling) if scaling else None
    return RotarySpec(dim=dim, theta=1e4, max_positions=40, scaling=stretched)


YARN: dict[str, Any] = {"kind": "yarn", "factor": 4.0}
STRETCHED = {
    "plain": _rotary(),
    "one-pair": _rotary(dim=2),
    "linear": _rotary(kind="linear", factor=4.0),
    "ntk": _rotary(kind="ntk", factor=4.0),
    "ntk-two-pairs": _rotary(dim=4, kind="ntk", factor=4.0),
    "llama3": _rotary(kind="llama3", factor=8.0),
    "llama3-long": _rotary(kind="llama3", factor=8.0, original_max_positions=8192),
    "llama3-narrow": _rotary(kind="llama3", factor=3.0, low_freq_factor=2.0, high_freq_factor=2.5),
    "yarn": _rotary(**YARN),
    "yarn-long": _rotary(dim=64, **YARN, original_max_positions=4096),
    "yarn-not-truncated": _rotary(**YARN, truncate=False),
    "yarn-from-below-channel-0": _rotary(**YARN, beta_fast=1e3, truncate=False),
    "yarn-beyond-the-last-channel": _rotary(**YARN, beta_slow=1e-9),
    "yarn-in-one-step": _rotary(**YARN, beta_fast=2.0, beta_slow=2.0, truncate=False),
    "yarn-factor-stated": _rotary(**YARN, attention_factor=1.25),
    "yarn-not-stretched": _rotary(kind="yarn", factor=1.0),
    "yarn-shrunk": _rotary(kind="yarn", factor=0.5),
    "yarn-a-little": _rotary(kind="yarn", factor=1.5),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_the_tables_are_the_oracle_s(name: str) -> None:
    rotary = STRETCHED[name]
    cos, sin = cache_tables(rotary, DType.FP64)
    exact_cos, exact_sin = rotary_tables(rotary, np.arange(40))
    assert cos.shape == sin.shape == (40, rotary.dim // 2)
    np.testing.assert_allclose(cos, exact_cos, rtol=0, atol=1e-12)
    np.testing.assert_allclose(sin, exact_sin, rtol=0, atol=1e-12)


def test_a_pair_turns_theta_to_the_power_of_its_share() -> None:
    """theta 1e4 and four pairs: 1, 1/10, 1/100 and 1/1000 radians a position."""
    cos, sin = cache_tables(RotarySpec(dim=8, theta=1e4, max_positions=3), DType.FP64)
    angle = np.array([0, 1, 2])[:, None] * np.array([1.0, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-15)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-15)


@pytest.mark.parametrize(("factor", "amplitude"), [(0.5, 1.0), (1.0, 1.0), (math.e, 1.1)])
def test_yarn_is_louder_by_the_logarithm_of_its_factor(factor: float, amplitude: float) -> None:
    cos, sin = cache_tables(_rotary(kind="yarn", factor=factor), DType.FP64)
    np.testing.assert_allclose(np.hypot(cos, sin), amplitude, rtol=1e-12)


def test_only_yarn_is_louder() -> None:
    for name, rotary in STRETCHED.items():
        cos, sin = cache_tables(rotary, DType.FP64)
        assert name.startswith("yarn") or np.allclose(np.hypot(cos, sin), 1.0, rtol=1e-12)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16], ids=lambda d: d.value)
def test_tables_are_rounded_once(dtype: DType) -> None:
    rotary = STRETCHED["yarn"]
    for narrow, exact in zip(
        cache_tables(rotary, dtype), cache_tables(rotary, DType.FP64), strict=True
    ):
        np.testing.assert_array_equal(narrow, exact.astype(narrow.dtype))


def test_a_spec_that_states_no_length_gets_the_default() -> None:
    stated, open_ = (RotarySpec(dim=2, theta=1e4, max_positions=n) for n in (7, None))
    assert len(cache_tables(stated, DType.FP32)[0]) == 7
    assert len(cache_tables(open_, DType.FP32)[0]) == DEFAULT_POSITIONS
