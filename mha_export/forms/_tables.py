"""Rotary tables of a canonical graph, from the theta and scaling a spec states.

Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); the Llama 3.1 reference code. The emitter's
own code: the oracle has another, so that an error in one cannot hide in both.
"""

from __future__ import annotations

import math

import numpy as np

from mha_export.forms._layout import numpy_dtype
from mha_export.spec import DType, RotaryScaling, RotarySpec

DEFAULT_POSITIONS = 4096
"""Rows of a table where the spec states no ``max_positions``."""


def cache_tables(rotary: RotarySpec, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine [max_positions, r/2], computed in float64 and rounded once."""
    rows = rotary.max_positions or DEFAULT_POSITIONS
    angle = np.outer(np.arange(rows), _frequencies(rotary))
    amplitude = _amplitude(rotary.scaling)
    target = numpy_dtype(dtype)
    return (amplitude * np.cos(angle)).astype(target), (amplitude * np.sin(angle)).astype(target)


def _amplitude(scaling: RotaryScaling | None) -> float:
    """YaRN's attention factor on cosine and sine; 1 for the others."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _frequencies(rotary: RotarySpec) -> np.ndarray:
    """Radians a position turns each pair [r/2]: ``theta ** (-2 i / r)``, stretched."""
    assert rotary.theta is not None
    r, scaling = rotary.dim, rotary.scaling
    theta = rotary.theta
    if scaling is not None and scaling.kind == "ntk":
        theta *= scaling.factor ** (r / max(r - 2, 1))
    plain = np.array([theta ** (-2.0 * pair / r) for pair in range(r // 2)])
    if scaling is None or scaling.kind == "ntk":
        return plain
    if scaling.kind == "linear":
        stretched: np.ndarray = plain / scaling.factor
        return stretched
    share = _kept_share(rotary, scaling, plain)
    mixed: np.ndarray = share * plain + (1.0 - share) * plain / scaling.factor
    return mixed


def _kept_share(rotary: RotarySpec, scaling: RotaryScaling, plain: np.ndarray) -> np.ndarray:
    """How much of each frequency is kept as trained [r/2], between 0 and 1."""
    trained = scaling.original_max_positions
    assert trained is not None
    if scaling.kind == "llama3":
        turns = trained * plain / (2.0 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept: np.ndarray = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept
    first, last = (
        _pair_turning(rotary, trained, turns) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    if first == last:
        last += 0.001
    ramp: np.ndarray = np.clip((np.arange(rotary.dim // 2) - first) / (last - first), 0.0, 1.0)
    return 1.0 - ramp


def _pair_turning(rotary: RotarySpec, trained: int, turns: float) -> float:
    """The (fractional) pair that turns ``turns`` times within the trained length."""
    assert rotary.theta is not None
    return rotary.dim * math.log(trained / (2.0 * math.pi * turns)) / (2.0 * math.log(rotary.theta))
