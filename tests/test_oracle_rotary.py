"""Rotary in the oracle: against the emitter's own tables, by complex numbers, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.forms._tables import cache_tables
from mha_export.oracle import (
    OracleInputs,
    RotaryInputs,
    attention,
    inverse_frequencies,
    rotary_tables,
    rotate,
)
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    MaskSpec,
    RotaryScaling,
    RotarySpec,
    RotaryStyle,
)

RNG = np.random.default_rng(8)
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"kind": "linear", "factor": 4.0},
    "ntk": {"kind": "ntk", "factor": 3.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_max_positions": 512},
    "llama3, other bounds": {
        "kind": "llama3",
        "factor": 3.0,
        "original_max_positions": 300,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
    },
    "yarn": {"kind": "yarn", "factor": 8.0, "original_max_positions": 256},
    "yarn, short": {"kind": "yarn", "factor": 8.0, "original_max_positions": 20},
    "yarn, from end to end": {
        "kind": "yarn",
        "factor": 8.0,
        "original_max_positions": 4096,
        "beta_fast": 1000.0,
        "beta_slow": 0.5,
    },
    "yarn, untruncated": {
        "kind": "yarn",
        "factor": 32.0,
        "original_max_positions": 4096,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, own factor": {
        "kind": "yarn",
        "factor": 4.0,
        "original_max_positions": 256,
        "attention_factor": 1.25,
    },
    "yarn of factor 1": {"kind": "yarn", "factor": 1.0, "original_max_positions": 256},
    "yarn below 1": {"kind": "yarn", "factor": 0.5, "original_max_positions": 256},
    "yarn whose bounds meet": {
        "kind": "yarn",
        "factor": 4.0,
        "original_max_positions": 64,
        "truncate": False,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [50.0, 10_000.0, 500_000.0])
def test_the_emitter_has_the_same_tables(theta: float, name: str) -> None:
    """Two programs written from the papers; neither knows the other."""
    fields = SCALINGS[name]
    for dim in (4, 6, 16, 64):
        scaling = None if fields is None else RotaryScaling(**fields)
        rotary = RotarySpec(dim=dim, theta=theta, scaling=scaling, max_positions=9)
        found = rotary_tables(rotary, np.arange(9))
        for one, other in zip(found, cache_tables(rotary, DType.FP64), strict=True):
            assert one.shape == (9, dim // 2)
            np.testing.assert_allclose(one, other, atol=1e-12)


def test_frequencies_by_hand() -> None:
    plain, factor = inverse_frequencies(RotarySpec(dim=4, theta=100.0))
    np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-15)
    assert factor == 1.0
    linear = RotaryScaling(kind="linear", factor=4.0)
    found, factor = inverse_frequencies(RotarySpec(dim=4, theta=100.0, scaling=linear))
    np.testing.assert_allclose(found, [0.25, 0.025], rtol=1e-15)
    assert factor == 1.0
    # theta 100 * 3^(4/2) = 900, its root 30.
    ntk = RotaryScaling(kind="ntk", factor=3.0)
    found, factor = inverse_frequencies(RotarySpec(dim=4, theta=100.0, scaling=ntk))
    np.testing.assert_allclose(found, [1.0, 1 / 30], rtol=1e-14)
    assert factor == 1.0


def test_llama3_by_hand() -> None:
    """Wavelengths 2 pi, 20 pi, 200 pi, 2000 pi; kept below 100, divided beyond 1000."""
    scaling = RotaryScaling(
        kind="llama3",
        factor=5.0,
        original_max_positions=2000,
        low_freq_factor=2.0,
        high_freq_factor=20.0,
    )
    found, factor = inverse_frequencies(RotarySpec(dim=8, theta=1e4, scaling=scaling))
    share = (2000 / (200 * math.pi) - 2.0) / 18.0
    middle = (1 - share) * 0.01 / 5.0 + share * 0.01
    np.testing.assert_allclose(found, [1.0, 0.1, middle, 0.001 / 5.0], rtol=1e-12)
    assert factor == 1.0


@pytest.mark.parametrize(
    ("factor", "given", "amplitude"),
    [
        (math.e, None, 1.1),
        (math.e**2, None, 1.2),
        (1.0, None, 1.0),
        (0.5, None, 1.0),
        (8.0, 1.25, 1.25),
    ],
)
def test_yarn_amplifies_its_tables(factor: float, given: float | None, amplitude: float) -> None:
    scaling = RotaryScaling(
        kind="yarn", factor=factor, original_max_positions=64, attention_factor=given
    )
    rotary = RotarySpec(dim=8, theta=100.0, scaling=scaling)
    cos, sin = rotary_tables(rotary, np.arange(5))
    np.testing.assert_allclose(cos**2 + sin**2, amplitude**2, rtol=1e-12)


@pytest.mark.parametrize("wide", [False, True], ids=["half", "full"])
@pytest.mark.parametrize(("dim", "offset"), [(4, 0), (4, 2), (4, 4), (8, 0), (2, 5)])
@pytest.mark.parametrize("style", list(RotaryStyle))
def test_a_pair_is_a_complex_number_that_turns(
    style: RotaryStyle, dim: int, offset: int, wide: bool
) -> None:
    """x + iy becomes (x + iy) e^(i angle); every other channel stays."""
    x = RNG.normal(size=(2, 3, 4, 8))
    angle = RNG.normal(size=(2, 4, dim // 2))
    cos_x, sin_x = np.cos(angle), np.sin(angle)
    half = style is RotaryStyle.HALF
    first = range(offset, offset + dim // 2) if half else range(offset, offset + dim, 2)
    second = [channel + (dim // 2 if half else 1) for channel in first]
    expected = x.copy()
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, None]
    expected[..., first], expected[..., second] = turned.real, turned.imag
    tables = [cos_x, sin_x]
    if wide:
        tables = [
            np.concatenate([t, t], axis=-1) if half else np.repeat(t, 2, axis=-1) for t in tables
        ]
    found = rotate(x, tables[0], tables[1], RotarySpec(style=style, dim=dim), offset)
    np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("style", list(RotaryStyle))
def test_the_halves_of_a_full_table_are_told_apart(style: RotaryStyle) -> None:
    """A full table whose pair holds two numbers turns each channel by its own."""
    x = RNG.normal(size=(1, 1, 1, 4))
    cos, sin = RNG.normal(size=(2, 1, 1, 4))
    first, second = ([0, 1], [2, 3]) if style is RotaryStyle.HALF else ([0, 2], [1, 3])
    expected = np.empty_like(x)
    expected[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
    expected[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
    found = rotate(x, cos, sin, RotarySpec(style=style, dim=4), 0)
    np.testing.assert_allclose(found, expected, atol=1e-15)


# Where positions count from: scores of a rotated attention depend on distances.

ROTARY = RotarySpec(dim=4, theta=20.0)
BOTTOM_RIGHT = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)


def _inputs(s: int, n: int, **others: Any) -> OracleInputs:
    return OracleInputs(
        query=RNG.normal(size=(2, 1, s, 4)),
        key=RNG.normal(size=(2, 1, n, 4)),
        value=RNG.normal(size=(2, 1, n, 4)),
        **others,
    )


def _turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[b, 1, s, 4] by the angles of [b or 1, s]."""
    frequencies = np.array([1.0, 20.0**-0.5])
    pairs = x[..., :2] + 1j * x[..., 2:]
    turned = pairs * np.exp(1j * positions[:, None, :, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 1, "kv_heads": 1, "head_dim": 4, "rotary": ROTARY} | fields)


