"""Who sees whom in the oracle, and what a row without keys gets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from oracle_specs import BOTTOM_RIGHT, TOP_LEFT, draw, make_spec

from mha_export.oracle import OracleInputs, OracleResult, attention, hidden_pairs
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    DType,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    QkOutput,
    RotarySpec,
)

RNG = np.random.default_rng(7)


def seen(spec: AttentionSpec, s: int, t: int, b: int = 1, **others: Any) -> list[str]:
    """The rows of batch row 0 and head 0 as text, # where the pair takes part."""
    hidden = hidden_pairs(spec, draw(spec, b, s, t, **others))
    return ["".join(".#"[int(not x)] for x in row) for row in hidden[0, 0]]


def test_the_two_alignments() -> None:
    assert seen(make_spec(mask=MaskSpec(causal=TOP_LEFT)), 2, 4) == ["#...", "##.."]
    assert seen(make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT)), 2, 4) == ["###.", "####"]


def cached(p: int) -> dict[str, Any]:
    return {"past_key": np.zeros((1, 2, p, 6)), "past_value": np.zeros((1, 2, p, 6))}


@pytest.mark.parametrize(
    ("mask", "cache", "s", "n", "others", "rows"),
    [
        pytest.param(
            {"left_window": 1, "right_window": 0},
            None,
            3,
            4,
            {},
            ["#...", "##..", ".##."],
            id="none",
        ),
        pytest.param({"left_window": 1}, None, 2, 4, {}, ["####", "####"], id="left alone"),
        pytest.param({"left_window": 1}, "concat", 2, 2, cached(3), ["..###", "...##"], id="past"),
        pytest.param(
            {"causal": BOTTOM_RIGHT}, "concat", 3, 2, cached(2), ["###.", "####", "####"], id="odd"
        ),
        pytest.param(
            {"causal": TOP_LEFT}, "concat", 2, 2, cached(2), ["#...", "##.."], id="top-left past"
        ),
        pytest.param(
            {"causal": TOP_LEFT, "left_window": 0}, None, 2, 3, {}, ["#..", ".#."], id="diagonal"
        ),
        pytest.param(
            {"causal": BOTTOM_RIGHT, "left_window": 1}, None, 2, 4, {}, [".##.", "..##"], id="shift"
        ),
        pytest.param(
            {"lengths": True, "causal": BOTTOM_RIGHT, "empty_row": EmptyRow.ZERO},
            None,
            2,
            5,
            {"kv_lengths": np.array([3])},
            ["##...", "###.."],
            id="lengths",
        ),
        pytest.param(
            {"lengths": True, "causal": BOTTOM_RIGHT, "empty_row": EmptyRow.ZERO},
            None,
            3,
            4,
            {"kv_lengths": np.array([1])},
            ["....", "....", "#..."],
            id="fewer keys than queries",
        ),
        pytest.param(
            {"lengths": True, "causal": TOP_LEFT, "empty_row": EmptyRow.ZERO},
            None,
            3,
            4,
            {"kv_lengths": np.array([2])},
            ["#...", "##..", "##.."],
            id="lengths top-left",
        ),
        pytest.param(
            {"right_window": 1}, None, 3, 4, {}, ["##..", "###.", "####"], id="right window"
        ),
        pytest.param(
            {"causal": TOP_LEFT, "prefix": True},
            None,
            4,
            4,
            {"prefix_lengths": np.array([2])},
            ["##..", "##..", "###.", "####"],
            id="prefix",
        ),
        pytest.param(
            {"causal": TOP_LEFT, "prefix": True, "left_window": 1},
            None,
            4,
            4,
            {"prefix_lengths": np.array([2])},
            ["##..", "##..", ".##.", "..##"],
            id="prefix leaves the window",
        ),
        pytest.param({"block": 2}, None, 4, 4, {}, ["##..", "##..", "..##", "..##"], id="block"),
        pytest.param({"block": 3}, "concat", 2, 2, cached(2), ["###.", "...#"], id="block past"),
        pytest.param(
            {"documents": True},
            None,
            4,
            4,
            {"document_ids": np.array([[0, 1, 1, 0]])},
            ["#..#", ".##.", ".##.", "#..#"],
            id="documents",
        ),
        pytest.param(
            {"padding": True, "empty_row": EmptyRow.ZERO},
            None,
            1,
            5,
            {"key_padding": np.array([[0, 1, 0, 2, 1]])},
            [".#.##"],
            id="holes",
        ),
        pytest.param(
            {"keep": ("k",), "empty_row": EmptyRow.ZERO},
            None,
            2,
            4,
            {"keep": np.array([True, False])},
            ["#...", "#..."],
            id="short keep",
        ),
        pytest.param(
            {"keep": (1,), "empty_row": EmptyRow.ZERO},
            None,
            1,
            3,
            {"keep": np.array([True])},
            ["#.."],
            id="one key, not all",
        ),
        pytest.param(
            {"bias": ("q", "k")},
            None,
            2,
            3,
            {"bias": np.zeros((2, 2))},
            ["##.", "##."],
            id="short bias",
        ),
        pytest.param(
            {"bias": ("q", "k")},
            None,
            1,
            3,
            {"bias": np.array([[0.0, -np.inf, 0.0]])},
            ["###"],
            id="-inf is no rule",
        ),
    ],
)
def test_who_sees_whom(
    mask: dict[str, Any],
    cache: str | None,
    s: int,
    n: int,
    others: dict[str, Any],
    rows: list[str],
) -> None:
    spec = make_spec(
        mask=MaskSpec(**mask), cache=None if cache is None else CacheSpec(growth=cache)
    )
    assert seen(spec, s, n, **others) == rows


