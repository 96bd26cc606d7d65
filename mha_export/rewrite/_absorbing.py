"""Where a mask's minimum is added to the scores of an attention.

fp32's minimum absorbs every score, so that a row without keys becomes a mean. fp16's does not: its
steps are 32 there, and runtimes that add in fp32 give such a row its unmasked softmax. So in a cast
to fp16 these additions, and the softmax after them, stay fp32, and so does the mask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

_ABSORBS = -1e38
_ADDS = frozenset({"Add", "Sub", "Where"})
_ON_THE_WAY = _ADDS | {
    *("Cast", "Div", "Expand", "Identity", "Max", "Min", "Mul"),
    *("Reshape", "Squeeze", "Transpose", "Unsqueeze"),
}
_SMALL = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Absorbing:
    """Values that stay fp32, and the constants that are read by nothing else."""

    wide: frozenset[ir.Value]
    constants: frozenset[ir.Value]


def absorbing(nodes: Iterable[ir.Node], active: Collection[ir.Value]) -> Absorbing:
    """From each addition of a minimum to the softmax behind it.

    Args:
        nodes: all nodes, each after those it reads.
        active: the values that hold activations; masks are those that do not.
    """
    roots: dict[ir.Value, frozenset[ir.Value]] = {}
    wide: set[ir.Value] = set()
    kept: set[ir.Value] = set()
    elsewhere: set[ir.Value] = set()
    for node in nodes:
        minima = _minima_read(node, roots, active)
        if not any(value in active for value in node.outputs):
            roots.update((value, minima) for value in node.outputs)
        elif minima:
            path = _to_softmax(node) if node.op_type in _ADDS else []
            wide.update(path)
            (kept if path else elsewhere).update(minima)
    return Absorbing(wide=frozenset(wide), constants=frozenset(kept - elsewhere))


def _minima_read(
    node: ir.Node, roots: dict[ir.Value, frozenset[ir.Value]], active: Collection[ir.Value]
) -> frozenset[ir.Value]:
    """The constants at fp32's minimum from which the node's masks are computed."""
    if node.op_type == "Constant":
        return frozenset(v for v in node.outputs if _is_minimum(v.const_value))
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        found = fill is not None and _is_minimum(fill.as_tensor())
        return frozenset(node.outputs) if found else frozenset()
    minima: set[ir.Value] = set()
    for value in node.inputs:
        if value is None or value in active:
            continue
        if value in roots:
            minima |= roots[value]
        elif value.producer() is None and _is_minimum(value.const_value):
            minima.add(value)
    return frozenset(minima)


def _is_minimum(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT or tensor.size > _SMALL:
        return False
    array = tensor.numpy()
    return bool(np.any(np.isfinite(array) & (array <= _ABSORBS)))


def _to_softmax(node: ir.Node) -> list[ir.Value]:
    """The values from an addition to the softmax it ends in, the softmax's own too, or none."""
    path: list[ir.Value] = []
    while node.domain == "":
        path.append(node.outputs[0])
        if node.op_type == "Softmax":
            return path
        readers = {reader for reader, _ in node.outputs[0].uses()}
        if node.op_type not in _ON_THE_WAY or len(readers) != 1:
            return []
        (node,) = readers
    return []
