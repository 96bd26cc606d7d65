"""Shapes that the oracle refuses, operand by operand, and the nearest that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.oracle import OracleInputs, SideInputs, attention
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
)

B, H, K, D, E, S, N, P = 2, 4, 2, 6, 5, 3, 3, 4
T = P + N
RNG = np.random.default_rng(9)
MASK: dict[str, Any] = {
    "causal": CausalAlignment.BOTTOM_RIGHT,
    "keep": ("batch", 1, "q_len", "kv_len"),
    "bias": ("q_len", "kv_len"),
    "padding": True,
    "prefix": True,
    "documents": True,
    "empty_row": EmptyRow.ZERO,
}
SPEC = AttentionSpec(
    q_heads=H,
    kv_heads=K,
    head_dim=D,
    v_head_dim=E,
    mask=MaskSpec(**MASK),
    cache=CacheSpec(),
    qk_norm=QkNormSpec(kind="rms", bias=True),
    sinks=True,
)
ARRAYS: dict[str, tuple[int, ...]] = {
    "query": (B, H, S, D),
    "key": (B, K, N, D),
    "value": (B, K, N, E),
    "past_key": (B, K, P, D),
    "past_value": (B, K, P, E),
    "keep": (B, 1, S, T),
    "bias": (S, T),
    "key_padding": (B, T),
    "prefix_lengths": (B,),
    "document_ids": (B, T),
    "sinks": (H,),
    "q_norm_weight": (D,),
    "k_norm_weight": (D,),
    "q_norm_bias": (D,),
    "k_norm_bias": (D,),
}


def _inputs(**changes: Any) -> OracleInputs:
    arrays = {name: RNG.normal(size=shape) for name, shape in ARRAYS.items()}
    arrays |= {
        name: np.ones(ARRAYS[name], np.int64)
        for name in ("keep", "key_padding", "prefix_lengths", "document_ids")
    }
    return OracleInputs(**arrays | changes)


def test_what_fits_is_taken() -> None:
    result = attention(SPEC, _inputs())
    assert result.output.shape == (B, H, S, E)
    assert result.present_key.shape == (B, K, T, D)
    assert result.present_value is not None
    assert result.present_value.shape == (B, K, T, E)


AXES = [(name, axis) for name, shape in ARRAYS.items() for axis in range(len(shape))]
FREE = {("query", 2), ("key", 2), ("value", 2), ("past_key", 2), ("past_value", 2)}
"""Lengths: another one is another attention, which some other operand does not fit."""


@pytest.mark.parametrize(("name", "axis"), [pair for pair in AXES if pair not in FREE])
def test_an_axis_that_is_one_too_long_is_refused(name: str, axis: int) -> None:
    shape = list(ARRAYS[name])
    shape[axis] += 1
    array = np.ones(shape, np.int64)
    words = "qk-norm (weight|bias)" if "norm" in name else f"operand {name}"
    # The batch is the queries': with one more of them it is the keys that do not fit.
    words = "operand key" if (name, axis) == ("query", 0) else words
    with pytest.raises(InputError, match=rf"{words} has shape"):
        attention(SPEC, _inputs(**{name: array}))


@pytest.mark.parametrize("name", ARRAYS)
def test_another_rank_is_refused(name: str) -> None:
    if name in ("keep", "bias"):
        shape = (1,) * (5 - len(ARRAYS[name])) + ARRAYS[name]
    else:
        shape = (*ARRAYS[name], 1)
    with pytest.raises(InputError, match="has shape"):
        attention(SPEC, _inputs(**{name: np.ones(shape, np.int64)}))


@pytest.mark.parametrize("name", ARRAYS)
def test_an_operand_that_is_stated_is_needed(name: str) -> None:
    if name in ("query", "key"):
        return
    with pytest.raises(InputError, match=f"operand {name} is missing"):
        attention(SPEC, _inputs(**{name: None}))


@pytest.mark.parametrize("name", [*ARRAYS, "kv_lengths"])
def test_an_operand_that_is_not_stated_is_refused(name: str) -> None:
    if name in ("query", "key", "value"):
        return
    spec = AttentionSpec(q_heads=H, kv_heads=K, head_dim=D)
    bare = {key: RNG.normal(size=(B, heads, S, D)) for key, heads in
            (("query", H), ("key", K), ("value", K))}  # fmt: skip
    attention(spec, OracleInputs(**bare))
    with pytest.raises(InputError, match=f"operand {name} is given"):
        attention(spec, OracleInputs(**bare, **{name: np.ones(1)}))


LENGTHS: list[tuple[dict[str, Any], list[int], str | None]] = [
    ({}, [0, 5], None),
    ({}, [-1, 5], "go beyond the 5 keys"),
    ({}, [0, 6], "go beyond the 5 keys"),
    ({"cache": CacheSpec(growth="static")}, [5, 8], None),
    ({"cache": CacheSpec(growth="static")}, [4, 8], "below the 5 new tokens"),
    ({"cache": CacheSpec(growth="static")}, [5, 9], "go beyond the 8 keys"),
]


@pytest.mark.parametrize(("fields", "lengths", "words"), LENGTHS)
def test_lengths_go_from_none_to_all_of_the_keys(
    fields: dict[str, Any], lengths: list[int], words: str | None
) -> None:
    """In a static cache they count the new tokens."""
    mask = MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)
    spec = AttentionSpec(q_heads=H, kv_heads=K, head_dim=D, mask=mask, **fields)
    side = SideInputs(kv_lengths=np.array(lengths))
    if spec.cache is not None:
        past = np.zeros((B, K, 8, D))
        side = side.replace(past_key=past, past_value=past)
    named = dict(side.named())
    new = {"query": (B, H, S, D), "key": (B, K, 5, D), "value": (B, K, 5, D)}
    inputs = OracleInputs(**{name: RNG.normal(size=shape) for name, shape in new.items()}, **named)
    if words is None:
        assert attention(spec, inputs).output.shape == (B, H, S, D)
        return
    with pytest.raises(InputError, match=words):
        attention(spec, inputs)


@pytest.mark.parametrize("shape", [(T,), (1, T), (S, T), (1, S, T), (H, 1, T), (B, 1, 1, T)])
@pytest.mark.parametrize("part", ["keep", "bias"])
def test_masks_broadcast_and_are_cut_with_the_queries(
    monkeypatch: pytest.MonkeyPatch, part: str, shape: tuple[int, ...]
) -> None:
    """In blocks of one query a mask of one row holds for each of them."""
    from mha_export.oracle import _attention

    stated: dict[str, Any] = {part: ("x",) * len(shape), "empty_row": EmptyRow.ZERO}
    spec = AttentionSpec(q_heads=H, kv_heads=K, head_dim=D, mask=MaskSpec(**stated))
    array = RNG.random(shape) < 0.6 if part == "keep" else RNG.normal(size=shape)
    new = {"query": (B, H, S, D), "key": (B, K, T, D), "value": (B, K, T, D)}
    arrays = {name: RNG.normal(size=size) for name, size in new.items()}
    inputs = OracleInputs(**arrays, **{part: array})
    whole = attention(spec, inputs)
    spread = np.broadcast_to(array, (B, H, S, T))
    same = attention(spec, inputs.replace(**{part: spread}))
    np.testing.assert_array_equal(whole.output, same.output)
    monkeypatch.setattr(_attention, "_BLOCK_ELEMENTS", 1)
    np.testing.assert_allclose(attention(spec, inputs, scores=False).output, whole.output)
