"""Where a form writes: typed node construction on top of ``onnx_ir.tape``.

Nodes and initializers are collected in order; the caller (``build`` or the rewriter) places them
in a graph. Every value made here gets a stable, readable name: ``<prefix>.<op>_<n>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

if TYPE_CHECKING:
    import numpy as np

MICROSOFT = "com.microsoft"


class Scope:
    """Collects the nodes and initializers of one emission.

    Args:
        prefix: put before every node and value name (``layer.0.self``).
        opset: version of the default domain the nodes are written for.
    """

    def __init__(self, prefix: str, *, opset: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        """Model-local functions the nodes rely on; the caller merges them into the model."""
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple[str, str, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | None = None,
    ) -> ir.Value:
        """Append a node with one output and return it."""
        (value,) = self.op_multi(
            op_type, inputs, attributes, domain=domain, outputs=[(dtype, shape)]
        )
        return value

    def op_multi(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: Sequence[tuple[ir.DataType | None, Sequence[int | str | None] | None] | None],
    ) -> list[ir.Value]:
        """Append a node with several outputs; an output given as None is left unnamed (omitted)."""
        name = self._fresh(op_type)
        values: list[ir.Value] = []
        for index, output in enumerate(outputs):
            if output is None:
                values.append(ir.Value(name=""))
                continue
            dtype, shape = output
            values.append(
                ir.Value(
                    name=name if index == 0 else f"{name}:{index}",
                    type=None if dtype is None else ir.TensorType(dtype),
                    shape=None if shape is None else ir.Shape(shape),
                )
            )
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        self.nodes.append(
            ir.Node(
                domain,
                op_type,
                trimmed,
                ir.convenience.convert_attributes(dict(attributes or {})),
                outputs=values,
                name=name,
            )
        )
        return values

    def constant(self, array: np.ndarray, *, hint: str = "const") -> ir.Value:
        """An initializer holding ``array``; equal arrays share one."""
        key = (hint, array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._fresh(hint)
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(array.shape),
                const_value=tensor,
            )
            self._constants[key] = value
            self.initializers.append(value)
        return self._constants[key]

    def _fresh(self, stem: str) -> str:
        count = self._counts.get(stem, 0)
        self._counts[stem] = count + 1
        return f"{self.prefix}.{stem}_{count}" if self.prefix else f"{stem}_{count}"
