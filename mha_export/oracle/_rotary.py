"""Rotary position embedding in float64 (Su et al. 2021), with the published ways to stretch it."""

from __future__ import annotations

import math

import numpy as np

from mha_export.errors import InputError
from mha_export.oracle._inputs import Array, Floats, Geometry, OracleInputs, RotaryInputs
from mha_export.spec import AttentionSpec, RotaryScaling, RotarySpec, RotaryStyle


def inverse_frequencies(rotary: RotarySpec) -> tuple[Floats, float]:
    """Frequencies [r/2] in radians a position, and the factor on cosine and sine.

    ``w_i = theta^(-2i/r)``, then: linear ``w / factor``; ntk ``theta * factor^(r/(r-2))``;
    llama3 (Llama 3.1 reference code): wavelengths beyond ``original/low_freq_factor`` divided by
    factor, those below ``original/high_freq_factor`` kept, smooth between; yarn (Peng et al. 2023):
    a ramp over channels between those turning ``beta_fast`` and ``beta_slow`` times within
    ``original_max_positions``.

    Errors:
        InputError: the spec gives no theta.
    """
    if rotary.theta is None:
        raise InputError("rotary.theta is not stated: cosine and sine must come as operands")
    r, scaling = rotary.dim, rotary.scaling
    exponent = np.arange(0, r, 2, dtype=np.float64) / r
    plain = rotary.theta**-exponent
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "ntk":
        if r == 2:
            raise InputError("rotary.scaling of kind ntk needs rotary.dim above 2")
        stretched: Floats = (rotary.theta * scaling.factor ** (r / (r - 2))) ** -exponent
        return stretched, 1.0
    assert scaling.original_max_positions is not None  # the spec refuses it
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, scaling.original_max_positions), 1.0
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    return _yarn(plain, rotary.theta, scaling, scaling.original_max_positions), factor


def _llama3(plain: Floats, scaling: RotaryScaling, original: int) -> Floats:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    result: Floats = np.where(
        wavelength > original / low,
        plain / scaling.factor,
        np.where(wavelength < original / high, plain, between),
    )
    return result


def _yarn(plain: Floats, theta: float, scaling: RotaryScaling, original: int) -> Floats:
    r = 2 * len(plain)

    def channel(turns: float) -> float:
        return r * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(r // 2) - low) / (high - low), 0, 1)
    result: Floats = plain / scaling.factor * ramp + plain * (1 - ramp)
    return result


def rotary_tables(rotary: RotarySpec, positions: Array) -> tuple[Floats, Floats]:
    """Cosine and sine [..., r/2] of the angles at ``positions`` [...].

    Errors:
        InputError: the spec gives no theta.
    """
    frequencies, factor = inverse_frequencies(rotary)
    angle = positions.astype(np.float64)[..., None] * frequencies
    return np.cos(angle) * factor, np.sin(angle) * factor


def rotate(x_bhsd: Floats, cos: Floats, sin: Floats, rotary: RotarySpec, offset: int) -> Floats:
    """Rotate channels ``offset .. offset + r`` of each head; cos and sin [b or 1, s, r/2 or r].

    ``(x, y) -> (x cos - y sin, y cos + x sin)`` for each pair of the style.
    """
    r = rotary.dim
    half = rotary.style is RotaryStyle.HALF
    first = slice(offset, offset + r // 2) if half else slice(offset, offset + r, 2)
    second = slice(offset + r // 2, offset + r) if half else slice(offset + 1, offset + r, 2)
    (cos_x, cos_y), (sin_x, sin_y) = (_pair(table[:, None], r, half) for table in (cos, sin))
    x, y = x_bhsd[..., first], x_bhsd[..., second]
    out = x_bhsd.copy()
    out[..., first] = x * cos_x - y * sin_x
    out[..., second] = y * cos_y + x * sin_y
    return out


def _pair(table: Floats, r: int, half: bool) -> tuple[Floats, Floats]:
    if table.shape[-1] == r // 2:
        return table, table
    if half:
        return table[..., : r // 2], table[..., r // 2 :]
    return table[..., ::2], table[..., 1::2]


def rotate_new(
    spec: AttentionSpec, inputs: OracleInputs, geometry: Geometry, query: Floats, key: Floats
) -> tuple[Floats, Floats]:
    """Queries and new keys, rotated as the spec says."""
    rotary = spec.rotary
    given = inputs.rotary if inputs.rotary is not None else RotaryInputs()
    if rotary is None:
        if inputs.rotary is not None:
            raise InputError("operand rotary is given, but the spec does not state its part")
        return query, key
    cos, sin = _tables(rotary, given, geometry, geometry.s)
    query = rotate(query, cos, sin, rotary, spec.rotary_offset)
    if not rotary.key or given.key_cos is not None:
        return query, key
    if geometry.n != geometry.s or spec.cross:
        if rotary.theta is None:
            raise InputError(
                "rotary tables of the queries do not fit the keys of another sequence",
                fix="give rotary.key_cos and rotary.key_sin",
            )
        cos, sin = rotary_tables(rotary, np.arange(geometry.n)[None])
    return query, rotate(key, cos, sin, rotary, spec.rotary_offset)


def rotate_all_keys(spec: AttentionSpec, inputs: OracleInputs, key_bktd: Floats) -> Floats:
    """Keys rotated after the cache, where the operands say so."""
    rotary, given = spec.rotary, inputs.rotary
    if rotary is None or given is None or given.key_cos is None or not rotary.key:
        return key_bktd
    if given.key_sin is None:
        raise InputError("operand rotary.key_sin is missing beside rotary.key_cos")
    cos, sin = (_checked(x, rotary, key_bktd.shape[2]) for x in (given.key_cos, given.key_sin))
    return rotate(key_bktd, cos, sin, rotary, spec.rotary_offset)


def _tables(
    rotary: RotarySpec, given: RotaryInputs, geometry: Geometry, length: int
) -> tuple[Floats, Floats]:
    position_ids = given.position_ids
    if (position_ids is not None) is not (rotary.positions == "input"):
        raise InputError(
            "operand rotary.position_ids "
            + ("is missing" if position_ids is None else "is given")
            + f", but rotary.positions is {rotary.positions}"
        )
    if rotary.theta is not None:
        if given.cos is not None or given.sin is not None:
            raise InputError("rotary tables are given, but rotary.theta states them already")
        if position_ids is None:
            position_ids = geometry.start[:, None] + np.arange(length)
        return rotary_tables(rotary, position_ids)
    if given.cos is None or given.sin is None:
        raise InputError(
            "rotary.theta is not stated: operands rotary.cos and rotary.sin are needed"
        )
    cos, sin = given.cos, given.sin
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return _checked(cos, rotary, length), _checked(sin, rotary, length)


def _checked(table: Array, rotary: RotarySpec, length: int) -> Floats:
    fits = table.ndim == 3 and table.shape[1] == length
    if not fits or table.shape[2] not in (rotary.dim // 2, rotary.dim):
        raise InputError(
            f"a rotary table has shape {list(table.shape)}; expected [batch or 1, {length}, "
            f"{rotary.dim // 2} or {rotary.dim}]"
        )
    return table.astype(np.float64)
