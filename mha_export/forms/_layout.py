"""Sizes, axis orders and element types of the tensors a form works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType

_LOWEST = {
    dtype: float(ml_dtypes.finfo(ir_dtype(dtype).numpy()).min)  # type: ignore[no-untyped-call]
    for dtype in DType
}

LENGTH_AXIS = {Layout.BSM: 1, Layout.BSHD: 1, Layout.BHSD: 2}


def numpy_dtype(dtype: DType) -> np.dtype:
    """The numpy element type of a spec's dtype (bfloat16 from ``ml_dtypes``)."""
    return ir_dtype(dtype).numpy()


def lowest(dtype: DType) -> float:
    """The dtype's minimum: what ``fill: min`` stands for."""
    return _LOWEST[dtype]


def ints(scope: Scope, *values: int) -> ir.Value:
    """A 1-D int64 constant."""
    return scope.constant(np.array(values, dtype=np.int64), hint="ints")


def floating(scope: Scope, value: float | Sequence[float], dtype: DType) -> ir.Value:
    """A scalar or 1-D constant of the dtype."""
    return scope.constant(np.array(value, dtype=numpy_dtype(dtype)), hint="const")


def unsqueeze(scope: Scope, value: ir.Value, *axes: int) -> ir.Value:
    return scope.op("Unsqueeze", [value, ints(scope, *axes)], dtype=value.dtype)


def cast(scope: Scope, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """``value`` as ``dtype``; nothing is emitted when its known type already is that."""
    if value.dtype == dtype:
        return value
    return scope.op("Cast", [value], {"to": dtype.value}, dtype=dtype)


def reduce(
    scope: Scope, op_type: str, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True
) -> ir.Value:
    """A reduction; its axes are an attribute up to opset 17 and an input from 18 on."""
    attributes: dict[str, object] = {"keepdims": int(keepdims)}
    if scope.opset >= 18:
        return scope.op(op_type, [value, ints(scope, *axes)], attributes, dtype=value.dtype)
    attributes["axes"] = list(axes)
    return scope.op(op_type, [value], attributes, dtype=value.dtype)


def dimension(scope: Scope, value: ir.Value, axis: int) -> ir.Value:
    """Size of one axis as an int64 tensor of shape [1]: a constant where the shape is static."""
    known = None if value.shape is None or len(value.shape) <= axis else value.shape[axis]
    if isinstance(known, int):
        return ints(scope, known)
    if scope.opset >= 15:
        attributes = {"start": axis, "end": axis + 1}
        return scope.op("Shape", [value], attributes, dtype=ir.DataType.INT64, shape=[1])
    shape = scope.op("Shape", [value], dtype=ir.DataType.INT64)
    return scope.op("Gather", [shape, ints(scope, axis)], dtype=ir.DataType.INT64, shape=[1])


class Sizes:
    """The run-time sizes of one attention, each an int64 tensor of shape [1], emitted once.

    ``kv`` counts the past; a static cache counts its whole buffer.
    """

    def __init__(self, scope: Scope, spec: AttentionSpec, operands: Operands) -> None:
        self._scope = scope
        self._spec = spec
        self._operands = operands
        self._made: dict[str, ir.Value] = {}

    @property
    def batch(self) -> ir.Value:
        return self._once("batch", lambda: dimension(self._scope, self._operands.query.value, 0))

    @property
    def q(self) -> ir.Value:
        return self._once("q", lambda: self._length(self._operands.query))

    @property
    def past(self) -> ir.Value:
        """Length of the ``past_key`` operand."""
        assert self._operands.past_key is not None
        past_key = self._operands.past_key
        return self._once("past", lambda: self._length(past_key))

    @property
    def kv(self) -> ir.Value:
        return self._once("kv", self._kv)

    def range(self, size: ir.Value) -> ir.Value:
        """0, 1, ... ``size`` - 1 for a size of shape [1]."""
        scope = self._scope
        scalar = scope.op("Squeeze", [size, ints(scope, 0)], dtype=ir.DataType.INT64, shape=[])
        start, step = (scope.constant(np.array(n, np.int64), hint="int") for n in (0, 1))
        return scope.op("Range", [start, scalar, step], dtype=ir.DataType.INT64)

    def _kv(self) -> ir.Value:
        new = self._operands.key
        if self._operands.past_key is None:
            return self._length(new)
        assert self._spec.cache is not None
        if self._spec.cache.growth != "concat":
            return self.past
        return self._scope.op(
            "Add", [self.past, self._length(new)], dtype=ir.DataType.INT64, shape=[1]
        )

    def _length(self, heads: Heads) -> ir.Value:
        return dimension(self._scope, heads.value, LENGTH_AXIS[heads.layout])

    def _once(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def as_layout(scope: Scope, heads: Heads, layout: Layout) -> Heads:
    """The same heads in another axis order; nothing is emitted when they are already in it."""
    if heads.layout is layout:
        return heads
    dtype = heads.value.dtype
    value = heads.value
    if heads.layout is Layout.BSM:
        value = scope.op("Reshape", [value, ints(scope, 0, 0, heads.heads, heads.dim)], dtype=dtype)
    elif heads.layout is Layout.BHSD:
        value = _swap(scope, value)
    if layout is Layout.BSM:
        value = scope.op(
            "Reshape", [value, ints(scope, 0, 0, heads.heads * heads.dim)], dtype=dtype
        )
    elif layout is Layout.BHSD:
        value = _swap(scope, value)
    return Heads(value=value, layout=layout, heads=heads.heads, dim=heads.dim)


def _swap(scope: Scope, value: ir.Value) -> ir.Value:
    return scope.op("Transpose", [value], {"perm": [0, 2, 1, 3]}, dtype=value.dtype)


def four_dimensional(scope: Scope, heads: Heads) -> Heads:
    """The heads with an axis of their own: ``bsm`` becomes ``bshd``, the others stay."""
    return as_layout(scope, heads, Layout.BSHD) if heads.layout is Layout.BSM else heads


def repeat_kv(scope: Scope, heads: Heads, q_heads: int) -> Heads:
    """Every key/value head once for each of its query heads: ``[k0, k0, k1, k1]``, interleaved."""
    if heads.heads == q_heads:
        return heads
    group, layout, dtype = q_heads // heads.heads, heads.layout, heads.value.dtype
    split = four_dimensional(scope, heads)
    axis = 2 if split.layout is Layout.BHSD else 3
    wide = unsqueeze(scope, split.value, axis)
    ones = [1] * 5
    ones[axis] = group
    wide = scope.op("Expand", [wide, ints(scope, *ones)], dtype=dtype)
    if layout is Layout.BHSD:
        shape = [0, q_heads, -1, heads.dim]
    elif layout is Layout.BSHD:
        shape = [0, 0, q_heads, heads.dim]
    else:
        shape = [0, 0, q_heads * heads.dim]
    value = scope.op("Reshape", [wide, ints(scope, *shape)], dtype=dtype)
    return Heads(value=value, layout=layout, heads=q_heads, dim=heads.dim)


def transposed_keys(scope: Scope, key: Heads) -> ir.Value:
    """Kᵀ [b, k, d, t] in one Transpose."""
    key = four_dimensional(scope, key)
    perm = [0, 2, 3, 1] if key.layout is Layout.BSHD else [0, 1, 3, 2]
    return scope.op("Transpose", [key.value], {"perm": perm}, dtype=key.value.dtype)
