"""Specs and inputs of the tests of the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from mha_export.oracle import OracleInputs
from mha_export.spec import AttentionSpec, CausalAlignment

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT


def make_spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 6, **changes})


def draw(spec: AttentionSpec, b: int, s: int, n: int, **others: Any) -> OracleInputs:
    rng = np.random.default_rng(3)
    own = spec.value_source == "own"
    return OracleInputs(
        query=rng.normal(size=(b, spec.q_heads, s, spec.head_dim)),
        key=rng.normal(size=(b, spec.kv_heads, n, spec.head_dim)),
        value=rng.normal(size=(b, spec.kv_heads, n, spec.value_dim)) if own else None,
        **others,
    )
