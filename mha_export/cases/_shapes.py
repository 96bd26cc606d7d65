"""What scenarios do to ordinary operands: each returns changed ones, or None for no such case."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mha_export.cases._draw import LARGEST, Stream, rounded, short_factor
from mha_export.cases._sizes import Sizes, is_static
from mha_export.oracle import Array, OracleInputs, attention, hidden_pairs
from mha_export.oracle._mask import MINIMUM
from mha_export.spec import AttentionSpec, DType, EmptyRow, QkOutput


def as_drawn(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs:
    return inputs


def _amplified(spec: AttentionSpec, inputs: OracleInputs, target: float) -> OracleInputs | None:
    """Queries (or the weight that sets their size) multiplied until the top score is near it."""
    raw = attention(spec, inputs).raw
    assert raw is not None
    top = float(np.abs(raw).max(initial=0.0))
    if top == 0.0:
        return None
    factor = short_factor(target / top)
    if spec.qk_norm is None:
        name = "query"
    elif spec.qk_norm.weight:
        name = "q_norm_weight"
    else:
        return None
    changes: dict[str, Array] = {name: getattr(inputs, name) * factor}
    if name == "q_norm_weight" and inputs.q_norm_bias is not None:
        changes["q_norm_bias"] = inputs.q_norm_bias * factor
    if max(float(np.abs(x).max()) for x in changes.values()) > 0.9 * LARGEST[spec.io_dtype]:
        return None
    return inputs.replace(**changes)


def peaked(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    return _amplified(spec, inputs, 60.0)


def extreme(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    if spec.io_dtype is not DType.FP16:
        return _amplified(spec, inputs, 1e4)
    # Near the end of fp16 before the scale is applied, so that no order of operations overflows.
    return _amplified(spec, inputs, 6e4 * min(1.0, abs(spec.effective_scale)))


def saturating(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    assert spec.softcap is not None
    return _amplified(spec, inputs, 4 * spec.softcap)


def tied(spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs) -> OracleInputs:
    """All keys of a head equal: probabilities are a plain count of what the mask lets through."""
    changes: dict[str, Array] = {"key": np.broadcast_to(inputs.key[:, :, :1], inputs.key.shape)}
    if inputs.past_key is not None and inputs.past_key.shape[2]:
        first = inputs.past_key[:, :, :1]
        changes["past_key"] = np.broadcast_to(first, inputs.past_key.shape)
    return inputs.replace(**changes)


def poisoned(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    """Huge finite values (and large keys) wherever no query of the batch row may look."""
    inputs = _seeded_dead_keys(spec, inputs)
    found = attention(spec, inputs)
    assert found.hidden is not None
    assert found.probabilities is not None
    dead = found.hidden & ~(found.probabilities > 0)
    b, _, s, t = dead.shape
    dead_bkt = dead.reshape(b, spec.kv_heads, spec.group * s, t).all(axis=2)
    if not dead_bkt.any():
        return None
    small = spec.io_dtype is DType.FP16
    changes: dict[str, Array] = {}
    transformed = spec.rotary is not None or spec.qk_norm is not None
    shown = spec.qk_output in (QkOutput.RAW, QkOutput.CAPPED)
    for new, past, poison, wanted in (
        ("value", "past_value", 6e4 if small else 1e30, True),
        ("key", "past_key", 100.0 if small else 1e30, spec.mask.fill in ("-inf", "min")),
    ):
        is_key = new == "key"
        if not wanted or (is_key and (shown or spec.value_source != "own")):
            continue
        for name, at in ((new, _new_slots(spec, inputs)), (past, _past_slots(spec, inputs))):
            array = getattr(inputs, name)
            if array is None or (name == "key" and transformed):
                continue
            where = np.take_along_axis(dead_bkt, at[:, None, :], axis=2)[..., None]
            changes[name] = np.where(where, poison, array)
    if spec.value_source != "own":
        return None
    return inputs.replace(**changes)


def _seeded_dead_keys(spec: AttentionSpec, inputs: OracleInputs) -> OracleInputs:
    """Masks that vary by query hide no key from all of them: hide the second key from everyone."""
    changes: dict[str, Array] = {}
    if inputs.keep is not None and inputs.keep.shape[-1] > 2:
        keep = inputs.keep.copy()
        keep[..., 1] = False
        changes["keep"] = keep
    elif inputs.key_padding is not None and inputs.key_padding.shape[1] > 2:
        padding = inputs.key_padding.copy()
        padding[:, 1] = 0
        changes["key_padding"] = padding
    return inputs.replace(**changes)


def _new_slots(spec: AttentionSpec, inputs: OracleInputs) -> Array:
    """Position among all keys of each new token, [b, n]."""
    b, n = inputs.key.shape[0], inputs.key.shape[2]
    start = np.zeros(b, np.int64)
    if is_static(spec):
        assert inputs.kv_lengths is not None
        start = inputs.kv_lengths - n
    elif inputs.past_key is not None:
        start = start + inputs.past_key.shape[2]
    return start[:, None] + np.arange(n)


def _past_slots(spec: AttentionSpec, inputs: OracleInputs) -> Array:
    past = 0 if inputs.past_key is None else inputs.past_key.shape[2]
    return np.broadcast_to(np.arange(past), (inputs.key.shape[0], past))


def edged(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    """Loud values at keys near an edge, so that one key in a long window is heard."""
    hidden = np.any(hidden_pairs(spec, inputs), axis=1)
    # A key is near an edge when it, or one within two of it, is seen by some queries, not by all.
    near: NDArray[np.bool_] = np.array(np.any(hidden, axis=1) & ~np.all(hidden, axis=1))
    for _ in range(2):
        wider = near.copy()
        wider[:, 1:] |= near[:, :-1]
        wider[:, :-1] |= near[:, 1:]
        near = wider
    changes: dict[str, Array] = {}
    for name, at in (
        ("value", _new_slots(spec, inputs)),
        ("past_value", _past_slots(spec, inputs)),
    ):
        array = getattr(inputs, name)
        if array is not None:
            loud = np.take_along_axis(near, at, axis=1)[:, None, :, None]
            changes[name] = np.where(loud, array * 8, array)
    return inputs.replace(**changes)


def emptied(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    """The last batch row loses every key, or a query by its mask (all by a mask of keys alone)."""
    changes: dict[str, Array] = {}
    if inputs.key_padding is not None:
        padding = inputs.key_padding.copy()
        padding[-1] = 0
        changes["key_padding"] = padding
    elif inputs.keep is not None:
        keep = inputs.keep.copy()
        if keep.ndim > 1 and keep.shape[-2] > 1:
            keep[..., -1, :] = False
        elif keep.ndim == 4 and keep.shape[0] > 1:
            keep[-1] = False
        else:
            keep[...] = False
        changes["keep"] = keep
    elif spec.mask.lengths and not is_static(spec) and not spec.mask.documents:
        assert inputs.kv_lengths is not None
        lengths = inputs.kv_lengths.copy()
        lengths[-1] = 0
        changes["kv_lengths"] = lengths
    elif inputs.bias is not None and spec.mask.empty_row is not EmptyRow.NOT_APPLICABLE:
        bias = inputs.bias.copy()
        np.atleast_2d(bias)[..., -1, :] = -np.inf
        changes["bias"] = bias
    else:
        return None
    return inputs.replace(**changes)


def extreme_bias(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    """-inf, -1e4 and +20 among the biases; the first key each row may see stays as it was."""
    assert inputs.bias is not None
    bias = inputs.bias.copy()
    pick = stream.uniform(*bias.shape)
    visible = ~hidden_pairs(spec, inputs)
    needed = (np.cumsum(visible, axis=-1) == 1) & visible
    needed = needed[..., : bias.shape[-1]]
    for axis, length in enumerate((1,) * (4 - bias.ndim) + bias.shape[:-1]):
        if length == 1:
            needed = np.any(needed, axis=axis, keepdims=True)
    bias = np.where(pick < 0.25, -np.inf, np.where(pick < 0.4, -1e4, bias))
    bias = np.where(pick > 0.85, bias + 20.0, bias)
    return inputs.replace(bias=np.where(needed.reshape(bias.shape), inputs.bias, bias))


def minimum_bias(
    spec: AttentionSpec, sizes: Sizes, stream: Stream, inputs: OracleInputs
) -> OracleInputs | None:
    """Rows as exporters write them: all at the dtype's minimum, or -inf and the minimum mixed.

    The minimum absorbs every score, so such a row is the mean over the keys that hold it. Half
    precision has no number that does: what -65504 plus a score gives depends on who rounds. Under
    a fill of the same minimum the keys that are hidden would count too, and nobody means that.
    """
    assert inputs.bias is not None
    if spec.io_dtype is DType.FP16 or (spec.mask.fill == "min" and spec.mask.hides_keys):
        return None
    if inputs.bias.ndim < 2 or inputs.bias.shape[-2] < 2:
        return None
    low = MINIMUM[spec.io_dtype]
    bias = inputs.bias.copy()
    bias[..., -1, :] = low
    bias[..., 0, 1::2] = low
    if bias.shape[-2] > 2 and bias.shape[-1] > 1:
        bias[..., -2, :] = low
        bias[..., -2, 1::2] = -np.inf
    return inputs.replace(bias=bias)


def rounded_inputs(inputs: OracleInputs, dtype: DType) -> OracleInputs:
    """Every floating array rounded to what ``dtype`` can hold; integers and bools as they are."""

    def cast(array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        return np.ascontiguousarray(rounded(array, dtype))

    return inputs.map_arrays(cast)
