"""The linear layers of a canonical graph: queries, keys and values from hidden states, and back."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_export.forms._layout import as_layout, ints, numpy_dtype, unsqueeze
from mha_export.forms._norm import normalise
from mha_export.forms._scope import Scope
from mha_export.forms._weights import expanded_value_dim
from mha_export.operands import Heads, Layout, Projection, ir_dtype
from mha_export.spec import AttentionSpec, LatentSpec, QkNormSpec

Weights = dict[str, ir.Value]
LATENT_EPSILON = 1e-6
"""Of the RMS norms on the latents (DeepSeek-V2's ``rms_norm_eps``)."""


def linear(
    scope: Scope, x: ir.Value, weights: Weights, name: str, *, dtype: ir.DataType
) -> ir.Value:
    """``x W + b`` with ``w_<name>`` and, where there is one, ``b_<name>``."""
    y = scope.op("MatMul", [x, weights[f"w_{name}"]], dtype=dtype)
    bias = weights.get(f"b_{name}")
    return y if bias is None else scope.op("Add", [y, bias], dtype=dtype)


def split(scope: Scope, value: ir.Value, sizes: list[int], axis: int) -> list[ir.Value]:
    """One Split along ``axis``."""
    lengths = scope.constant(np.array(sizes, np.int64), hint="ints")
    outputs = [(value.dtype, None)] * len(sizes)
    return scope.op_multi("Split", [value, lengths], {"axis": axis}, outputs=outputs)


def project(
    scope: Scope, spec: AttentionSpec, weights: Weights, x: ir.Value, memory: ir.Value
) -> tuple[Heads, Heads, Heads]:
    """Query, key and value heads; packed weights cost one MatMul and one Split."""
    assert spec.projections is not None
    if spec.latent is not None:
        return _latent(scope, spec, spec.latent, weights, x)
    dtype = ir_dtype(spec.io_dtype)
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    if spec.projections.packing == "separate":
        query = linear(scope, x, weights, "q", dtype=dtype)
        key = linear(scope, memory, weights, "k", dtype=dtype)
        own = spec.value_source == "own"
        value = linear(scope, memory, weights, "v", dtype=dtype) if own else key
    else:
        packed = linear(scope, x, weights, "qkv", dtype=dtype)
        if spec.projections.packing == "interleaved":
            return _interleaved(scope, spec, packed)
        query, key, value = split(scope, packed, [h * d, k * d, k * e], -1)
    flat = Layout.BSM
    value_dim = e if spec.value_source == "own" else d
    return (
        Heads(value=query, layout=flat, heads=h, dim=d),
        Heads(value=key, layout=flat, heads=k, dim=d),
        Heads(value=value, layout=flat, heads=k, dim=value_dim),
    )


def packed_projection(
    scope: Scope, spec: AttentionSpec, weights: Weights, x: ir.Value
) -> Projection | None:
    """What a form that projects by itself reads; three weights are joined (runtimes fold that)."""
    projections = spec.projections
    if projections is None or spec.latent is not None or projections.packing == "interleaved":
        return None
    if "w_qkv" in weights:
        return Projection(value=x, weight=weights["w_qkv"], bias=weights.get("b_qkv"))
    if spec.cross or spec.value_source != "own":
        return None
    dtype = ir_dtype(spec.io_dtype)
    matrices = [weights[f"w_{name}"] for name in "qkv"]
    weight = scope.op("Concat", matrices, {"axis": 1}, dtype=dtype)
    if not any(f"b_{name}" in weights for name in "qkv"):
        return Projection(value=x, weight=weight)
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    biases = [
        weights.get(f"b_{name}") or _zeros(scope, spec, width)
        for name, width in zip("qkv", (h * d, k * d, k * e), strict=True)
    ]
    bias = scope.op("Concat", biases, {"axis": 0}, dtype=dtype)
    return Projection(value=x, weight=weight, bias=bias)


def _zeros(scope: Scope, spec: AttentionSpec, width: int) -> ir.Value:
    return scope.constant(np.zeros(width, numpy_dtype(spec.io_dtype)), hint="zeros")


def _interleaved(scope: Scope, spec: AttentionSpec, packed: ir.Value) -> tuple[Heads, Heads, Heads]:
    """Columns go group by group [g query heads | k | v]: one Reshape and one Split."""
    k, g, d, e = spec.kv_heads, spec.group, spec.head_dim, spec.value_dim
    shape = ints(scope, 0, 0, k, (g + 1) * d + e)
    grouped = scope.op("Reshape", [packed, shape], dtype=packed.dtype)
    query, key, value = split(scope, grouped, [g * d, d, e], -1)
    query = scope.op("Reshape", [query, ints(scope, 0, 0, k * g, d)], dtype=packed.dtype)
    apart = Layout.BSHD
    return (
        Heads(value=query, layout=apart, heads=k * g, dim=d),
        Heads(value=key, layout=apart, heads=k, dim=d),
        Heads(value=value, layout=apart, heads=k, dim=e),
    )


def _latent(
    scope: Scope, spec: AttentionSpec, latent: LatentSpec, weights: Weights, x: ir.Value
) -> tuple[Heads, Heads, Heads]:
    """Multi-head latent attention: ``c = rms(x W_kv_a)``, keys and values expanded from it."""
    dtype = ir_dtype(spec.io_dtype)
    query = _latent_query(scope, spec, latent, weights, x)
    both = scope.op("MatMul", [x, weights["w_kv_a"]], dtype=dtype)
    c, k_rope = split(scope, both, [latent.kv_rank, latent.rope_dim], -1)
    c = _rms(scope, spec, c, weights["kv_norm"], latent.kv_rank)
    if latent.absorbed:
        return _absorbed(scope, spec, latent, weights, query, c, k_rope)
    h, nope, v = spec.q_heads, latent.nope_dim, spec.value_dim
    expanded = scope.op("MatMul", [c, weights["w_kv_b"]], dtype=dtype)
    apart = scope.op("Reshape", [expanded, ints(scope, 0, 0, h, nope + v)], dtype=dtype)
    k_nope, value = split(scope, apart, [nope, v], -1)
    shared = unsqueeze(scope, k_rope, 2)
    shared = scope.op("Expand", [shared, ints(scope, 1, 1, h, 1)], dtype=dtype)
    key = scope.op("Concat", [k_nope, shared], {"axis": -1}, dtype=dtype)
    return (
        query,
        Heads(value=key, layout=Layout.BSHD, heads=h, dim=spec.head_dim),
        Heads(value=value, layout=Layout.BSHD, heads=h, dim=v),
    )


def _latent_query(
    scope: Scope, spec: AttentionSpec, latent: LatentSpec, weights: Weights, x: ir.Value
) -> Heads:
    dtype = ir_dtype(spec.io_dtype)
    if latent.q_rank is None:
        value = scope.op("MatMul", [x, weights["w_q"]], dtype=dtype)
    else:
        inner = scope.op("MatMul", [x, weights["w_q_a"]], dtype=dtype)
        inner = _rms(scope, spec, inner, weights["q_norm"], latent.q_rank)
        value = scope.op("MatMul", [inner, weights["w_q_b"]], dtype=dtype)
    width = latent.nope_dim + latent.rope_dim
    return Heads(value=value, layout=Layout.BSM, heads=spec.q_heads, dim=width)


def _rms(
    scope: Scope, spec: AttentionSpec, value: ir.Value, weight: ir.Value, width: int
) -> ir.Value:
    norm = QkNormSpec(kind="rms", epsilon=LATENT_EPSILON, over="hidden")
    heads = Heads(value=value, layout=Layout.BSM, heads=1, dim=width)
    return normalise(scope, norm, heads, spec.io_dtype, weight, None, op=True).value


def _absorbed(
    scope: Scope,
    spec: AttentionSpec,
    latent: LatentSpec,
    weights: Weights,
    query: Heads,
    c: ir.Value,
    k_rope: ir.Value,
) -> tuple[Heads, Heads, Heads]:
    """``q_nope W_K^T`` queries ``[c | k_rope]`` itself: one key head, its prefix the value."""
    dtype = ir_dtype(spec.io_dtype)
    w_key, _ = _expansion(scope, spec, latent, weights)
    apart = as_layout(scope, query, Layout.BHSD)
    q_nope, q_rope = split(scope, apart.value, [latent.nope_dim, latent.rope_dim], -1)
    turned = scope.op("MatMul", [q_nope, w_key], dtype=dtype)
    both = scope.op("Concat", [turned, q_rope], {"axis": -1}, dtype=dtype)
    key_value = scope.op("Concat", [c, k_rope], {"axis": -1}, dtype=dtype)
    key = Heads(value=key_value, layout=Layout.BSM, heads=1, dim=spec.head_dim)
    query = Heads(value=both, layout=Layout.BHSD, heads=spec.q_heads, dim=spec.head_dim)
    return query, key, key


def expand_absorbed(
    scope: Scope, spec: AttentionSpec, latent: LatentSpec, weights: Weights, output: Heads
) -> Heads:
    """``W_V`` on the weighted latent: [b, h, s, kv_rank] to [b, h, s, v]."""
    _, w_value = _expansion(scope, spec, latent, weights)
    apart = as_layout(scope, output, Layout.BHSD)
    value = scope.op("MatMul", [apart.value, w_value], dtype=ir_dtype(spec.io_dtype))
    width = expanded_value_dim(spec, latent)
    return Heads(value=value, layout=Layout.BHSD, heads=spec.q_heads, dim=width)


def _expansion(
    scope: Scope, spec: AttentionSpec, latent: LatentSpec, weights: Weights
) -> tuple[ir.Value, ir.Value]:
    """``W_K^T`` [h, nope, kv_rank] and ``W_V`` [h, kv_rank, v] cut out of ``w_kv_b``."""
    dtype = ir_dtype(spec.io_dtype)
    nope, v = latent.nope_dim, expanded_value_dim(spec, latent)
    shape = ints(scope, latent.kv_rank, spec.q_heads, nope + v)
    apart = scope.op("Reshape", [weights["w_kv_b"], shape], dtype=dtype)
    w_key, w_value = split(scope, apart, [nope, v], -1)
    return (
        scope.op("Transpose", [w_key], {"perm": [1, 2, 0]}, dtype=dtype),
        scope.op("Transpose", [w_value], {"perm": [1, 0, 2]}, dtype=dtype),
    )
