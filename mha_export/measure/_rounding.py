"""A float64 run in which every result is rounded at random: one more plain implementation.

Monte Carlo arithmetic (Parker 1997): each result that the precision cannot hold goes to one of its
two neighbours with even odds; results it can hold (copies, masks, small integers) stay exact. The
operands of products are also moved by up to the error of accumulating them, so that the order of a
sum counts too. Each seed is a legitimate evaluation of the same graph in that precision, whatever
the runtime, and needs no kernel of that type: this is how bf16 is judged where nothing computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.bounds import numpy_dtype, unit_roundoff
from mha_export.spec import DType
from mha_export.targets.reference import evaluator_for

_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum", "Conv", "Attention"))
LANES = 16
"""Partial sums that even a plain kernel keeps side by side."""

Arrays = Mapping[str, np.ndarray]


class RoundedModel:
    """A float64 model whose runs round every result at random.

    Args:
        model_64: as :func:`mha_export.measure._float64.with_float64` makes it.
        dtype: precision of values that ``of`` does not name.
        of: precision of a value by its name, where the original states one.
    """

    def __init__(self, model_64: ir.Model, *, dtype: DType, of: Mapping[str, DType]) -> None:
        self._reference = evaluator_for(model_64)
        self._stream = np.random.default_rng(0)
        for node in self._reference.rt_nodes_:
            precision = of.get(node.onnx_node.output[0], dtype)
            node.run = partial(self._run, node.run, node.op_type, precision)

    def run(self, inputs: Arrays, *, seed: int) -> dict[str, np.ndarray]:
        """Outputs by name. ``inputs`` are float64 (integers and booleans as they are)."""
        self._stream = np.random.default_rng([seed, 7])
        names = self._reference.output_names
        feeds = {name: inputs[name] for name in self._reference.input_names}
        with np.errstate(all="ignore"):
            results = self._reference.run(None, feeds)
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    def _run(
        self, run: Callable[..., Any], op_type: str, dtype: DType, *inputs: Any, **settings: Any
    ) -> Any:
        if op_type in _PRODUCTS:
            inputs = tuple(_jittered(array, self._stream) for array in inputs)
        outputs = run(*inputs, **settings)
        return tuple(rounded(output, dtype, self._stream) for output in outputs)


def _jittered(array: Any, stream: np.random.Generator) -> Any:
    """Operands off by what accumulating their products in fp32 costs."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float64 or array.ndim < 2:
        return array
    size = unit_roundoff(DType.FP32) * np.sqrt(1.0 + array.shape[-1] / LANES)
    noise = stream.random(array.shape, dtype=np.float32)
    return array * (1.0 + size * (2.0 * noise - 1.0))


def rounded(array: Any, dtype: DType, stream: np.random.Generator) -> Any:
    """Each entry of a float64 array at one of its two neighbours in ``dtype``, by even odds.

    Entries ``dtype`` holds stay; nothing that rounds to a finite number is sent to infinity.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.float64 or dtype is DType.FP64:
        return array
    narrow = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        nearest = array.astype(narrow)
        back = nearest.astype(np.float64)
        inexact = (back != array) & np.isfinite(back)
        if not inexact.any():
            return back
        away = np.where(array > back, np.inf, -np.inf).astype(narrow)
        other = np.nextafter(nearest, away).astype(np.float64)
    swap = inexact & np.isfinite(other) & (stream.random(array.shape, dtype=np.float32) < 0.5)
    return np.where(swap, other, back)
