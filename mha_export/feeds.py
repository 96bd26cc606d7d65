"""Graph inputs of a canonical graph from the oracle's operands, and its outputs back.

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


def feeds(spec: AttentionSpec, inputs: OracleInputs) -> Arrays:
    """The inputs by name of the canonical graph of ``spec`` without projections.

    Floating-point ones are of ``spec.io_dtype``; masks, lengths and ids stay what they are.
    """
    made: Arrays = {}
    for name, array in inputs.named():
        if name.startswith("rotary."):
            continue
        if name in ("query", "key", "value"):
            array = merge_heads(array)
        elif name.startswith("past") and spec.cache is not None and spec.cache.layout == "bshd":
            array = array.swapaxes(1, 2)
        made[name] = array
    if inputs.rotary is not None:
        made |= _rotary(spec, inputs.rotary)
    dtype = numpy_dtype(spec.io_dtype)
    return {
        name: np.ascontiguousarray(array if array.dtype.kind in "bi" else array.astype(dtype))
        for name, array in made.items()
    }


def merge_heads(x_bhsd: np.ndarray) -> np.ndarray:
    """[b, h, s, d] to [b, s, h * d]."""
    b, h, s, d = x_bhsd.shape
    return x_bhsd.swapaxes(1, 2).reshape(b, s, h * d)


def split_heads(x_bsm: np.ndarray, heads: int) -> np.ndarray:
    """[b, s, h * d] to [b, h, s, d]."""
    b, s, m = x_bsm.shape
    return x_bsm.reshape(b, s, heads, m // heads).swapaxes(1, 2)


def oracle_outputs(spec: AttentionSpec, outputs: Mapping[str, np.ndarray]) -> Arrays:
    """What a canonical graph without projections gave, in the oracle's shapes.

    An ``output`` that cannot be split into the spec's heads stays as it is: whoever compares it
    sees its shape.
    """
    made = dict(outputs)
    output = made.get("output")
    if spec.combine == "concat" and output is not None and _is_heads(output, spec.q_heads):
        made["output"] = split_heads(output, spec.q_heads)
    for name in ("present_key", "present_value"):
        if name in made and spec.cache is not None and spec.cache.layout == "bshd":
            made[name] = made[name].swapaxes(1, 2)
    return made


def _is_heads(array: np.ndarray, heads: int) -> bool:
    return array.ndim == 3 and array.shape[-1] % heads == 0


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
