"""A sink said as one more key: all-zero key and value whose bias is the sink.

The extra key scores ``scale * q . 0 = 0`` (and 0 after softcap), plus its bias: the sink. It adds
``exp(sink)`` to the denominator and nothing to the output. Exact, and the cache stays without it.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_export.forms._layout import Sizes, as_layout, floating, ints, unsqueeze
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout
from mha_export.spec import AttentionSpec


def with_extra_key(scope: Scope, heads: Heads) -> Heads:
    """[b, k, t + 1, x]: one more key (or value) of zeros at the end."""
    heads = as_layout(scope, heads, Layout.BHSD)
    pads = ints(scope, 0, 0, 0, 0, 0, 0, 1, 0)
    value = scope.op("Pad", [heads.value, pads], dtype=heads.value.dtype)
    return Heads(value=value, layout=Layout.BHSD, heads=heads.heads, dim=heads.dim)


def with_sink_column(
    scope: Scope, spec: AttentionSpec, sizes: Sizes, additive: ir.Value | None, sinks: ir.Value
) -> ir.Value:
    """[b or 1, h, s, t + 1]: the additive mask, and the sinks as the bias of the extra key."""
    base = floating(scope, 0.0, spec.io_dtype) if additive is None else additive
    one, heads = ints(scope, 1), ints(scope, spec.q_heads)
    int64 = ir.DataType.INT64
    shape = scope.op("Concat", [one, heads, sizes.q, sizes.kv], {"axis": 0}, dtype=int64)
    wide = scope.op("Expand", [base, shape], dtype=sinks.dtype)
    lead = scope.op(
        "Slice",
        [scope.op("Shape", [wide], dtype=int64), ints(scope, 0), ints(scope, 3)],
        dtype=int64,
    )
    column_shape = scope.op("Concat", [lead, one], {"axis": 0}, dtype=int64)
    column = scope.op("Expand", [unsqueeze(scope, sinks, 0, 2, 3), column_shape], dtype=sinks.dtype)
    return scope.op("Concat", [wide, column], {"axis": -1}, dtype=sinks.dtype)
