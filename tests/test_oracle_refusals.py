"""Inputs that do not fit their spec, which the oracle refuses by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle_specs import BOTTOM_RIGHT, TOP_LEFT, draw, make_spec

from mha_export.errors import InputError
from mha_export.oracle import RotaryInputs, attention, inverse_frequencies
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    RotaryScaling,
    RotarySpec,
)

BATCH = {"b": 1, "s": 2, "n": 3}


@pytest.mark.parametrize(
    ("spec", "others", "words"),
    [
        (make_spec(sinks=True), {}, "sinks is missing"),
        (make_spec(), {"sinks": np.zeros(4)}, "sinks is given"),
        (make_spec(), {"value": None}, "value is missing"),
        (make_spec(), {"query": np.zeros((1, 3, 2, 6))}, r"query has shape \[1, 3, 2, 6\]"),
        (
            make_spec(),
            {"query": np.zeros((1, 2, 6))},
            r"query has shape \[1, 2, 6\]; expected \[any, 4, any, 6\]",
        ),
        (make_spec(), {"key": np.zeros((2, 2, 3, 6))}, "key has shape"),
        (make_spec(), {"value": np.zeros((1, 2, 3, 5))}, "value has shape"),
        (make_spec(cache=CacheSpec()), {}, "past_key is missing"),
        (
            make_spec(cache=CacheSpec()),
            {"past_key": np.zeros((1, 2, 1, 6)), "past_value": np.zeros((1, 2, 2, 6))},
            "past_value has shape",
        ),
        (
            make_spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
            {"kv_lengths": np.array([4])},
            "beyond the 3 keys",
        ),
        (
            make_spec(cache=CacheSpec(growth="static")),
            {
                "past_key": np.zeros((1, 2, 6, 6)),
                "past_value": np.zeros((1, 2, 6, 6)),
                "kv_lengths": np.array([2]),
            },
            "below the 3 new tokens",
        ),
        (
            make_spec(mask=MaskSpec(keep=("k",), empty_row=EmptyRow.ZERO)),
            {"keep": np.ones(4, bool)},
            "keep has shape",
        ),
        (make_spec(mask=MaskSpec(bias=("q", "k"))), {"bias": np.zeros((5, 3))}, "bias has shape"),
        (
            make_spec(mask=MaskSpec(bias=("q", "k"))),
            {"bias": np.zeros((1, 1, 1, 2, 3))},
            "bias has shape",
        ),
        (
            make_spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
            {"kv_lengths": np.array([1, 1])},
            r"kv_lengths has shape \[2\]",
        ),
        (
            make_spec(mask=MaskSpec(documents=True, causal=TOP_LEFT)),
            {"query": np.zeros((1, 4, 4, 6)), "document_ids": np.zeros((1, 3), int)},
            r"document_ids know 3 positions; a query stands at 0\.\.3",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(sin=np.zeros((1, 2, 2)))},
            "rotary.cos and rotary.sin are needed",
        ),
        (
            make_spec(mask=MaskSpec(documents=True, causal=BOTTOM_RIGHT)),
            {"query": np.zeros((1, 4, 4, 6)), "document_ids": np.zeros((1, 3), int)},
            "document_ids know 3 positions",
        ),
        (make_spec(), {"rotary": RotaryInputs()}, "rotary is given"),
        (make_spec(rotary=RotarySpec(dim=4)), {}, "rotary.cos and rotary.sin are needed"),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 2)))},
            "theta states them already",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0, positions="input")),
            {},
            "position_ids is missing",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0)),
            {"rotary": RotaryInputs(position_ids=np.zeros((1, 2), int))},
            "position_ids is given",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 3)), sin=np.zeros((1, 2, 3)))},
            r"shape \[1, 2, 3\]",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 2)), sin=np.zeros((1, 2, 2)))},
            "do not fit the keys",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {
                "rotary": RotaryInputs(
                    cos=np.zeros((1, 2, 2)), sin=np.zeros((1, 2, 2)), key_cos=np.zeros((1, 3, 2))
                )
            },
            "key_sin is missing",
        ),
        (
            make_spec(qk_norm=QkNormSpec(kind="rms")),
            {"q_norm_weight": np.ones(5), "k_norm_weight": np.ones(6)},
            r"qk-norm weight has shape \[5\]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_fit_the_spec(
    spec: AttentionSpec, others: dict[str, Any], words: str
) -> None:
    inputs = draw(spec, **BATCH).replace(**others)
    with pytest.raises(InputError, match=words):
        attention(spec, inputs)


def test_cross_attention_counts_the_keys_positions_from_zero() -> None:
    spec = make_spec(cross=True, rotary=RotarySpec(dim=6, theta=9.0))
    inputs = draw(spec, 1, 3, 3)
    same = make_spec(rotary=RotarySpec(dim=6, theta=9.0))
    np.testing.assert_allclose(attention(spec, inputs).output, attention(same, inputs).output)


@pytest.mark.parametrize(
    ("rotary", "words"),
    [
        (RotarySpec(dim=4), "theta is not stated"),
        (RotarySpec(dim=2, theta=9.0, scaling=RotaryScaling(kind="ntk", factor=2.0)), "above 2"),
    ],
)
def test_frequencies_that_do_not_exist(rotary: RotarySpec, words: str) -> None:
    with pytest.raises(InputError, match=words):
        inverse_frequencies(rotary)
