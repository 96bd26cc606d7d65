"""``com.microsoft`` Attention: the packed projection inside, [m, Q | K | V], and a stacked past."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._site import Reason, Site
from mha_export.recognise.fused import _microsoft as microsoft
from mha_export.recognise.fused._node import FusedNode, Reader
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment


def _read(fused: FusedNode) -> Site:
    for name in ("do_rotary", "past_present_share_buffer"):
        if fused.whole(name, 0):
            fused.refuse("unread-attribute", f"{name} is 1; expected 0")
    source = fused.required(0, "input")
    query, key, value = _projected(fused, source)
    past = _past(fused, query.heads, query.dim)
    causal = None
    if fused.whole("unidirectional", 0):
        causal = CausalAlignment.BOTTOM_RIGHT if past else CausalAlignment.TOP_LEFT
    bound = microsoft.masked(
        fused,
        mask=fused.input(3),
        bias=fused.input(5),
        causal=causal,
        batch=source,
        scores=ScoreShape(
            query=source,
            key=source,
            heads=query.heads,
            query_axis=1,
            key_axis=1,
            past=past["past_key"].value if past else None,
        ),
    )
    spec = AttentionSpec(
        q_heads=query.heads,
        kv_heads=query.heads,
        head_dim=query.dim,
        v_head_dim=value.dim,
        scale=microsoft.scale_of(fused),
        mask=bound.spec,
        cache=CacheSpec(growth="concat") if past else None,
        io_dtype=fused.dtype(source),
        batch=fused.dim(source, 0, "batch"),
        q_len=fused.dim(source, 1, "q_len"),
        kv_len="kv_len" if past else fused.dim(source, 1, "q_len"),
    )
    operands = Operands(query=query, key=key, value=value, **past, **bound.operands)
    node = fused.node
    assert node.graph is not None
    kept = None
    if fused.output(1) is not None:
        kept = Reason(
            code="present-stacked",
            message=f"Attention {node.name}: its present output stacks keys and values",
            value=node.outputs[1].name,
            nodes=(node.name or node.op_type,),
        )
    return Site(
        id=node.name or node.op_type,
        spec=spec,
        graph=node.graph,
        operands=operands,
        output=Heads(value=node.outputs[0], layout=Layout.BSM, heads=query.heads, dim=value.dim),
        anchor=node,
        nodes=(node,),
        fused_as=node.op_type,
        cannot_replace=kept,
    )


def _projected(fused: FusedNode, source: ir.Value) -> tuple[Heads, Heads, Heads]:
    weight, bias = fused.required(1, "weights"), fused.input(2)
    count = fused.whole("num_heads", 0)
    width = fused.width(weight)
    sizes = [int(n) for n in fused.attributes.get("qkv_hidden_sizes", [width // 3] * 3)]
    if sum(sizes) != width or sizes[0] != sizes[1]:
        fused.refuse("widths", f"qkv_hidden_sizes {sizes} do not fit weights {width} wide")
    dims = None if source.shape is None else [*list(source.shape)[:-1], width]
    product = fused.derive(
        "MatMul",
        [source, weight],
        dtype=source.dtype,
        shape=dims,  # type: ignore[arg-type]
    )
    if bias is not None:
        product = fused.derive(
            "Add",
            [product, bias],
            dtype=source.dtype,
            shape=dims,  # type: ignore[arg-type]
        )
    parts = microsoft.split_last(fused, product, sizes)
    heads = [fused.heads(part, Layout.BSM, count) for part in parts]
    return heads[0], heads[1], heads[2]


def _past(fused: FusedNode, count: int, dim: int) -> dict[str, Any]:
    """Keys and values of [2, b, h, p, d], taken apart."""
    past = fused.input(4)
    if past is None:
        return {}
    dims = None if past.shape is None else list(past.shape)[1:]
    found = {}
    for index, name in enumerate(("past_key", "past_value")):
        part = fused.derive(
            "Gather",
            [past, np.asarray(index, np.int64)],
            {"axis": 0},
            dtype=past.dtype,
            shape=dims,  # type: ignore[arg-type]
        )
        found[name] = Heads(value=part, layout=Layout.BHSD, heads=count, dim=dim)
    return found


READER = Reader(domain="com.microsoft", op_type="Attention", read=_read)
