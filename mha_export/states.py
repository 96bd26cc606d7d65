"""Words of the contract that layers share which may not know each other."""

from __future__ import annotations

from typing import Literal

CapabilityState = Literal[
    "ok",
    "imprecise",
    "wrong",
    "fallback",
    "unsupported-at-load",
    "unsupported-at-run",
    "crash",
    "not-probed",
]
"""What a target made of one form with one feature in one element type."""
