"""The graph inputs of a canonical graph, and the operands a form emits from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from mha_export.forms._joint import project_joint
from mha_export.forms._layout import Sizes, cast, ints, unsqueeze
from mha_export.forms._positions import is_square
from mha_export.forms._project import Weights, packed_projection, project
from mha_export.forms._scope import Scope
from mha_export.forms._tables import cache_tables
from mha_export.forms._weights import side_shapes
from mha_export.operands import Heads, Layout, Operands, RotaryTables, ir_dtype
from mha_export.spec import AttentionSpec, CacheSpec, Dim, ProjectionSpec, RotarySpec

_INT64 = ir.DataType.INT64


@dataclass
class GraphInputs:
    """The inputs declared so far, in order."""

    spec: AttentionSpec
    values: list[ir.Value] = field(default_factory=list)

    def add(self, name: str, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> ir.Value:
        """Declare one input; in the I/O dtype unless said otherwise."""
        value = ir.Value(
            name=name,
            type=ir.TensorType(dtype or ir_dtype(self.spec.io_dtype)),
            shape=ir.Shape(list(shape)),
        )
        self.values.append(value)
        return value


def key_length(spec: AttentionSpec) -> Dim:
    """The length of the *new* keys: the queries' own with a cache or where they are equal.

    A concat cache whose lengths are all numbers leaves the new one open (ONNX allows any).
    """
    numbers = isinstance(spec.q_len, int) and isinstance(spec.kv_len, int)
    if spec.cache is not None and spec.cache.growth == "concat" and numbers:
        return "new_len"
    return spec.q_len if spec.cache is not None or is_square(spec) else spec.kv_len


def cached_length(cache: CacheSpec, spec: AttentionSpec) -> Dim:
    """The length of the cache inputs."""
    if cache.growth == "concat":
        return "past_len"
    return spec.kv_len if cache.max_length is None else cache.max_length


def bind(scope: Scope, spec: AttentionSpec, inputs: GraphInputs, weights: Weights) -> Operands:
    """Declare the inputs the spec needs, emit its projections, and bind the operands.

    Without projections the inputs are ``query``, ``key``, ``value`` [b, length, heads * dim];
    with them ``hidden_states`` [b, s, m], and ``encoder_hidden_states`` for cross attention and
    for the second stream of a joint one.
    """
    projection = None
    if spec.projections is None:
        query, key, value = _bare(spec, inputs)
    else:
        x, memory = _states(spec, spec.projections, inputs)
        if spec.projections.joint is not None:
            joint = spec.projections.joint
            query, key, value = project_joint(scope, spec, joint, weights, (x, memory))
        else:
            query, key, value = project(scope, spec, weights, x, memory)
            projection = packed_projection(scope, spec, weights, x)
    past_key, past_value = _cache(spec, inputs)
    b, t = spec.batch, spec.kv_len if not is_square(spec) else spec.q_len
    mask = spec.mask
    boolean = ir.DataType.BOOL
    operands = Operands(
        query=query,
        key=key,
        value=value,
        past_key=past_key,
        past_value=past_value,
        keep=None if mask.keep is None else inputs.add("keep", mask.keep, boolean),
        bias=None if mask.bias is None else inputs.add("bias", mask.bias),
        key_padding=inputs.add("key_padding", [b, t], _INT64) if mask.padding else None,
        kv_lengths=inputs.add("kv_lengths", [b], _INT64) if spec.uses_lengths else None,
        prefix_lengths=inputs.add("prefix_lengths", [b], _INT64) if mask.prefix else None,
        document_ids=inputs.add("document_ids", [b, t], _INT64) if mask.documents else None,
        projection=projection,
    )
    side = _side(spec, inputs, weights)
    operands = replace(
        operands,
        sinks=side.get("sinks"),
        q_norm_weight=side.get("q_norm_weight"),
        k_norm_weight=side.get("k_norm_weight"),
        q_norm_bias=side.get("q_norm_bias"),
        k_norm_bias=side.get("k_norm_bias"),
    )
    return _with_rotary(scope, spec, inputs, operands)


def _states(
    spec: AttentionSpec, projections: ProjectionSpec, inputs: GraphInputs
) -> tuple[ir.Value, ir.Value]:
    """What queries are made from, and keys and values; the second stream of a joint attention."""
    width, joint = projections.d_model, projections.joint
    if joint is not None:
        first, second = joint.lengths
        other = width if joint.d_model is None else joint.d_model
        return (
            inputs.add("hidden_states", [spec.batch, first, width]),
            inputs.add("encoder_hidden_states", [spec.batch, second, other]),
        )
    x = inputs.add("hidden_states", [spec.batch, spec.q_len, width])
    if not spec.cross:
        return x, x
    m_kv = projections.kv_d_model or width
    return x, inputs.add("encoder_hidden_states", [spec.batch, spec.kv_len, m_kv])


def _bare(spec: AttentionSpec, inputs: GraphInputs) -> tuple[Heads, Heads, Heads]:
    new = key_length(spec)
    sizes = {
        "query": (spec.q_len, spec.q_heads, spec.head_dim),
        "key": (new, spec.kv_heads, spec.head_dim),
        "value": (new, spec.kv_heads, spec.value_dim),
    }
    if spec.value_source == "key_prefix":
        del sizes["value"]
    made = {
        name: Heads(
            value=inputs.add(name, [spec.batch, length, heads * dim]),
            layout=Layout.BSM,
            heads=heads,
            dim=dim,
        )
        for name, (length, heads, dim) in sizes.items()
    }
    return made["query"], made["key"], made.get("value", made["key"])


def _cache(spec: AttentionSpec, inputs: GraphInputs) -> tuple[Heads | None, Heads | None]:
    if spec.cache is None:
        return None, None
    layout = Layout(spec.cache.layout)
    length = cached_length(spec.cache, spec)

    def past(name: str, dim: int) -> Heads:
        heads = spec.kv_heads
        shape: list[Dim] = [spec.batch, heads, length, dim]
        if layout is Layout.BSHD:
            shape = [spec.batch, length, heads, dim]
        return Heads(value=inputs.add(name, shape), layout=layout, heads=heads, dim=dim)

    key = past("past_key", spec.head_dim)
    own = spec.value_source == "own"
    return key, past("past_value", spec.value_dim) if own else None


def _side(spec: AttentionSpec, inputs: GraphInputs, weights: Weights) -> dict[str, ir.Value]:
    """Sinks and qk-norm weights: the layer's, or inputs of a bare attention."""
    return {
        name: weights[name] if name in weights else inputs.add(name, shape)
        for name, shape in side_shapes(spec).items()
    }


