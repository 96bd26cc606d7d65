"""``com.microsoft`` MultiHeadAttention.

Query, key and value [b, s, h * d], or packed QKV [b, s, h, 3, d], or packed KV [b, t, h, 2, d], or
keys and values of a cross attention as [b, h, t, d]; a packed projection bias; a key padding mask
[b] (lengths), [b, t] or [b, s, t]; an attention bias; a past that the node prepends.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._site import Site
from mha_export.recognise.fused import _microsoft as microsoft
from mha_export.recognise.fused import _upstream as upstream
from mha_export.recognise.fused._node import FusedNode, Reader, short
from mha_export.recognise.fused._sink_key import sink_key
from mha_export.recognise.fused._upstream import Agreed, Lineage
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment


def _read(fused: FusedNode) -> Site:
    _refuse_what_no_spec_says(fused)
    query, key, value = _projected(fused)
    count = query.heads
    past_key, past_value = _past(fused, count)
    causal = _causal(fused, past_key)
    first = fused.required(0, "query")
    bias, sinks = fused.input(5), None
    if causal is None and past_key is None and fused.input(4) is None:
        sunk = sink_key(fused, key, value, bias, count)
        if sunk is not None:
            key, value, bias, sinks = sunk.key, sunk.value, sunk.mask, sunk.sinks
    key_axis = 2 if key.layout is Layout.BHSD else 1
    bound = microsoft.masked(
        fused,
        mask=fused.input(4),
        bias=bias,
        causal=causal,
        batch=first,
        scores=ScoreShape(
            query=query.value,
            key=key.value,
            heads=count,
            query_axis=1,
            key_axis=key_axis,
            past=None if past_key is None else past_key.value,
        ),
        sinks=sinks is not None,
    )
    kv_len = "kv_len" if past_key is not None else fused.dim(key.value, key_axis, "kv_len")
    over, under, agreed = upstream.joint(query, key, fused.context, fused.node, cache=False)
    # repeated heads are what the values would have to share
    if under.heads.heads != count or upstream.turns_queries_alone(agreed):
        over, under = Lineage(heads=query), Lineage(heads=key)
        agreed = Agreed(rotary=None, tables=None, norm=None)
    spec = AttentionSpec(
        q_heads=count,
        kv_heads=count,
        head_dim=query.dim,
        v_head_dim=value.dim,
        scale=_scale(fused, query.dim, over.scale * under.scale),
        sinks=sinks is not None,
        mask=bound.spec,
        rotary=agreed.rotary,
        qk_norm=agreed.norm,
        cache=None if past_key is None else CacheSpec(growth="concat"),
        cross=past_key is None and _other_lengths(fused, query, key, key_axis),
        io_dtype=fused.dtype(first),
        batch=fused.dim(first, 0, "batch"),
        q_len=fused.dim(first, 1, "q_len"),
        kv_len=kv_len,
    )
    operands = Operands(
        query=over.heads,
        key=under.heads,
        value=value,
        past_key=past_key,
        past_value=past_value,
        sinks=sinks,
        rotary=agreed.tables,
        q_norm_weight=None if over.norm is None else over.norm.weight,
        k_norm_weight=None if under.norm is None else under.norm.weight,
        q_norm_bias=None if over.norm is None else over.norm.bias,
        k_norm_bias=None if under.norm is None else under.norm.bias,
        **bound.operands,
    )
    return _site(fused, spec, operands, (*over.nodes, *under.nodes))


def _refuse_what_no_spec_says(fused: FusedNode) -> None:
    for index, name in ((8, "past_sequence_length"), (9, "cache_indirection")):
        if fused.input(index) is not None:
            fused.refuse("shared-buffer", f"input {name} makes the past a shared buffer")
    if fused.output(3) is not None:
        fused.refuse("qk-output", "its scores are read, whose kind the op does not state")
    if (fused.input(6) is None) != (fused.input(7) is None):
        fused.refuse("past-incomplete", "only one of past_key and past_value is given")


def _past(fused: FusedNode, count: int) -> tuple[Heads | None, Heads | None]:
    key, value = (
        None if past is None else fused.heads(past, Layout.BHSD, count)
        for past in (fused.input(6), fused.input(7))
    )
    return key, value


def _causal(fused: FusedNode, past_key: Heads | None) -> CausalAlignment | None:
    if not fused.whole("unidirectional", 0):
        return None
    return CausalAlignment.TOP_LEFT if past_key is None else CausalAlignment.BOTTOM_RIGHT


def _other_lengths(fused: FusedNode, query: Heads, key: Heads, key_axis: int) -> bool:
    """Whether there are known to be more or fewer keys than queries."""
    rows, keys = fused.shape(query.value), fused.shape(key.value)
    return rows is not None and keys is not None and rows[1] != keys[key_axis]


def _scale(fused: FusedNode, dim: int, above: float) -> float | None:
    """The node's scale times what query and key were multiplied by before it."""
    own = microsoft.scale_of(fused)
    return own if above == 1.0 else short((dim**-0.5 if own is None else own) * above)


def _site(
    fused: FusedNode, spec: AttentionSpec, operands: Operands, above: tuple[ir.Node, ...]
) -> Site:
    node = fused.node
    assert node.graph is not None
    present = [
        None
        if (own := fused.output(index)) is None
        else Heads(value=own, layout=Layout.BHSD, heads=spec.kv_heads, dim=dim)
        for index, dim in ((1, spec.head_dim), (2, spec.value_dim))
    ]
    if spec.cache is None and any(present):
        fused.refuse("present-without-past", "present outputs are read but no past is given")
    return Site(
        id=node.name or node.op_type,
        spec=spec,
        graph=node.graph,
        operands=operands,
        output=Heads(
            value=node.outputs[0], layout=Layout.BSM, heads=spec.q_heads, dim=spec.value_dim
        ),
        anchor=node,
        nodes=tuple(dict.fromkeys([*above, node])),
        present_key=present[0],
        present_value=present[1],
        fused_as=node.op_type,
    )


def _projected(fused: FusedNode) -> tuple[Heads, Heads, Heads]:
    """Query, key and value as separate tensors, the projection bias added."""
    count = fused.whole("num_heads", 0)
    query, key, value = fused.required(0, "query"), fused.input(1), fused.input(2)
    bias = fused.input(3)
    layouts = [Layout.BSM, Layout.BSM, Layout.BSM]
    if fused.rank(query) == 5:
        parts = microsoft.stacked(fused, query, 3)
        layouts = [Layout.BSHD, Layout.BSHD, Layout.BSHD]
    elif key is not None and fused.rank(key) == 5:
        parts = (query, *microsoft.stacked(fused, key, 2))
        layouts[1:] = [Layout.BSHD, Layout.BSHD]
    elif key is None or value is None:
        fused.refuse("input-missing", "key or value is missing and the query is not packed")
    else:
        parts = (query, key, value)
        if fused.rank(key) == 4:
            layouts[1:] = [Layout.BHSD, Layout.BHSD]
    heads = [fused.heads(part, layout, count) for part, layout in zip(parts, layouts, strict=True)]
    if bias is None:
        return heads[0], heads[1], heads[2]
    if any(one.layout is not Layout.BSM for one in heads):
        fused.refuse("bias-on-packed", "a projection bias on packed or 4-D inputs")
    start, done = 0, list[Heads]()
    for one in heads:
        done.append(microsoft.biased(fused, one, bias, start))
        start += one.heads * one.dim
    return done[0], done[1], done[2]


READER = Reader(domain="com.microsoft", op_type="MultiHeadAttention", read=_read)
