"""``com.microsoft`` GroupQueryAttention.

Query [b, s, h * d] with key and value [b, s, k * d], or all three packed in the query's last axis;
causal unless ``causal`` is 0; ``local_window_size`` w lets a query see w keys, itself included.
With a past, ``seqlens_k + 1`` says where each sequence ends: where that is computed to be the
number of keys, the past simply grows; where it is data, sequences may end apart, and the node is
read as if they did not but may not be replaced. A past as long as the present is a shared buffer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands, RotaryTables
from mha_export.recognise import _masks_sizes as graph_sizes
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._site import Reason, Site
from mha_export.recognise.fused import _microsoft as microsoft
from mha_export.recognise.fused._mask_reading import (
    beside,
    mask_shape,
    named,
    with_empty_rows,
)
from mha_export.recognise.fused._node import FusedNode, Reader
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    RotarySpec,
    RotaryStyle,
)

_UNREAD = (
    (12, "k_scale", "a quantised cache"),
    (13, "v_scale", "a quantised cache"),
)
_QUERY_LENGTHS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inputs:
    query: Heads
    key: Heads
    value: Heads
    past_key: Heads | None
    past_value: Heads | None
    growth: str | None
    """``concat``, ``shared_buffer``, or None without a past."""

    @property
    def scores(self) -> ScoreShape:
        return ScoreShape(
            query=self.query.value,
            key=self.key.value,
            heads=self.query.heads,
            query_axis=1,
            key_axis=1,
            past=None if self.past_key is None else self.past_key.value,
        )


def _read(fused: FusedNode) -> Site:
    _check(fused)
    inputs = _inputs(fused)
    mask, operands = _mask(fused, inputs)
    rotary, tables = _rotary(fused, inputs, operands)
    norm = _norm(fused, operands)
    sinks = _sinks(fused, inputs, operands)
    cache = None
    if inputs.growth is not None:
        shared = inputs.growth == "shared_buffer"
        longest = fused.dim(fused.input(3), 2, "max_length") if shared else None
        cache = CacheSpec(growth="shared_buffer" if shared else "concat", max_length=longest)
    first = fused.required(0, "query")
    spec = AttentionSpec(
        q_heads=inputs.query.heads,
        kv_heads=inputs.key.heads,
        head_dim=inputs.query.dim,
        v_head_dim=inputs.value.dim,
        scale=microsoft.scale_of(fused),
        softcap=fused.number("softcap", 0.0) or None,
        sinks=sinks,
        mask=mask,
        rotary=rotary,
        qk_norm=norm,
        cache=cache,
        io_dtype=fused.dtype(first),
        batch=fused.dim(first, 0, "batch"),
        q_len=fused.dim(first, 1, "q_len"),
        kv_len="kv_len" if cache is not None else fused.dim(first, 1, "q_len"),
    )
    bound = Operands(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        past_key=inputs.past_key,
        past_value=inputs.past_value,
        rotary=tables,
        **operands,
    )
    return _site(fused, spec, bound)


def _site(fused: FusedNode, spec: AttentionSpec, operands: Operands) -> Site:
    node = fused.node
    assert node.graph is not None
    present = [
        None
        if (own := fused.output(index)) is None
        else Heads(value=own, layout=Layout.BHSD, heads=spec.kv_heads, dim=dim)
        for index, dim in ((1, spec.head_dim), (2, spec.value_dim))
    ]
    return Site(
        id=node.name or node.op_type,
        spec=spec,
        graph=node.graph,
        operands=operands,
        output=Heads(
            value=node.outputs[0], layout=Layout.BSM, heads=spec.q_heads, dim=spec.value_dim
        ),
        anchor=node,
        nodes=(node,),
        present_key=present[0],
        present_value=present[1],
        fused_as=node.op_type,
        cannot_replace=_kept(fused, spec, any(present)),
    )


def _kept(fused: FusedNode, spec: AttentionSpec, presents: bool) -> Reason | None:
    """Why the node must stay, though its meaning is known."""
    node = fused.node
    lengths = fused.required(5, "seqlens_k")
    if spec.cache is None and presents:
        code, message = "present-without-past", "its present outputs are read but it has no past"
    elif fused.input(9) is not None:
        code = "position-ids"
        message = "for a first prompt the kernel reads only the first of its position ids"
    elif spec.cache is not None and spec.cache.growth == "concat" and not _full(fused, lengths):
        code = "ragged-lengths"
        message = f"{lengths.name} is data: sequences may end before the last key"
    else:
        return None
    return Reason(
        code=code,
        message=f"{node.op_type} {node.name}: {message}",
        value=lengths.name,
        nodes=(node.name or node.op_type,),
    )


def _full(fused: FusedNode, lengths: ir.Value) -> bool:
    """Whether seqlens_k is computed to be the number of keys minus one, for every sequence."""
    context, query, past = fused.context, fused.required(0, "query"), fused.input(3)
    plans = graph_sizes.plans(context, scores=query, inputs=())
    if past is None or context.sources(lengths) or not plans:
        return False
    for sizes in plans:
        view = context.sized(sizes)
        found, new, old = view.array(lengths), view.shape(query), view.shape(past)
        if found is None or new is None or old is None:
            return False
        if not np.all(found == new[1] + old[2] - 1):
            return False
    return True


def _whole(fused: FusedNode, lengths: ir.Value) -> bool:
    """Whether query_seqlens is computed to be the number of queries, for every sequence."""
    context, query = fused.context, fused.required(0, "query")
    plans = graph_sizes.plans(context, scores=query, inputs=())
    if context.sources(lengths) or not plans:
        return False
    for sizes in plans:
        view = context.sized(sizes)
        found, new = view.array(lengths), view.shape(query)
        if found is None or new is None or not np.all(found == new[1]):
            return False
    return True


def _check(fused: FusedNode) -> None:
    for index, name, what in _UNREAD:
        if fused.input(index) is not None:
            fused.refuse("unread-input", f"input {name} is given: {what}")
    ragged = fused.input(_QUERY_LENGTHS)
    if ragged is not None and not _whole(fused, ragged):
        fused.refuse("unread-input", "input query_seqlens is data: ragged queries")
    for name in ("sliding_window_cache", "qk_output", "kv_cache_bit_width"):
        if fused.whole(name, 0):
            fused.refuse("unread-attribute", f"{name} is {fused.whole(name, 0)}; expected 0")
    if fused.output(3) is not None:
        fused.refuse("qk-output", "its scores are read, whose kind the op does not state")


def _inputs(fused: FusedNode) -> _Inputs:
    count, kv_count = fused.whole("num_heads", 0), fused.whole("kv_num_heads", 0)
    query, key, value = fused.required(0, "query"), fused.input(1), fused.input(2)
    if kv_count < 1 or count % kv_count:
        fused.refuse("heads-uneven", f"{count} query heads can't share {kv_count} key heads")
    if key is None or value is None:
        width = fused.width(query) // (count + 2 * kv_count)
        query, key, value = microsoft.split_last(
            fused, query, [count * width, kv_count * width, kv_count * width]
        )
    past = [fused.input(3), fused.input(4)]
    if (past[0] is None) != (past[1] is None):
        fused.refuse("past-incomplete", "only one of past_key and past_value is given")
    growth = None
    if past[0] is not None:
        present = fused.node.outputs[1] if len(fused.node.outputs) > 1 else None
        same = fused.dim(past[0], 2, "past") == fused.dim(present, 2, "present")
        growth = "shared_buffer" if same else "concat"
    return _Inputs(
        query=fused.heads(query, Layout.BSM, count),
        key=fused.heads(key, Layout.BSM, kv_count),
        value=fused.heads(value, Layout.BSM, kv_count),
        past_key=None if past[0] is None else fused.heads(past[0], Layout.BHSD, kv_count),
        past_value=None if past[1] is None else fused.heads(past[1], Layout.BHSD, kv_count),
        growth=growth,
    )


def _mask(fused: FusedNode, inputs: _Inputs) -> tuple[MaskSpec, dict[str, Any]]:
    causal, window = bool(fused.whole("causal", 1)), fused.whole("local_window_size", -1)
    if window >= 0 and not causal:
        fused.refuse("window-without-causal", "local_window_size is given but causal is 0")
    if window == 0:
        fused.refuse("window-empty", "local_window_size is 0: expected -1 or above 0")
    alignment = None
    if causal:
        alignment = CausalAlignment.BOTTOM_RIGHT if inputs.growth else CausalAlignment.TOP_LEFT
    own = MaskSpec(causal=alignment, left_window=None if window < 0 else window - 1)
    operands: dict[str, Any] = {}
    if inputs.growth == "shared_buffer":
        lengths = microsoft.as_int64(fused, fused.required(5, "seqlens_k"))
        operands["kv_lengths"] = fused.derive(
            "Add", [lengths, np.asarray(1, np.int64)], dtype=ir.DataType.INT64
        )
    bias = fused.input(10)
    if bias is None:
        return own, operands
    read = None
    if inputs.growth != "shared_buffer":
        read = named(
            fused,
            bias,
            kind="additive",
            scores=inputs.scores,
            cached=inputs.growth is not None,
        )
    sinks = _has_sinks(fused)
    found = None if read is None else beside(own, read, sinks=sinks)
    if found is not None:
        found = with_empty_rows(found, EmptyRow.NAN, sinks=sinks)
        return found.spec, {**operands, **found.operands}
    empty = EmptyRow.ZERO if sinks else EmptyRow.NOT_APPLICABLE
    spec = dataclasses.replace(own, bias=mask_shape(fused, bias), empty_row=empty)
    return spec, {**operands, "bias": bias}


def _rotary(
    fused: FusedNode, inputs: _Inputs, operands: dict[str, Any]
) -> tuple[RotarySpec | None, RotaryTables | None]:
    if not fused.whole("do_rotary", 0):
        return None, None
    cos, sin = fused.input(7), fused.input(8)
    if cos is None or sin is None:
        fused.refuse("input-missing", "do_rotary is 1 but cos_cache or sin_cache is missing")
    spec = RotarySpec(
        style=(
            RotaryStyle.INTERLEAVED if fused.whole("rotary_interleaved", 0) else RotaryStyle.HALF
        ),
        dim=2 * fused.width(cos),
        positions="sequence" if fused.input(9) is None else "input",
    )
    given = fused.input(9)
    if given is not None:
        return spec, RotaryTables(cos=cos, sin=sin, position_ids=given)
    positions = _positions(fused, inputs, operands.get("kv_lengths"))
    rows = [fused.derive("Gather", [table, positions], dtype=table.dtype) for table in (cos, sin)]
    return spec, RotaryTables(cos=rows[0], sin=rows[1])


def _positions(fused: FusedNode, inputs: _Inputs, lengths: ir.Value | None) -> ir.Value:
    """Positions of the new tokens, [1, s], or [b, s] where each sequence has its own length."""
    one = np.asarray(1, np.int64)
    queries = _size(fused, fused.required(0, "query"), 1)
    start: ir.Value | np.ndarray = np.asarray(0, np.int64)
    if lengths is None and inputs.past_key is not None:
        start = _size(fused, inputs.past_key.value, 2)
    end = fused.derive("Add", [start, queries], dtype=ir.DataType.INT64)
    steps = fused.derive("Range", [start, end, one], dtype=ir.DataType.INT64)
    rows = fused.derive("Unsqueeze", [steps, np.asarray([0], np.int64)], dtype=ir.DataType.INT64)
    if lengths is None:
        return rows
    ends = fused.derive("Unsqueeze", [lengths, np.asarray([1], np.int64)], dtype=ir.DataType.INT64)
    starts = fused.derive("Sub", [ends, queries], dtype=ir.DataType.INT64)
    return fused.derive("Add", [starts, rows], dtype=ir.DataType.INT64)


def _size(fused: FusedNode, value: ir.Value, axis: int) -> ir.Value:
    shape = fused.derive("Shape", [value], dtype=ir.DataType.INT64)
    return fused.derive("Gather", [shape, np.asarray(axis, np.int64)], dtype=ir.DataType.INT64)


def _norm(fused: FusedNode, operands: dict[str, Any]) -> QkNormSpec | None:
    weights = fused.input(14), fused.input(15)
    if weights[0] is None and weights[1] is None:
        return None
    if weights[0] is None or weights[1] is None:
        fused.refuse("norm-incomplete", "only one of q_norm_weight and k_norm_weight is given")
    common = fused.number("qk_norm_epsilon", 1e-6)
    epsilon = [fused.number(f"{name}_norm_epsilon", common) for name in ("q", "k")]
    if epsilon[0] != epsilon[1]:
        fused.refuse("norm-epsilon", f"query and key have different epsilons {epsilon}")
    operands["q_norm_weight"], operands["k_norm_weight"] = weights
    return QkNormSpec(kind="rms", epsilon=float(f"{epsilon[0]:.4g}"), over="head")


def _sinks(fused: FusedNode, inputs: _Inputs, operands: dict[str, Any]) -> bool:
    if not _has_sinks(fused):
        return False
    sink, smooth = fused.input(11), bool(fused.whole("smooth_softmax", 0))
    if sink is not None and smooth:
        fused.refuse("two-sinks", "smooth_softmax and head_sink are both given")
    if sink is None:
        dtype = fused.element(fused.required(0, "query")) or ir.DataType.FLOAT
        zeros = np.zeros(inputs.query.heads, dtype.numpy())
        sink = fused.derive("Identity", [zeros], dtype=dtype, shape=[inputs.query.heads])
    operands["sinks"] = sink
    return True


def _has_sinks(fused: FusedNode) -> bool:
    return fused.input(11) is not None or bool(fused.whole("smooth_softmax", 0))


READER = Reader(domain="com.microsoft", op_type="GroupQueryAttention", read=_read)
