"""Normalisation of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QkNormSpec:
    """Normalisation of queries and keys before rotary.

    rms: ``x / sqrt(mean(x^2) + epsilon) * w``; layer: ``(x - mean) / sqrt(var + epsilon) * w + b``;
    l2: ``x / max(|x|, epsilon)`` (times w). ``over`` head: each head alone, w and b [d]; hidden:
    all heads together, w and b [h*d] and [k*d]. ``key`` false: only queries are normalised (the
    keys are another site's, normalised there).
    """

    kind: Literal["rms", "layer", "l2"]
    epsilon: float = 1e-6
    over: Literal["head", "hidden"] = "head"
    weight: bool = True
    bias: bool = False
    key: bool = True