def _check(spec: AttentionSpec, inputs: OracleInputs, q_at: np.ndarray, k_at: np.ndarray) -> None:
    """Raw scores of the new keys: those of queries and keys turned to these positions."""
    result = attention(spec, inputs)
    assert result.raw is not None
    expected = _turned(inputs.query, q_at) @ _turned(inputs.key, k_at).swapaxes(2, 3) / 2
    start = result.raw.shape[3] - inputs.key.shape[2]
    np.testing.assert_allclose(result.raw[..., start:], expected, atol=1e-13)


def test_positions_without_a_cache_begin_at_zero() -> None:
    _check(_spec(), _inputs(3, 3), np.arange(3)[None], np.arange(3)[None])


@pytest.mark.parametrize(("s", "n", "cross"), [(3, 5, False), (5, 3, False), (3, 3, True)])
def test_keys_of_another_sequence_begin_at_zero(s: int, n: int, cross: bool) -> None:
    _check(_spec(cross=cross), _inputs(s, n), np.arange(s)[None], np.arange(n)[None])


def test_positions_go_on_after_a_past() -> None:
    past = {name: np.zeros((2, 1, 4, 4)) for name in ("past_key", "past_value")}
    spec = _spec(cache=CacheSpec(), mask=BOTTOM_RIGHT)
    at = np.arange(4, 7)[None]
    _check(spec, _inputs(3, 3, **past), at, at)


