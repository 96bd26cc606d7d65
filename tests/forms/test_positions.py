"""Where a query stands among the keys, for every way of telling."""

from __future__ import annotations

from typing import Any

import pytest

from mha_export.forms._positions import Offset, is_square, offset_of
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
LAYER = {"projections": ProjectionSpec(d_model=8)}


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 1, "kv_heads": 1, "head_dim": 8} | fields)


def _lengths(causal: CausalAlignment | None = None) -> MaskSpec:
    return MaskSpec(causal=causal, lengths=True, empty_row=EmptyRow.ZERO)


SQUARE = [
    # fields, whether queries and keys are of one length
    ({}, False),
    ({"q_len": "s", "kv_len": "s"}, True),
    ({"q_len": 4, "kv_len": 4}, True),
    ({"q_len": 4, "kv_len": 5}, False),
    ({"q_len": "s", "kv_len": "s", "cross": True}, False),
    ({"q_len": "s", "kv_len": "s", "cache": CacheSpec()}, False),
    ({"q_len": "s", "kv_len": "s", "cache": CacheSpec(growth="static")}, False),
    (LAYER, True),
    (LAYER | {"kv_source": "layer.0"}, False),
    (LAYER | {"cross": True}, False),
    (LAYER | {"q_len": 4}, False),
    (LAYER | {"kv_len": 4}, False),
    (LAYER | {"q_len": 4, "kv_len": 5}, False),
    ({"kv_source": "layer.0", "q_len": "s", "kv_len": "s"}, True),
]


@pytest.mark.parametrize(("fields", "square"), SQUARE)
def test_equal_lengths_are_told_by_names_numbers_or_one_input(
    fields: dict[str, Any], square: bool
) -> None:
    assert is_square(_spec(**fields)) is square


OFFSETS = [
    ({}, Offset.ZERO),
    ({"cross": True}, Offset.ZERO),
    ({"mask": MaskSpec(causal=TOP_LEFT)}, Offset.ZERO),
    ({"mask": MaskSpec(causal=BOTTOM_RIGHT)}, Offset.DIFFERENCE),
    ({"mask": MaskSpec(causal=BOTTOM_RIGHT), "q_len": "s", "kv_len": "s"}, Offset.ZERO),
    ({"mask": MaskSpec(causal=BOTTOM_RIGHT)} | LAYER, Offset.ZERO),
    ({"cache": CacheSpec()}, Offset.PAST),
    ({"cache": CacheSpec(), "mask": MaskSpec(causal=BOTTOM_RIGHT)}, Offset.PAST),
    ({"cache": CacheSpec(), "mask": MaskSpec(causal=TOP_LEFT)}, Offset.ZERO),
    ({"cache": CacheSpec(), "mask": _lengths()}, Offset.LENGTHS),
    ({"cache": CacheSpec(growth="static")}, Offset.LENGTHS),
    ({"cache": CacheSpec(growth="shared_buffer")}, Offset.LENGTHS),
    ({"mask": _lengths()}, Offset.LENGTHS),
    ({"mask": _lengths(BOTTOM_RIGHT)}, Offset.LENGTHS),
    ({"mask": _lengths(TOP_LEFT)}, Offset.ZERO),
]


@pytest.mark.parametrize(("fields", "offset"), OFFSETS)
def test_what_query_0_stands_at(fields: dict[str, Any], offset: Offset) -> None:
    assert offset_of(_spec(**fields)) is offset
