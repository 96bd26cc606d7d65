"""qk-norm around a form: RMS, layer or L2, over each head or over all of them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_export.forms._layout import as_layout, floating, four_dimensional, numpy_dtype, reduce
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout, ir_dtype
from mha_export.spec import DType, QkNormSpec

_NARROW = (DType.FP16, DType.BF16)


def normalise(
    scope: Scope,
    norm: QkNormSpec,
    heads: Heads,
    dtype: DType,
    weight: ir.Value | None,
    bias: ir.Value | None,
    *,
    op: bool,
) -> Heads:
    """The heads after qk-norm; 16-bit values are normalised in fp32 and cast back before weighting.

    ``op``: use RMSNormalization-23 where the opset has it.
    """
    if norm.over == "hidden":
        heads = as_layout(scope, heads, Layout.BSM)
        width = heads.heads * heads.dim
    else:
        heads = four_dimensional(scope, heads)
        width = heads.dim
    if norm.kind == "rms" and op and scope.opset >= 23 and bias is None:
        if weight is None:
            weight = scope.constant(np.ones(width, numpy_dtype(dtype)), hint="ones")
        attributes = {"epsilon": norm.epsilon, "axis": -1}
        value = scope.op(
            "RMSNormalization", [heads.value, weight], attributes, dtype=heads.value.dtype
        )
    else:
        value = _plain(scope, norm, heads.value, dtype, weight, bias)
    return Heads(value=value, layout=heads.layout, heads=heads.heads, dim=heads.dim)


def _plain(
    scope: Scope,
    norm: QkNormSpec,
    value: ir.Value,
    dtype: DType,
    weight: ir.Value | None,
    bias: ir.Value | None,
) -> ir.Value:
    wide = DType.FP32 if dtype in _NARROW else dtype
    x = value if wide is dtype else _to(scope, value, wide)
    out = ir_dtype(wide)
    if norm.kind == "l2":
        length = reduce(scope, "ReduceL2", x, [-1])
        floor = floating(scope, norm.epsilon, wide)
        y = scope.op("Div", [x, scope.op("Max", [length, floor], dtype=out)], dtype=out)
    else:
        if norm.kind == "layer":
            x = scope.op("Sub", [x, reduce(scope, "ReduceMean", x, [-1])], dtype=out)
        square = scope.op("Mul", [x, x], dtype=out)
        mean = reduce(scope, "ReduceMean", square, [-1])
        floored = scope.op("Add", [mean, floating(scope, norm.epsilon, wide)], dtype=out)
        y = scope.op("Div", [x, scope.op("Sqrt", [floored], dtype=out)], dtype=out)
    y = y if wide is dtype else _to(scope, y, dtype)
    if weight is not None:
        y = scope.op("Mul", [y, weight], dtype=ir_dtype(dtype))
    if bias is not None:
        y = scope.op("Add", [y, bias], dtype=ir_dtype(dtype))
    return y


def _to(scope: Scope, value: ir.Value, dtype: DType) -> ir.Value:
    return scope.op("Cast", [value], {"to": ir_dtype(dtype).value}, dtype=ir_dtype(dtype))