def test_positions_of_a_static_cache_differ_by_row() -> None:
    past = {name: np.zeros((2, 1, 8, 4)) for name in ("past_key", "past_value")}
    spec = _spec(cache=CacheSpec(growth="static"), mask=BOTTOM_RIGHT)
    inputs = _inputs(2, 2, **past, kv_lengths=np.array([2, 7]))
    result = attention(spec, inputs)
    for row, start in ((0, 0), (1, 5)):
        at = np.array([[start, start + 1]])
        turned = _turned(inputs.key[row : row + 1], at)
        np.testing.assert_allclose(
            result.present_key[row, :, start : start + 2], turned[0], atol=1e-13
        )
        query = _turned(inputs.query[row : row + 1], at)
        assert result.raw is not None
        np.testing.assert_allclose(
            result.raw[row, :, :, start : start + 2],
            (query @ turned.swapaxes(2, 3) / 2)[0],
            atol=1e-13,
        )


def test_given_positions_hold_for_queries_and_keys() -> None:
    ids = np.array([[5, 0, 7], [1, 1, 3]])
    spec = _spec(rotary=RotarySpec(dim=4, theta=20.0, positions="input"))
    _check(spec, _inputs(3, 3, rotary=RotaryInputs(position_ids=ids)), ids, ids)


def test_given_tables_by_position() -> None:
    ids = np.array([[5, 0, 7], [1, 1, 3]])
    cos, sin = rotary_tables(ROTARY, np.arange(8))
    spec = _spec(rotary=RotarySpec(dim=4, positions="input"))
    rotary = RotaryInputs(cos=cos, sin=sin, position_ids=ids)
    _check(spec, _inputs(3, 3, rotary=rotary), ids, ids)


@pytest.mark.parametrize("batch", [1, 2])
def test_tables_of_the_keys_are_their_own(batch: int) -> None:
    q_at, k_at = np.array([[5, 0, 7]] * batch), np.array([[1, 2, 4, 9, 3]] * batch)
    names = ("cos", "sin", "key_cos", "key_sin")
    tables = (*rotary_tables(ROTARY, q_at), *rotary_tables(ROTARY, k_at))
    rotary = RotaryInputs(**dict(zip(names, tables, strict=True)))
    spec = _spec(rotary=RotarySpec(dim=4))
    _check(spec, _inputs(3, 5, rotary=rotary), q_at, k_at)


def test_keys_that_come_rotated_stay_whatever_tables_are_given() -> None:
    spec = _spec(rotary=RotarySpec(dim=4, key=False))
    at = np.arange(3)[None]
    cos, sin = rotary_tables(ROTARY, at)
    rotary = RotaryInputs(cos=cos, sin=sin, key_cos=cos, key_sin=sin)
    inputs = _inputs(3, 3, rotary=rotary)
    result = attention(spec, inputs)
    expected = _turned(inputs.query, at) @ inputs.key.swapaxes(2, 3) / 2
    np.testing.assert_allclose(result.raw, expected, atol=1e-13)


BAD_TABLES = {
    "rank": (1, 3, 2, 1),
    "length": (1, 4, 2),
    "width": (1, 3, 3),
    "double width": (1, 3, 8),
}


@pytest.mark.parametrize("shape", BAD_TABLES.values(), ids=BAD_TABLES)
@pytest.mark.parametrize("wrong", [0, 1], ids=["cos", "sin"])
def test_tables_of_the_wrong_shape_are_refused(wrong: int, shape: tuple[int, ...]) -> None:
    spec = _spec(rotary=RotarySpec(dim=4))
    good = np.zeros((1, 3, 2))
    tables = [np.zeros(shape) if at == wrong else good for at in range(2)]
    inputs = _inputs(3, 3, rotary=RotaryInputs(cos=tables[0], sin=tables[1]))
    with pytest.raises(InputError, match=r"expected \[batch or 1, 3, 2 or 4\]"):
        attention(spec, inputs)