def test_a_static_cache_is_written_at_its_length_and_masked_beyond() -> None:
    for growth in ("static", "shared_buffer"):
        spec = make_spec(cache=CacheSpec(growth=growth), mask=MaskSpec(causal=BOTTOM_RIGHT))
        buffer = np.full((2, 2, 6, 6), 7.0)
        inputs = draw(
            spec, 2, 2, 2, past_key=buffer, past_value=buffer, kv_lengths=np.array([3, 6])
        )
        result = attention(spec, inputs)
        expected = buffer.copy()
        expected[0, :, 1:3], expected[1, :, 4:6] = inputs.key[0], inputs.key[1]
        np.testing.assert_array_equal(result.present_key, expected)
        np.testing.assert_array_equal(buffer, 7.0)
        assert result.hidden is not None
        assert result.hidden[0, 0].astype(int).tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
        assert result.hidden[1, 0].astype(int).tolist() == [[0, 0, 0, 0, 0, 1], [0] * 6]


def test_decoding_step_by_step_is_the_prefill() -> None:
    spec = make_spec(
        cache=CacheSpec(),
        mask=MaskSpec(causal=BOTTOM_RIGHT, left_window=3),
        rotary=RotarySpec(dim=6, theta=20.0),
        qk_norm=QkNormSpec(kind="rms"),
    )
    weights = {name: RNG.normal(size=6) for name in ("q_norm_weight", "k_norm_weight")}
    none = np.zeros((2, 2, 0, 6))
    whole = draw(spec, 2, 6, 6, past_key=none, past_value=none, **weights)
    expected = attention(spec, whole)
    past_key = past_value = none
    for at in range(6):
        step = slice(at, at + 1)
        result = attention(
            spec,
            OracleInputs(
                query=whole.query[:, :, step],
                key=whole.key[:, :, step],
                value=whole.value[:, :, step],  # type: ignore[index]
                past_key=past_key,
                past_value=past_value,
                **weights,
            ),
        )
        past_key, past_value = result.present_key, result.present_value
        np.testing.assert_allclose(result.output, expected.output[:, :, step], atol=1e-13)


def test_alibi_is_relative_to_the_query() -> None:
    slopes = (0.5, 0.25, 0.125, 1.0)
    spec = make_spec(scale=0.0, mask=MaskSpec(alibi_slopes=slopes), cache=CacheSpec())
    result = attention(spec, draw(spec, 1, 2, 2, **cached(1)))
    assert result.masked is not None
    np.testing.assert_allclose(result.masked[0, 0], [[-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]])
    np.testing.assert_allclose(result.masked[0, 3, 1], [-2.0, -1.0, 0.0])


