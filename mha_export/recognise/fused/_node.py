"""What every reader needs of a fused node: inputs, attributes, widths, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout, dtype_of
from mha_export.recognise import _region
from mha_export.recognise._evaluate import Context
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._scene import type_source
from mha_export.recognise._site import Reason, Rejection, Site
from mha_export.spec import Dim, DType


class Refused(Exception):  # noqa: N818 - a verdict on its way up, not an error
    """The node's meaning can't be stated; caught by :func:`read_fused`, never by a user."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads one op.

    Attributes:
        read: the site, or raises :class:`Refused`.
    """

    domain: str
    op_type: str
    read: Callable[[FusedNode], Site | Rejection]


class FusedNode:
    """One fused node and the graph it stands in."""

    def __init__(self, node: ir.Node, context: Context) -> None:
        self.node = node
        self.context = context
        self.attributes: dict[str, Any] = attributes_of(node)
        self.sizes = self._sizes()

    def _sizes(self) -> dict[str, int]:
        first = self.node.inputs[0]
        found = None if first is None else _region.sizes_of(self.context, first)
        return dict(found or {})

    def input(self, index: int) -> ir.Value | None:
        """Input ``index``, None where it is omitted or left off the end."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return None if value is None or value.name == "" else value

    def required(self, index: int, name: str) -> ir.Value:
        value = self.input(index)
        if value is None:
            self.refuse("input-missing", f"input {name} is missing", f"give {name}")
        return value

    def output(self, index: int) -> ir.Value | None:
        """Output ``index`` where anything reads it, None where it is unused or unnamed."""
        if index >= len(self.node.outputs):
            return None
        value = self.node.outputs[index]
        return value if value.name and (value.uses() or value.is_graph_output()) else None

    def number(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def whole(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape at some sizes; only dimensions that are the same at all sizes mean anything."""
        return self.context.sized(self.sizes).shape(value)

    def rank(self, value: ir.Value) -> int:
        shape = self.shape(value)
        if shape is not None:
            return len(shape)
        if value.shape is None:
            self.refuse("rank-unknown", f"the rank of {value.name} is unknown", value=value)
        return len(value.shape)

    def width(self, value: ir.Value, axis: int = -1) -> int:
        """A dimension that is a number in the graph."""
        if value.shape is not None and isinstance(found := value.shape[axis], int):
            return found
        shape = self.shape(value)
        if shape is None:
            self.refuse(
                "width-unknown", f"axis {axis} of {value.name} has no known size", value=value
            )
        return shape[axis]

    def dim(self, value: ir.Value | None, axis: int, default: str) -> Dim:
        """The dimension as the graph names it."""
        if value is None or value.shape is None or axis >= len(value.shape):
            return default
        found = value.shape[axis]
        if isinstance(found, int):
            return found
        return found.value or default

    def element(self, value: ir.Value) -> ir.DataType | None:
        """The element type, followed up the graph where the file does not say."""
        current: ir.Value | None = value
        while current is not None and current.dtype is None:
            current, found = type_source(current)
            if found is not None:
                return found
        return None if current is None else current.dtype

    def dtype(self, value: ir.Value) -> DType:
        element = self.element(value)
        if element is None:
            return DType.FP32
        dtype = dtype_of(element)
        if dtype is None:
            self.refuse("dtype", f"{value.name} is {element}; expected a float type")
        return dtype

    def heads(self, value: ir.Value, layout: Layout, count: int) -> Heads:
        """``value`` as heads, its head width read off its last axis."""
        width = self.width(value)
        if layout is not Layout.BSM:
            return Heads(value=value, layout=layout, heads=count, dim=width)
        if count < 1 or width % count:
            self.refuse(
                "heads-uneven", f"{value.name} is {width} wide, which {count} heads can't share"
            )
        return Heads(value=value, layout=layout, heads=count, dim=width // count)

    def refuse(
        self, code: str, message: str, needs: str = "", *, value: ir.Value | None = None
    ) -> NoReturn:
        """Give up on this node, with what stops it.

        Errors:
            Refused: always.
        """
        text = f"{self.node.op_type} {self.node.name}: {message}"
        raise Refused(
            Reason(
                code=code,
                message=f"{text}; {needs}" if needs else text,
                value=None if value is None else value.name,
                nodes=(self.node.name or self.node.op_type,),
            )
        )

    def derive(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | np.ndarray | None],
        attributes: dict[str, Any] | None = None,
        *,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | None = None,
    ) -> ir.Value:
        """One value that the node computes inside and its operands need."""
        (value,) = self.context.derive(op_type, inputs, attributes, before=self.node)
        if dtype is not None:
            value.type = ir.TensorType(dtype)
        if shape is not None:
            value.shape = ir.Shape(shape)
        return value


def short(number: float) -> float:
    """The shortest decimal that is the same number in fp32 (attributes are fp32)."""
    return float(str(np.float32(number)))