def _with_rotary(
    scope: Scope, spec: AttentionSpec, inputs: GraphInputs, operands: Operands
) -> Operands:
    rotary = spec.rotary
    if rotary is None:
        return operands
    made = _stated if rotary.theta is not None else _given
    return replace(operands, rotary=made(scope, spec, rotary, inputs, operands))


def _given(
    scope: Scope,
    spec: AttentionSpec,
    rotary: RotarySpec,
    inputs: GraphInputs,
    operands: Operands,
) -> RotaryTables:
    """Tables as inputs ``cos``, ``sin`` of width r/2, and those of another sequence's keys."""
    half = rotary.dim // 2
    position_ids = None
    lead: list[Dim] = ["table_batch", spec.q_len]
    if rotary.positions == "input":
        position_ids = inputs.add("position_ids", [spec.batch, spec.q_len], _INT64)
        lead = ["positions"]
    cos, sin = (inputs.add(name, [*lead, half]) for name in ("cos", "sin"))
    key_cos = key_sin = None
    if spec.cross and rotary.key:
        key_cos, key_sin = (
            inputs.add(name, ["key_table_batch", spec.kv_len, half])
            for name in ("key_cos", "key_sin")
        )
    return RotaryTables(
        cos=cos, sin=sin, position_ids=position_ids, key_cos=key_cos, key_sin=key_sin
    )


def _stated(
    scope: Scope,
    spec: AttentionSpec,
    rotary: RotarySpec,
    inputs: GraphInputs,
    operands: Operands,
) -> RotaryTables:
    """Tables of theta as initializers, and the positions that pick their rows."""
    cos, sin = (
        scope.constant(table, hint=name)
        for name, table in zip(
            ("cos_cache", "sin_cache"), cache_tables(rotary, spec.io_dtype), strict=True
        )
    )
    if rotary.positions == "input":
        position_ids = inputs.add("position_ids", [spec.batch, spec.q_len], _INT64)
    else:
        position_ids = _sequence(scope, spec, operands)
    key_cos = key_sin = None
    apart = rotary.positions == "sequence" and spec.cache is None and not is_square(spec)
    if rotary.key and (spec.cross or apart):
        length = Sizes(scope, spec, operands).kv
        key_cos, key_sin = (_first_rows(scope, table, length) for table in (cos, sin))
    return RotaryTables(
        cos=cos, sin=sin, position_ids=position_ids, key_cos=key_cos, key_sin=key_sin
    )


def _sequence(scope: Scope, spec: AttentionSpec, operands: Operands) -> ir.Value:
    """[b, s]: the cache's length, or ``kv_lengths - s`` where it is static, plus 0, 1, ..."""
    sizes = Sizes(scope, spec, operands)
    steps = sizes.range(sizes.q)
    if spec.cache is not None and spec.cache.growth == "concat":
        steps = scope.op("Add", [steps, sizes.past], dtype=_INT64)
    elif spec.cache is not None:
        assert operands.kv_lengths is not None
        lengths = cast(scope, operands.kv_lengths, _INT64)
        start = scope.op("Sub", [lengths, sizes.q], dtype=_INT64)
        return scope.op("Add", [unsqueeze(scope, start, 1), steps], dtype=_INT64)
    one = ints(scope, 1)
    shape = scope.op("Concat", [sizes.batch, one], {"axis": 0}, dtype=_INT64)
    return scope.op("Expand", [unsqueeze(scope, steps, 0), shape], dtype=_INT64)


def _first_rows(scope: Scope, table: ir.Value, length: ir.Value) -> ir.Value:
    """[1, t, r/2]: the rows of positions 0 .. t - 1."""
    rows = scope.op("Slice", [table, ints(scope, 0), length], dtype=table.dtype)
    return unsqueeze(scope, rows, 0)
