"""The attention of one spec over given arrays, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mha_export.errors import InputError
from mha_export.oracle._inputs import Array, Floats, Geometry, OracleInputs, geometry_of
from mha_export.oracle._mask import MINIMUM, additive, hidden_rows
from mha_export.oracle._rotary import rotate_all_keys, rotate_new
from mha_export.spec import AttentionSpec, EmptyRow, QkNormSpec, QkOutput

_BLOCK_ELEMENTS = 1 << 22
"""Scores held at once where the caller does not ask for them (32 MiB)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OracleResult:
    """What one attention gives.

    Attributes:
        output: [b, h, s, e], or [b, s, e] where the spec combines heads by their mean.
        empty_rows: [b, h, s], True where no key takes part (all forbidden, or bias -inf).
        present_key, present_value: [b, k, t, d] and [b, k, t, e]: all keys, cached ones included,
            as they enter the product (before rotation where it comes after the cache); with
            ``value_source: key_prefix`` there is no present_value.
        raw, capped, masked, probabilities: [b, h, s, t]; None where ``scores=False``.
        hidden: [b, h, s, t], True where a rule forbids the pair; None where ``scores=False``.
    """

    output: Floats
    empty_rows: NDArray[np.bool_]
    present_key: Floats
    present_value: Floats | None
    raw: Floats | None = None
    capped: Floats | None = None
    masked: Floats | None = None
    probabilities: Floats | None = None
    hidden: NDArray[np.bool_] | None = None

    def scores(self, kind: QkOutput) -> Floats:
        """The score tensor of that kind, [b, h, s, t].

        Errors:
            InputError: the evaluation was asked to keep no scores.
        """
        found: Floats | None = getattr(self, kind.value)
        if found is None:
            raise InputError(f"{kind.value} scores were not kept", fix="evaluate with scores=True")
        return found


