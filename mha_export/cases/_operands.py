"""Ordinary operands for a spec: Gaussian, each head its own, every part of the spec at work."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha_export.cases._draw import Stream
from mha_export.cases._sizes import Sizes, has_position_rule, is_static
from mha_export.oracle import Floats, OracleInputs, RotaryInputs, hidden_pairs, rotary_tables
from mha_export.spec import AttentionSpec, Dim, EmptyRow

_LOGIT = 1.5
"""Standard deviation aimed at for ordinary scores: neither flat nor one-hot."""

_TABLE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a scenario wants the data-carrying mask parts drawn."""

    padding: str = "right"
    """right, left or holes."""
    short_mask: bool = False
    short_lengths: bool = False
    """Lengths below the number of queries: leading rows are empty."""
    far_positions: bool = False


def draw_operands(spec: AttentionSpec, sizes: Sizes, stream: Stream, style: Style) -> OracleInputs:
    """Every operand the spec states, not yet rounded to its dtype."""
    b, n, p = sizes.batch, sizes.new_len, sizes.past_len
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    amplitude = _amplitude(spec)
    own = spec.value_source == "own"
    cached = spec.cache is not None
    query = _scores_side(stream, b, h, sizes.q_len, d) * amplitude
    key = _scores_side(stream, b, k, n, d) * amplitude
    value = _values(stream, b, k, n, e)
    inputs = OracleInputs(
        query=query,
        key=key,
        value=value if own else None,
        past_key=_scores_side(stream, b, k, p, d) * _cached_amplitude(spec) if cached else None,
        past_value=_values(stream, b, k, p, e) if cached and own else None,
        sinks=stream.normal(h) + 1.0 if spec.sinks else None,
        rotary=_rotary(spec, sizes, stream, style),
        **_norm_weights(spec, stream),
    )
    return _with_mask_data(spec, sizes, stream, style, inputs)


def _amplitude(spec: AttentionSpec) -> float:
    """Standard deviation of q and k that gives scores of about ``_LOGIT``."""
    scale = abs(spec.effective_scale)
    return math.sqrt(_LOGIT / (scale * math.sqrt(spec.head_dim))) if scale else 1.0


def _cached_amplitude(spec: AttentionSpec) -> float:
    """The same for keys that are past their normalisation."""
    norm = spec.qk_norm
    if norm is None or norm.weight:
        return _amplitude(spec)
    if norm.kind != "l2":
        return 1.0
    heads = spec.kv_heads if norm.over == "hidden" else 1
    return 1.0 / math.sqrt(spec.head_dim * heads)


def _norm_weights(spec: AttentionSpec, stream: Stream) -> dict[str, Floats]:
    norm = spec.qk_norm
    if norm is None:
        return {}
    drawn: dict[str, Floats] = {}
    for side, heads in (("q", spec.q_heads), ("k", spec.kv_heads)):
        if side == "k" and not norm.key:
            continue
        width = spec.head_dim * (heads if norm.over == "hidden" else 1)
        unit = math.sqrt(width) if norm.kind == "l2" else 1.0
        if norm.weight:
            drawn[f"{side}_norm_weight"] = (
                (0.6 + 0.8 * stream.uniform(width)) * _amplitude(spec) * unit
            )
        if norm.bias:
            drawn[f"{side}_norm_bias"] = stream.normal(width) * 0.2
    return drawn


def _scores_side(stream: Stream, b: int, heads: int, length: int, d: int) -> Floats:
    """[b, heads, length, d]: each head its own mean direction and its own spread."""
    spread = (0.7 + 0.15 * (np.arange(heads) % 5)).astype(np.float64)[None, :, None, None]
    mean = 0.5 * stream.normal(1, heads, 1, d)
    drawn: Floats = stream.normal(b, heads, length, d) * spread + mean
    return drawn


def _values(stream: Stream, b: int, heads: int, length: int, e: int) -> Floats:
    head = np.arange(heads)
    spread = (0.5 + 0.25 * (head % 3))[None, :, None, None]
    mean = (0.5 * (head % 7) - 1.5)[None, :, None, None]
    drawn: Floats = stream.normal(b, heads, length, e) * spread + mean
    return drawn


def _rotary(spec: AttentionSpec, sizes: Sizes, stream: Stream, style: Style) -> RotaryInputs | None:
    rotary = spec.rotary
    if rotary is None:
        return None
    b, s = sizes.batch, sizes.q_len
    start = _starts(spec, sizes)
    positions = start[:, None] + np.arange(s)
    by_input = rotary.positions == "input"
    if by_input:
        # Rows differ by a shift, as under left padding, and the last token jumps ahead.
        positions = np.broadcast_to(positions, (b, s)) + 2 * np.arange(b)[:, None]
        positions = positions + (np.arange(s) == s - 1)
        if style.far_positions:
            positions = positions + stream.integers(500, 3000, b, s)
    if rotary.theta is not None:
        return RotaryInputs(position_ids=positions) if by_input else None
    source = dataclasses.replace(rotary, theta=_TABLE_THETA, scaling=None)
    key_cos = key_sin = None
    if spec.cross and rotary.key:
        key_cos, key_sin = rotary_tables(source, np.arange(sizes.kv_len)[None])
    if by_input:
        cos, sin = rotary_tables(source, np.arange(int(positions.max()) + 3))
        return RotaryInputs(
            cos=cos, sin=sin, position_ids=positions, key_cos=key_cos, key_sin=key_sin
        )
    cos, sin = rotary_tables(source, positions)
    return RotaryInputs(cos=cos, sin=sin, key_cos=key_cos, key_sin=key_sin)