def test_alibi_and_bias_add_up() -> None:
    bias = RNG.normal(size=(3, 3))
    both = make_spec(scale=0.0, mask=MaskSpec(alibi_slopes=(1.0,) * 4, bias=("q", "k")))
    result = attention(both, draw(both, 1, 3, 3, bias=bias))
    assert result.masked is not None
    distance = np.arange(3) - np.arange(3)[:, None]
    np.testing.assert_allclose(result.masked[0, 2], bias + distance)


def one_empty_row(fill: Any, policy: EmptyRow, **changes: Any) -> OracleResult:
    mask = MaskSpec(keep=("q", "k"), fill=fill, empty_row=policy)
    spec = make_spec(mask=mask, **changes)
    keep = np.array([[False, False, False], [True, False, True]])
    return attention(spec, draw(spec, 1, 2, 3, keep=keep))


@pytest.mark.parametrize(
    ("fill", "policy", "row"),
    [
        ("-inf", EmptyRow.ZERO, [0.0] * 3),
        ("-inf", EmptyRow.NAN, [math.nan] * 3),
        ("-inf", EmptyRow.UNIFORM, [1 / 3] * 3),
        ("-inf", EmptyRow.FINITE, [math.nan] * 3),
        ("min", EmptyRow.UNIFORM, [1 / 3] * 3),
        ("min", EmptyRow.FINITE, [1 / 3] * 3),
        ("min", EmptyRow.ZERO, [0.0] * 3),
        (-1e9, EmptyRow.ZERO, [0.0] * 3),
        (-1e9, EmptyRow.UNIFORM, [1 / 3] * 3),
    ],
)
def test_what_a_row_without_keys_gets(fill: Any, policy: EmptyRow, row: list[float]) -> None:
    result = one_empty_row(fill, policy)
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities[0, :, 0], [row] * 4)
    assert result.empty_rows.tolist() == [[[True, False]] * 4]
    assert result.probabilities[0, :, 1, 1].tolist() == [0.0] * 4


def test_a_finite_fill_is_added_and_can_be_outbid() -> None:
    result = one_empty_row(-10.0, EmptyRow.FINITE, scale=1.0)
    assert result.raw is not None
    assert result.masked is not None
    assert result.probabilities is not None
    np.testing.assert_allclose(result.masked[0, 0, 0], result.raw[0, 0, 0] - 10.0)
    expected = np.exp(result.raw[0, 0, 0]) / np.exp(result.raw[0, 0, 0]).sum()
    np.testing.assert_allclose(result.probabilities[0, 0, 0], expected)
    assert result.probabilities[0, 0, 1, 1] > 0


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (DType.FP16, -65504.0),
        (DType.FP32, float(np.finfo(np.float32).min)),
        (DType.BF16, -3.3895313892515355e38),
        (DType.FP64, float(np.finfo(np.float64).min)),
    ],
)
def test_min_is_the_least_number_of_the_io_dtype(dtype: DType, least: float) -> None:
    result = one_empty_row("min", EmptyRow.UNIFORM, io_dtype=dtype)
    assert result.scores(QkOutput.MASKED)[0, 0, 1, 1] == least


def test_biases_of_minus_infinity_empty_a_row_too() -> None:
    spec = make_spec(mask=MaskSpec(bias=("q", "k"), empty_row=EmptyRow.ZERO))
    bias = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    result = attention(spec, draw(spec, 1, 2, 2, bias=bias))
    assert result.empty_rows[0, 0].tolist() == [True, False]
    assert not result.output[:, :, 0].any()


def test_the_mean_of_one_hidden_key_is_that_key() -> None:
    spec = make_spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.UNIFORM))
    inputs = draw(spec, 1, 2, 1, key_padding=np.zeros((1, 1), int))
    result = attention(spec, inputs)
    assert result.probabilities is not None
    assert (result.probabilities == 1.0).all()


def test_no_keys_at_all() -> None:
    spec = make_spec(mask=MaskSpec(empty_row=EmptyRow.UNIFORM))
    result = attention(spec, draw(spec, 1, 2, 0))
    assert not result.output.any()
    assert result.empty_rows.all()
