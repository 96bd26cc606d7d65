"""Onnx's reference evaluator with the one operator it gets wrong put right.

``GatherElements`` of onnx 1.23 fails on some shapes whose first axis is 1; numpy says it in a line.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.targets.reference import evaluator_for


def repaired_evaluator(model: ir.Model) -> Any:
    """A ``ReferenceEvaluator`` of ``model``; its ``rt_nodes_`` may be wrapped further."""
    reference = evaluator_for(model)
    for node in reference.rt_nodes_:
        if node.op_type == "GatherElements":
            axis = next((a.i for a in node.onnx_node.attribute if a.name == "axis"), 0)
            node.run = partial(_gather_elements, axis=axis)
    return reference


class ReferenceRun:
    """One model, run as often as asked."""

    def __init__(self, model: ir.Model) -> None:
        self._reference = repaired_evaluator(model)

    def run(self, inputs: Any) -> dict[str, np.ndarray]:
        """Outputs by name.

        Errors:
            Exception: the evaluator's own.
        """
        names = self._reference.output_names
        feeds = {name: inputs[name] for name in self._reference.input_names}
        with np.errstate(all="ignore"):
            results = self._reference.run(None, feeds)
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}


def _gather_elements(
    data: np.ndarray, indices: np.ndarray, *, axis: int, **_: Any
) -> tuple[np.ndarray]:
    """``out[i, j] = data[i, indices[i, j]]`` along ``axis``; ``data`` may be longer elsewhere."""
    axis %= data.ndim
    limits = [slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape)]
    wrapped = np.where(indices < 0, indices + data.shape[axis], indices)
    return (np.take_along_axis(data[tuple(limits)], wrapped, axis=axis),)