def attention(spec: AttentionSpec, inputs: OracleInputs, *, scores: bool = True) -> OracleResult:
    """Evaluate the equation of :mod:`mha_export.spec` in float64.

    Args:
        spec: the attention; dtypes in it matter only for ``fill: min``.
        inputs: arrays of any real dtype, taken at face value.
        scores: keep the four [b, h, s, t] tensors. Without them queries are taken in blocks, so
            that memory grows with the keys and not with their product with the queries.

    Errors:
        InputError: an operand is missing, not stated by the spec, or of the wrong shape.
    """
    geometry = geometry_of(spec, inputs)
    query = normalised(spec.qk_norm, inputs.query, inputs.q_norm_weight, inputs.q_norm_bias)
    key = inputs.key.astype(np.float64)
    if spec.qk_norm is not None and spec.qk_norm.key:
        key = normalised(spec.qk_norm, inputs.key, inputs.k_norm_weight, inputs.k_norm_bias)
    query, key = rotate_new(spec, inputs, geometry, query, key)
    present_key = _present(spec, geometry, inputs.past_key, key)
    present_value = None
    if inputs.value is not None:
        new_value = inputs.value.astype(np.float64)
        present_value = _present(spec, geometry, inputs.past_value, new_value)
    key = rotate_all_keys(spec, inputs, present_key)
    value = key[..., : spec.value_dim] if present_value is None else present_value

    block = geometry.s
    if not scores:
        block = max(1, _BLOCK_ELEMENTS // max(1, geometry.b * spec.q_heads * geometry.t))
    parts = [
        _rows(spec, inputs, geometry, query, key, value, slice(at, min(at + block, geometry.s)))
        for at in range(0, geometry.s, max(1, block))
    ]
    output = np.concatenate([part.output for part in parts], axis=2)
    kept = {}
    if scores:
        for name in ("raw", "capped", "masked", "probabilities", "hidden"):
            kept[name] = getattr(parts[0], name)
    return OracleResult(
        output=output.mean(axis=1) if spec.combine == "mean" else output,
        empty_rows=np.concatenate([part.empty for part in parts], axis=2),
        present_key=present_key,
        present_value=present_value,
        **kept,
    )


def hidden_pairs(spec: AttentionSpec, inputs: OracleInputs) -> NDArray[np.bool_]:
    """[b, h, s, t], True where a rule of the spec forbids the pair.

    Biases of -inf are not rules, keys that a short bias lacks are.

    Errors:
        InputError: an operand is missing, not stated by the spec, or of the wrong shape.
    """
    geometry = geometry_of(spec, inputs)
    hidden = hidden_rows(spec, inputs, geometry, slice(None))
    return np.broadcast_to(hidden, (geometry.b, spec.q_heads, geometry.s, geometry.t))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    raw: Floats
    capped: Floats
    masked: Floats
    probabilities: Floats
    hidden: NDArray[np.bool_]
    empty: NDArray[np.bool_]
    output: Floats


def _rows(
    spec: AttentionSpec,
    inputs: OracleInputs,
    geometry: Geometry,
    query: Floats,
    key: Floats,
    value: Floats,
    rows: slice,
) -> _Rows:
    """The scores and outputs of some queries against every key."""
    group = spec.group
    raw = spec.effective_scale * _per_group(query[:, :, rows], key.swapaxes(2, 3), group)
    cap = spec.softcap
    capped = raw if cap is None else cap * np.tanh(raw / cap)
    bias = additive(spec, inputs, geometry, rows)
    biased = capped if bias is None else capped + bias
    hidden = np.broadcast_to(hidden_rows(spec, inputs, geometry, rows), biased.shape)
    masked = _filled(spec, biased, hidden)
    empty = np.all(hidden | np.isneginf(biased), axis=-1)
    probabilities = _softmax(masked, inputs.sinks)
    policy = spec.mask.empty_row
    stated = {EmptyRow.ZERO: 0.0, EmptyRow.NAN: np.nan, EmptyRow.UNIFORM: 1 / max(1, geometry.t)}
    if policy in stated:
        probabilities[empty] = stated[policy]
    return _Rows(
        raw=raw,
        capped=capped,
        masked=masked,
        probabilities=probabilities,
        hidden=hidden,
        empty=empty,
        output=_per_group(probabilities, value, group),
    )


def _per_group(left: Floats, right: Floats, group: int) -> Floats:
    """[b, h, s, x] times [b, k, x, y], query head j with key/value head j // group."""
    b, h, s, _ = left.shape
    k = right.shape[1]
    product: Floats = left.reshape(b, k, group, s, left.shape[3]) @ right[:, :, None]
    return product.reshape(b, h, s, right.shape[3])


def _filled(spec: AttentionSpec, biased: Floats, hidden: NDArray[np.bool_]) -> Floats:
    fill = spec.mask.fill
    if fill == "-inf":
        return np.where(hidden, -np.inf, biased)
    if fill == "min":
        return np.where(hidden, MINIMUM[spec.io_dtype], biased)
    return np.where(hidden, biased + float(fill), biased)


def _softmax(masked: Floats, sinks: Array | None) -> Floats:
    """Over the last axis, shifted by its maximum; a row of -inf alone: NaN, or 0 with a sink."""
    if masked.shape[-1] == 0:
        return masked.copy()
    top = masked.max(axis=-1, keepdims=True)
    sink_1h11 = None if sinks is None else sinks.astype(np.float64)[None, :, None, None]
    if sink_1h11 is not None:
        top = np.maximum(top, sink_1h11)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(masked - top)
    total = weight.sum(axis=-1, keepdims=True)
    if sink_1h11 is not None:
        total = total + np.exp(sink_1h11 - top)
    with np.errstate(invalid="ignore"):
        result: Floats = weight / total
    return result


def normalised(
    norm: QkNormSpec | None, x_bhsd: Array, weight: Array | None, bias: Array | None
) -> Floats:
    """qk-norm over each head, or over all heads of a position together."""
    x = x_bhsd.astype(np.float64)
    if norm is None:
        return x
    b, h, s, d = x.shape
    if norm.over == "hidden":
        x = x.swapaxes(1, 2).reshape(b, s, h * d)
    if norm.kind == "l2":
        length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
        y = x / np.maximum(length, norm.epsilon)
    else:
        centred = x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        y = centred / np.sqrt(variance + norm.epsilon)
    for name, operand in (("weight", weight), ("bias", bias)):
        if operand is not None and operand.shape != y.shape[-1:]:
            raise InputError(
                f"a qk-norm {name} has shape {list(operand.shape)}; expected [{y.shape[-1]}]"
            )
    if weight is not None:
        y = y * weight.astype(np.float64)
    if bias is not None:
        y = y + bias.astype(np.float64)
    if norm.over == "hidden":
        y = y.reshape(b, s, h, d).swapaxes(1, 2)
    result: Floats = y
    return result


def _present(spec: AttentionSpec, geometry: Geometry, past: Array | None, new: Floats) -> Floats:
    """Cached and new tokens as one [b, k, t, x]."""
    if past is None:
        return new
    past = past.astype(np.float64)
    assert spec.cache is not None  # geometry_of has checked it
    if spec.cache.growth == "concat":
        return np.concatenate([past, new], axis=2)
    for batch, at in enumerate(geometry.start):
        past[batch, :, at : at + geometry.n] = new[batch]
    return past
