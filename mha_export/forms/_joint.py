"""The linear layers of two streams that attend together (MMDiT), and the two apart again."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_export.forms._layout import as_layout, dimension, ints
from mha_export.forms._norm import normalise
from mha_export.forms._project import Weights, linear
from mha_export.forms._scope import Scope
from mha_export.forms._weights import SECOND_STREAM
from mha_export.operands import Heads, Layout, ir_dtype
from mha_export.spec import AttentionSpec, JointSpec

_INT64 = ir.DataType.INT64
_END = int(np.iinfo(np.int64).max)


def project_joint(
    scope: Scope,
    spec: AttentionSpec,
    joint: JointSpec,
    weights: Weights,
    streams: tuple[ir.Value, ir.Value],
) -> tuple[Heads, Heads, Heads]:
    """Query, key and value of both streams, joined along the length, the first stream first."""
    first, second = (
        _stream(scope, spec, joint, _weights_of(weights, index), x)
        for index, x in enumerate(streams)
    )
    query, key, value = (
        _joined(scope, one, other) for one, other in zip(first, second, strict=True)
    )
    return query, key, value


def leave_joint(
    scope: Scope,
    spec: AttentionSpec,
    joint: JointSpec,
    weights: Weights,
    output: Heads,
    x: ir.Value,
) -> list[ir.Value]:
    """The output of the first stream, and of the second where it leaves: each by its own W_O.

    Args:
        scope: where the nodes go.
        spec: the attention.
        joint: its streams.
        weights: of both.
        output: of the attention, over all tokens.
        x: what came in by the first stream: it tells where to cut.
    """
    assert spec.projections is not None
    merged = as_layout(scope, output, Layout.BSM).value
    cut = dimension(scope, x, 1)
    spans = [(ints(scope, 0), cut)]
    if joint.output:
        spans.append((cut, ints(scope, _END)))
    outputs = []
    for index, (start, end) in enumerate(spans):
        inputs = [merged, start, end, ints(scope, 1)]
        part = scope.op("Slice", inputs, dtype=merged.dtype)
        if spec.projections.output:
            own = _weights_of(weights, index)
            part = linear(scope, part, own, "o", dtype=ir_dtype(spec.io_dtype))
        outputs.append(part)
    return outputs


def _weights_of(weights: Weights, index: int) -> Weights:
    if index == 0:
        return weights
    return {
        name.removeprefix(SECOND_STREAM): value
        for name, value in weights.items()
        if name.startswith(SECOND_STREAM)
    }


def _stream(
    scope: Scope, spec: AttentionSpec, joint: JointSpec, weights: Weights, x: ir.Value
) -> tuple[Heads, Heads, Heads]:
    sizes = {
        "q": (spec.q_heads, spec.head_dim),
        "k": (spec.kv_heads, spec.head_dim),
        "v": (spec.kv_heads, spec.value_dim),
    }
    made = {}
    for name, (heads, dim) in sizes.items():
        flat = linear(scope, x, weights, name, dtype=ir_dtype(spec.io_dtype))
        made[name] = Heads(value=flat, layout=Layout.BSM, heads=heads, dim=dim)
    norm = joint.qk_norm
    for name in ("q", "k") if norm is not None and norm.key else ("q",):
        if norm is not None:
            weight, bias = (weights.get(f"{name}_norm_{part}") for part in ("weight", "bias"))
            made[name] = normalise(scope, norm, made[name], spec.io_dtype, weight, bias, op=True)
    return made["q"], made["k"], made["v"]


def _joined(scope: Scope, first: Heads, second: Heads) -> Heads:
    """Both are [b, s, h, d] or [b, s, h * d]: the length is axis 1."""
    inputs = [first.value, second.value]
    value = scope.op("Concat", inputs, {"axis": 1}, dtype=first.value.dtype)
    return Heads(value=value, layout=first.layout, heads=first.heads, dim=first.dim)
