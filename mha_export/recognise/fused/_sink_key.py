"""A sink said as one more key: zeros after all keys and values, its bias a number a head.

Such a key scores 0 plus its bias and adds nothing to the output, so that it is exactly a sink. The
bias of all other keys is what the mask input holds before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise.fused._node import FusedNode

_WIDENING = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkKey:
    """Keys and values without the extra one, the mask of the others, and the sinks [h]."""

    key: Heads
    value: Heads
    mask: ir.Value
    sinks: ir.Value


def sink_key(
    fused: FusedNode, key: Heads, value: Heads, mask: ir.Value | None, heads: int
) -> SinkKey | None:
    """The sink that the last key is; None where it is a key like the others."""
    node = None if mask is None else mask.producer()
    if mask is None or node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    wide, column = node.inputs
    rank = fused.rank(mask)
    if wide is None or column is None or node.attributes["axis"].as_int() % rank != rank - 1:
        return None
    sinks = _per_head(fused, column, heads)
    inner = [_unpadded(fused, one) for one in (key, value)]
    if sinks is None or inner[0] is None or inner[1] is None:
        return None
    return SinkKey(key=inner[0], value=inner[1], mask=wide, sinks=sinks)


def _per_head(fused: FusedNode, column: ir.Value, heads: int) -> ir.Value | None:
    """The [h] that every entry of a [b, h, s, 1] is."""
    shape = fused.shape(column)
    if shape is None or len(shape) != 4 or shape[1] != heads or shape[-1] != 1:
        return None
    root: ir.Value | None = column
    while root is not None and fused.shape(root) != (heads,):
        node = root.producer()
        if node is None or node.op_type not in _WIDENING:
            return None
        root = node.inputs[0]
    if root is None or fused.element(root) != fused.element(column):
        return None
    numbers = np.arange(heads, dtype=np.float64) + 0.5
    view = fused.context.sized(fused.sizes, {root: numbers}, wide=True)
    found = view.array(column)
    expected = np.broadcast_to(numbers.reshape(1, heads, 1, 1), shape)
    return root if found is not None and np.array_equal(found, expected) else None


def _unpadded(fused: FusedNode, heads: Heads) -> Heads | None:
    """The heads before one position of zeros was put after them."""
    value, layout = heads.value, heads.layout
    while (node := value.producer()) is not None:
        inner = node.inputs[0]
        if inner is None:
            return None
        if node.op_type == "Pad":
            before = _pad_of_one(fused, node, 2 if layout is Layout.BHSD else 1)
            return None if before is None else replace(heads, value=before, layout=layout)
        if node.op_type == "Transpose" and layout is not Layout.BSM:
            perm = node.attributes.get("perm")
            if perm is None or list(perm.as_ints()) != [0, 2, 1, 3]:
                return None
            layout = Layout.BSHD if layout is Layout.BHSD else Layout.BHSD
        elif node.op_type == "Reshape" and layout is Layout.BSM:
            below, above = fused.shape(inner), fused.shape(value)
            if below is None or above is None or below != (*above[:2], heads.heads, heads.dim):
                return None
            layout = Layout.BSHD
        elif node.op_type != "Identity":
            return None
        value = inner
    return None


def _pad_of_one(fused: FusedNode, node: ir.Node, axis: int) -> ir.Value | None:
    """What a Pad with zeros makes one longer along ``axis``, at the end."""
    value, *rest = [*node.inputs, None, None][:4]
    pads = None if rest[0] is None else fused.context.constant(rest[0])
    rank = None if value is None else fused.rank(value)
    if value is None or pads is None or rank is None or pads.size != 2 * rank:
        return None
    filler = None if rest[1] is None else fused.context.constant(rest[1])
    mode = _mode(node)
    if mode != "constant" or rest[2] is not None:
        return None
    if rest[1] is not None and (filler is None or np.any(filler)):
        return None
    wanted = np.zeros(2 * rank, np.int64)
    wanted[rank + axis] = 1
    return value if np.array_equal(pads.reshape(-1), wanted) else None


def _mode(node: ir.Node) -> str:
    mode = node.attributes.get("mode")
    return "constant" if mode is None else mode.as_string()
