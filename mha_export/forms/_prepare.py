"""What comes before the product: qk-norm, rotary, cache growth, values cut from keys."""

from __future__ import annotations

from dataclasses import dataclass

from mha_export.forms._cache import append
from mha_export.forms._layout import Sizes, floating, four_dimensional, ints, reduce
from mha_export.forms._norm import normalise
from mha_export.forms._rotary import rotate_key, rotate_query
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout, Operands
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Queries, keys and values as the product reads them, and the cache as it grew.

    With ``append=False`` key and value are the new tokens alone and nothing is present: the
    fused op grows the cache.
    """

    query: Heads
    key: Heads
    value: Heads
    present_key: Heads | None = None
    present_value: Heads | None = None


def prepare(
    scope: Scope,
    spec: AttentionSpec,
    operands: Operands,
    sizes: Sizes,
    *,
    ops: bool,
    rotary: bool = True,
    cache: bool = True,
) -> Prepared:
    """Emit qk-norm, rotary and cache growth, each only where the spec states it.

    ``ops``: use the fused ops of newer opsets (RotaryEmbedding, RMSNormalization, TensorScatter).
    ``rotary`` is false where the fused op rotates, ``cache`` where it grows the cache.
    """
    query, key = _normalised(scope, spec, operands, ops=ops)
    tables = operands.rotary if rotary else None
    after_cache = tables is not None and tables.key_cos is not None
    if tables is not None:
        query = rotate_query(scope, spec, sizes, query, tables, op=ops)
    if tables is not None and _rotates_keys(spec) and not after_cache:
        key = rotate_key(scope, spec, sizes, key, tables, op=ops)
    value = operands.value
    present_key = present_value = None
    lengths = operands.kv_lengths
    if cache and operands.past_key is not None:
        present_key = append(scope, spec, operands.past_key, key, lengths, sizes, op=ops)
        key = present_key
        if operands.past_value is not None:
            past = operands.past_value
            present_value = append(scope, spec, past, value, lengths, sizes, op=ops)
            value = present_value
    if tables is not None and _rotates_keys(spec) and after_cache:
        key = rotate_key(scope, spec, sizes, key, tables, op=ops)
    if spec.value_source == "key_prefix":
        value = _prefix(scope, key, spec.value_dim)
    return Prepared(
        query=query,
        key=key,
        value=value,
        present_key=present_key,
        present_value=present_value,
    )


def _rotates_keys(spec: AttentionSpec) -> bool:
    return spec.rotary is not None and spec.rotary.key


def _normalised(
    scope: Scope, spec: AttentionSpec, operands: Operands, *, ops: bool
) -> tuple[Heads, Heads]:
    query, key, norm = operands.query, operands.key, spec.qk_norm
    if norm is None:
        return query, key
    weight, bias = operands.q_norm_weight, operands.q_norm_bias
    query = normalise(scope, norm, query, spec.io_dtype, weight, bias, op=ops)
    if norm.key:
        weight, bias = operands.k_norm_weight, operands.k_norm_bias
        key = normalise(scope, norm, key, spec.io_dtype, weight, bias, op=ops)
    return query, key


def _prefix(scope: Scope, key: Heads, width: int) -> Heads:
    """The first ``width`` channels of every key head."""
    if width == key.dim:
        return key
    key = four_dimensional(scope, key)
    inputs = [key.value, ints(scope, 0), ints(scope, width), ints(scope, -1)]
    value = scope.op("Slice", inputs, dtype=key.value.dtype)
    return Heads(value=value, layout=key.layout, heads=key.heads, dim=width)


def scaled(scope: Scope, spec: AttentionSpec, heads: Heads, factor: float) -> Heads:
    """The heads times a scalar."""
    inputs = [heads.value, floating(scope, factor, spec.io_dtype)]
    value = scope.op("Mul", inputs, dtype=heads.value.dtype)
    return Heads(value=value, layout=heads.layout, heads=heads.heads, dim=heads.dim)


def mean_of_heads(scope: Scope, output: Heads) -> Heads:
    """``combine: mean``: [b, s, e], one head."""
    output = four_dimensional(scope, output)
    axis = 1 if output.layout is Layout.BHSD else 2
    value = reduce(scope, "ReduceMean", output.value, [axis], keepdims=False)
    return Heads(value=value, layout=Layout.BSM, heads=1, dim=output.dim)


def finished(scope: Scope, spec: AttentionSpec, output: Heads) -> Heads:
    """The output as the spec combines its heads."""
    return mean_of_heads(scope, output) if spec.combine == "mean" else output