def _starts(spec: AttentionSpec, sizes: Sizes) -> NDArray[np.int64]:
    """Where each row's new tokens go, [b or 1]."""
    if is_static(spec):
        return _lengths(spec, sizes, Style()) - sizes.new_len
    return np.array([sizes.past_len if spec.cache is not None else 0], np.int64)


def _lengths(spec: AttentionSpec, sizes: Sizes, style: Style) -> NDArray[np.int64]:
    b, t = sizes.batch, sizes.kv_len
    least = 1
    if is_static(spec):
        least = sizes.new_len
    elif style.short_lengths:
        return np.maximum(0, sizes.q_len - 1 - np.arange(b, dtype=np.int64))
    elif has_position_rule(spec):
        least = min(t, sizes.q_len)
    slack = 2 if is_static(spec) else 0
    return np.maximum(least, np.minimum(t, t - slack - 2 * np.arange(b, dtype=np.int64)))


def _with_mask_data(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, style: Style, inputs: OracleInputs
) -> OracleInputs:
    mask, b, t = spec.mask, sizes.batch, sizes.kv_len
    data: dict[str, Any] = {}
    if spec.uses_lengths:
        data["kv_lengths"] = _lengths(spec, sizes, style)
    if mask.prefix:
        data["prefix_lengths"] = np.minimum(t, 1 + (t // 2 + np.arange(b)) % max(1, t - 1))
    if mask.documents:
        data["document_ids"] = (np.arange(t) + np.arange(b)[:, None]) // max(2, t // 3)
    positional = inputs.replace(**data)
    reachable = _first_reachable(spec, positional) if mask.keep or mask.padding else None
    if mask.padding:
        data["key_padding"] = _padding(b, t, stream, style)
    if mask.keep is not None and reachable is not None:
        shape = concrete_shape(spec, mask.keep, sizes, short=style.short_mask)
        data["keep"] = _keep(shape, reachable, stream)
    if mask.bias is not None:
        shape = concrete_shape(spec, mask.bias, sizes, short=style.short_mask)
        data["bias"] = stream.normal(*shape)
    result: OracleInputs = inputs.replace(**data)
    return result


def _first_reachable(spec: AttentionSpec, inputs: OracleInputs) -> NDArray[np.bool_]:
    """One True a row of [b, h, s, t]: the first key that the positional rules allow."""
    positional = dataclasses.replace(
        spec.mask, keep=None, bias=None, padding=False, empty_row=EmptyRow.ZERO
    )
    allowed = ~hidden_pairs(spec.replace(mask=positional), inputs)
    first = np.cumsum(allowed, axis=-1) == 1
    result: NDArray[np.bool_] = first & allowed
    return result


def _padding(b: int, t: int, stream: Stream, style: Style) -> NDArray[np.int64]:
    """[b, t]; row 0 of a batch is full, the others lose more and more keys."""
    lost = np.minimum(t - 1, 2 * np.arange(b))[:, None]
    key = np.arange(t)
    if style.padding == "left":
        return (key >= lost).astype(np.int64)
    if style.padding == "right":
        return (key < t - lost).astype(np.int64)
    row = stream.uniform(b, t) < 0.6
    # The kind of row that is taken for an end index: padding, keys, a hole, and a last key.
    row[:, 0] &= t < 3
    row[:, -1] = True
    if t >= 4:
        row[:, 1], row[:, -2] = True, False
    return row.astype(np.int64)


def _keep(
    shape: tuple[int, ...], reachable: NDArray[np.bool_], stream: Stream
) -> NDArray[np.bool_]:
    """Random, but with the first reachable key of every row, so that no row is empty."""
    kept = stream.uniform(*shape) < 0.7
    needed = reachable[..., : shape[-1]]
    for axis, length in enumerate((1,) * (4 - len(shape)) + shape[:-1]):
        if length == 1:
            needed = np.any(needed, axis=axis, keepdims=True)
    result: NDArray[np.bool_] = kept | needed.reshape(shape)
    return result


def concrete_shape(
    spec: AttentionSpec, shape: tuple[Dim, ...], sizes: Sizes, *, short: bool
) -> tuple[int, ...]:
    """Integers for the declared shape of a mask operand; only one not of kv_len may be short."""
    full = (sizes.batch, spec.q_heads, sizes.q_len, sizes.kv_len)[-len(shape) :]
    lengths = [
        declared if isinstance(declared, int) else length
        for declared, length in zip(shape, full, strict=True)
    ]
    if short and isinstance(shape[-1], str) and shape[-1] != spec.kv_len:
        lengths[-1] = max(1, sizes.kv_len - 2)
    return tuple(lengths)
