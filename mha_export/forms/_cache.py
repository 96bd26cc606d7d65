"""Growing a cache outside a fused op: by concatenation, or by writing into a buffer in place."""

from __future__ import annotations

import onnx_ir as ir

from mha_export.forms._layout import (
    LENGTH_AXIS,
    Sizes,
    as_layout,
    cast,
    dimension,
    unsqueeze,
)
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout
from mha_export.spec import AttentionSpec

_INT64 = ir.DataType.INT64


def append(
    scope: Scope,
    spec: AttentionSpec,
    past: Heads,
    new: Heads,
    kv_lengths: ir.Value | None,
    sizes: Sizes,
    *,
    op: bool,
) -> Heads:
    """Past and new tokens as one tensor in the past's layout.

    ``concat``: present = past ++ new.
    ``static``: ``present[b, :, kv_lengths[b] - n + j] = new[b, :, j]``.

    ``op`` writes a static cache with TensorScatter-24 where the opset has it, else ScatterElements.
    """
    new = as_layout(scope, new, past.layout)
    axis = LENGTH_AXIS[past.layout]
    assert spec.cache is not None
    if spec.cache.growth == "concat":
        inputs = [past.value, new.value]
        value = scope.op("Concat", inputs, {"axis": axis}, dtype=new.value.dtype)
    else:
        assert kv_lengths is not None
        start = scope.op(
            "Sub",
            [cast(scope, kv_lengths, _INT64), dimension(scope, new.value, axis)],
            dtype=_INT64,
        )
        write = _tensor_scatter if op and scope.opset >= 24 else _scatter_elements
        value = write(scope, past, new, start, axis, sizes)
    return Heads(value=value, layout=past.layout, heads=past.heads, dim=past.dim)


def _tensor_scatter(
    scope: Scope, past: Heads, new: Heads, start: ir.Value, axis: int, sizes: Sizes
) -> ir.Value:
    inputs = [past.value, new.value, start]
    return scope.op("TensorScatter", inputs, {"axis": axis}, dtype=new.value.dtype)


def _scatter_elements(
    scope: Scope, past: Heads, new: Heads, start: ir.Value, axis: int, sizes: Sizes
) -> ir.Value:
    steps = sizes.range(dimension(scope, new.value, axis))
    at = scope.op("Add", [unsqueeze(scope, start, 1), steps], dtype=_INT64)
    rows = unsqueeze(scope, at, 1, 3) if past.layout is Layout.BHSD else unsqueeze(scope, at, 2, 3)
    shape = scope.op("Shape", [new.value], dtype=_INT64)
    indices = scope.op("Expand", [rows, shape], dtype=_INT64)
    inputs = [past.value, indices, new.value]
    return scope.op("ScatterElements", inputs, {"axis": axis}, dtype=new.value.dtype)
