"""One graph as the laws of recognition see it: sizes, views, small contents, element types."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from mha_export.recognise._axes import View, broadcast_to, identity
from mha_export.recognise._evaluate import Context
from mha_export.recognise._lengths import Lengths
from mha_export.recognise._movement import Views
from mha_export.recognise._shapes import Shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A graph at one choice of sizes.

    Attributes:
        context: what recognition by evaluation knows; shared by the scenes of one graph.
        lengths: which contents follow from the sizes; shared likewise.
    """

    shapes: Shapes
    views: Views
    context: Context
    lengths: Lengths
    _dtypes: dict[ir.Value, ir.DataType | None] = field(default_factory=dict)

    def dims(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape; None where it is unknown or, at these sizes, empty."""
        dims = self.shapes.dims(value)
        return None if dims is None or 0 in dims else dims

    def uniform(self, value: ir.Value | None) -> float | None:
        """The one number that every element of ``value`` is at any size, or None."""
        if value is None:
            return None
        number, holder = self._number(value)
        return None if holder is not None and self.lengths.decide(holder) else number

    def number(self, value: ir.Value | None) -> float | None:
        """The one number that every element of ``value`` is at these sizes, or None."""
        return None if value is None else self._number(value)[0]

    def _number(self, value: ir.Value) -> tuple[float | None, ir.Value | None]:
        """The number, and the value whose content says so."""
        holder = value
        content = self.shapes.content(value)
        if content is None:
            holder = self.views.source(value)
            content = self.shapes.content(holder)
            node = holder.producer()
            if content is None and node is not None:
                if node.op_type == "ConstantOfShape":
                    filled = node.attributes.get_tensor("value", None)
                    content = np.zeros(1) if filled is None else np.asarray(filled.numpy())
                elif node.op_type in ("Cast", "CastLike"):
                    assert node.inputs[0] is not None
                    return self._number(node.inputs[0])
                elif node.op_type == "Mul" and 0.0 in map(self.uniform, node.inputs):
                    return 0.0, None
        if content is None or content.size == 0 or content.dtype.kind in "US":
            return None, None
        first = content.reshape(-1)[0]
        if content.size > 1 and not np.all(content == first):
            return None, None
        return float(first), holder

    def spread(self, value: ir.Value, dims: tuple[int, ...]) -> View | None:
        """``value`` broadcast to ``dims``, as a view of itself."""
        own = self.dims(value)
        return None if own is None else broadcast_to(identity(value, own), dims)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type, followed up the graph where the file does not say."""
        chain: list[ir.Value] = []
        current: ir.Value | None = value
        found: ir.DataType | None = None
        while current is not None:
            if current in self._dtypes:
                found = self._dtypes[current]
                break
            chain.append(current)
            if current.dtype is not None:
                found = current.dtype
                break
            current, found = type_source(current)
            if found is not None:
                break
        for passed in chain:
            self._dtypes[passed] = found
        return found


def type_source(value: ir.Value) -> tuple[ir.Value | None, ir.DataType | None]:
    """Where the element type of ``value`` comes from: an input, or the op itself."""
    node = value.producer()
    if node is None:
        return None, None
    if node.op_type == "Cast":
        return None, ir.DataType(node.attributes.get_int("to", int(ir.DataType.FLOAT)))
    if node.op_type in ("Shape", "Size", "ArgMax", "ArgMin", "NonZero"):
        return None, ir.DataType.INT64
    if node.op_type in _BOOLEAN:
        return None, ir.DataType.BOOL
    if node.op_type == "ConstantOfShape":
        tensor = node.attributes.get_tensor("value", None)
        return None, ir.DataType.FLOAT if tensor is None else tensor.dtype
    if node.op_type == "CastLike":
        return node.inputs[1], None
    if node.op_type == "Where":
        return node.inputs[1], None
    if node.op_type == "DequantizeLinear":
        return node.inputs[1], None
    return (node.inputs[0] if node.inputs else None), None


_BOOLEAN = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor",
     "IsNaN", "IsInf"}
)  # fmt: skip
