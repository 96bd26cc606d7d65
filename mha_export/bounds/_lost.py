"""What norm and rotary make of queries and keys, and the digits that cancel in them."""

from __future__ import annotations

import numpy as np

from mha_export.oracle import OracleInputs
from mha_export.spec import AttentionSpec, QkNormSpec, RotaryStyle

Lost = np.ndarray | float
"""Roundings of another size than the channel's own: absolute, in units of u."""


def lost_by_queries(spec: AttentionSpec, inputs: OracleInputs, query: np.ndarray) -> np.ndarray:
    """Of the normalised and rotated ``query`` [b,h,s,d]: broadcastable to it."""
    cancelled = _cancelled(spec.qk_norm, inputs.query) * np.abs(query)
    lost: np.ndarray = np.hypot(cancelled, _turned_in(spec, query))
    return lost


def lost_by_keys(spec: AttentionSpec, inputs: OracleInputs, key: np.ndarray) -> Lost:
    """Of all keys [b,k,t,d] the same; cached ones count as the worst of the new."""
    norm, rotary = spec.qk_norm, spec.rotary
    lost: Lost = 0.0
    if norm is not None and norm.key:
        most = np.max(_cancelled(norm, inputs.key), axis=2, keepdims=True)
        lost = most * np.abs(key)
    if rotary is not None and rotary.key:
        lost = np.hypot(lost, _turned_in(spec, key))
    return lost


_TURNING = 3.0
"""Roundings of ``x cos - y sin``: two products and their difference, each of the pair's size."""


def _turned_in(spec: AttentionSpec, x_bhsd: np.ndarray) -> Lost:
    """What a rotated channel may have lost to its partner: nothing is left of it where they cancel.

    ``|x cos| + |y sin|`` is at most the length of the pair, which rotation keeps: the roundings of
    the channel's own size are counted with the others, those of its partner's size here.
    """
    rotary = spec.rotary
    if rotary is None:
        return 0.0
    start, half = spec.rotary_offset, rotary.dim // 2
    turned = x_bhsd[..., start : start + rotary.dim]
    pairs = (half, 2) if rotary.style is RotaryStyle.INTERLEAVED else (2, half)
    axis = -1 if rotary.style is RotaryStyle.INTERLEAVED else -2
    partner = np.flip(turned.reshape(*turned.shape[:-1], *pairs), axis=axis)
    lost = np.zeros_like(x_bhsd)
    lost[..., start : start + rotary.dim] = _TURNING * np.abs(partner.reshape(turned.shape))
    return lost


def _cancelled(norm: QkNormSpec | None, x_bhsd: np.ndarray) -> np.ndarray:
    """Roundings [b,h,s,1] that taking the mean off costs: ``(rms(x) + |mean|) / std``, over 1.

    Two nearly equal channels keep few digits of their difference (Higham 2002, 1.7); the norm then
    scales what is left, rounding and all, to size 1.
    """
    b, h, s, _ = x_bhsd.shape
    if norm is None or norm.kind != "layer":
        return np.zeros((b, h, s, 1))
    x = x_bhsd.astype(np.float64)
    axes = (1, 3) if norm.over == "hidden" else (3,)
    mean = x.mean(axis=axes, keepdims=True)
    rms = np.sqrt(np.square(x).mean(axis=axes, keepdims=True))
    std = np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + norm.epsilon)
    return np.broadcast_to(np.maximum((rms + np.abs(mean)) / std - 1.0, 0.0), (b, h, s, 1))


def normalised(
    norm: QkNormSpec | None, x_bhsd: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None
) -> np.ndarray:
    """Queries or keys [b,h,s,d] after qk-norm, in float64."""
    x = x_bhsd.astype(np.float64)
    if norm is None:
        return x
    axes = (1, 3) if norm.over == "hidden" else (3,)
    if norm.kind == "layer":
        x = x - x.mean(axis=axes, keepdims=True)
    if norm.kind == "l2":
        length = np.sqrt(np.square(x).sum(axis=axes, keepdims=True))
        x = x / np.maximum(length, norm.epsilon)
    else:
        x = x / np.sqrt(np.square(x).mean(axis=axes, keepdims=True) + norm.epsilon)
    b, h, s, d = x.shape
    shape = (1, h, 1, d) if norm.over == "hidden" else (1, 1, 1, d)
    if weight is not None:
        x = x * weight.astype(np.float64).reshape(shape)
    if bias is not None:
        x = x + bias.astype(np.float64).reshape(shape)
    result: np.ndarray = x.reshape(b, h, s, d)
    return result
