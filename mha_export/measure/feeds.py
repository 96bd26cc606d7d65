"""Graph inputs of a canonical graph from the oracle's operands, and the outputs back.

The oracle speaks [b, heads, length, dim]; a canonical graph reads [b, length, heads * dim], and
cache tensors in the layout the spec states.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mha_export.forms._layout import numpy_dtype
from mha_export.oracle import OracleInputs, RotaryInputs
from mha_export.spec import AttentionSpec, RotaryStyle

Arrays = dict[str, np.ndarray]

_INTEGER = ("key_padding", "kv_lengths", "prefix_lengths", "document_ids")


def feeds(spec: AttentionSpec, inputs: OracleInputs) -> Arrays:
    """The inputs by name of the canonical graph of ``spec`` without projections."""
    dtype = numpy_dtype(spec.io_dtype)
    made: Arrays = {"query": merge_heads(inputs.query), "key": merge_heads(inputs.key)}
    if inputs.value is not None:
        made["value"] = merge_heads(inputs.value)
    for name, array in inputs.named():
        if name in ("query", "key", "value") or name.startswith("rotary."):
            continue
        if name.startswith("past") and spec.cache is not None and spec.cache.layout == "bshd":
            array = array.swapaxes(1, 2)
        made[name] = array
    if inputs.rotary is not None:
        made |= _rotary(spec, inputs.rotary)
    return {name: _typed(name, array, dtype) for name, array in made.items()}


def merge_heads(x_bhsd: np.ndarray) -> np.ndarray:
    """[b, h, s, d] to [b, s, h * d]."""
    b, h, s, d = x_bhsd.shape
    return x_bhsd.swapaxes(1, 2).reshape(b, s, h * d)


def split_heads(x_bsm: np.ndarray, heads: int) -> np.ndarray:
    """[b, s, h * d] to [b, h, s, d]."""
    b, s, m = x_bsm.shape
    return x_bsm.reshape(b, s, heads, m // heads).swapaxes(1, 2)


def oracle_outputs(spec: AttentionSpec, outputs: Mapping[str, np.ndarray]) -> Arrays:
    """What a canonical graph without projections gave, in the oracle's shapes."""
    made = dict(outputs)
    if spec.combine == "concat":
        made["output"] = split_heads(made["output"], spec.q_heads)
    for name in ("present_key", "present_value"):
        if name in made and spec.cache is not None and spec.cache.layout == "bshd":
            made[name] = made[name].swapaxes(1, 2)
    return made


def _rotary(spec: AttentionSpec, rotary: RotaryInputs) -> Arrays:
    made: Arrays = {}
    for name in ("cos", "sin", "key_cos", "key_sin"):
        table = getattr(rotary, name)
        if table is not None:
            made[name] = _half(spec, table)
    if rotary.position_ids is not None:
        made["position_ids"] = rotary.position_ids.astype(np.int64)
    return made


def _half(spec: AttentionSpec, table: np.ndarray) -> np.ndarray:
    assert spec.rotary is not None
    half = spec.rotary.dim // 2
    if table.shape[-1] == half:
        return table
    return table[..., :half] if spec.rotary.style is RotaryStyle.HALF else table[..., ::2]


def _typed(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if name == "keep":
        return np.ascontiguousarray(array, dtype=np.bool_)
    if name in _INTEGER or name == "position_ids":
        return np.ascontiguousarray(array, dtype=np.int64)
    return np.ascontiguousarray(array).astype(dtype)
