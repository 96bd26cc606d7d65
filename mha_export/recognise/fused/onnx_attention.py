"""``ai.onnx`` Attention, opset 23 to 25, as onnx 1.23 states it.

``is_causal`` is offset-aware: query i sees key j when ``j <= i + offset``, where offset is the past
length, or ``nonpad_kv_seqlen - q_len``, or 0 with neither. A row in which every key is masked by
-inf gives zeros. Softcap comes before the mask. A mask shorter than the keys masks the rest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise._site import Site
from mha_export.recognise.fused import _upstream as upstream
from mha_export.recognise.fused._mask_reading import (
    Bound,
    beside,
    mask_shape,
    named,
    with_empty_rows,
)
from mha_export.recognise.fused._node import FusedNode, Reader, short
from mha_export.recognise.fused._sink_key import sink_key
from mha_export.recognise.fused._upstream import Agreed, Lineage
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkOutput,
)

_OUTPUTS = (QkOutput.RAW, QkOutput.CAPPED, QkOutput.MASKED, QkOutput.PROBABILITIES)
_PRECISION = {1: DType.FP32, 10: DType.FP16, 11: DType.FP64, 16: DType.BF16}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inputs:
    query: Heads
    key: Heads
    value: Heads
    mask: ir.Value | None
    past_key: Heads | None
    past_value: Heads | None
    lengths: ir.Value | None
    sinks: ir.Value | None = None

    @property
    def scores(self) -> ScoreShape:
        axis = 1 if self.query.layout is Layout.BSM else 2
        return ScoreShape(
            query=self.query.value,
            key=self.key.value,
            heads=self.query.heads,
            query_axis=axis,
            key_axis=axis,
            past=None if self.past_key is None else self.past_key.value,
        )


def _read(fused: FusedNode) -> Site:
    inputs = _inputs(fused)
    bound = _mask(fused, inputs)
    free = inputs.past_key is None and inputs.lengths is None
    query = upstream.query_lineage(inputs.query, fused.context, fused.node)
    key = upstream.key_lineage(inputs.key, fused.context, fused.node, cache=free)
    value = upstream.value_lineage(inputs.value, fused.context, cache=free)
    agreed = _agreed(fused, query, key, value)
    if agreed is None or upstream.turns_queries_alone(agreed):
        query, key, value = (Lineage(heads=h) for h in (inputs.query, inputs.key, inputs.value))
        agreed = Agreed(rotary=None, tables=None, norm=None)
    past_key, past_value = key.past or inputs.past_key, value.past or inputs.past_value
    spec = AttentionSpec(
        q_heads=query.heads.heads,
        kv_heads=key.heads.heads,
        head_dim=query.heads.dim,
        v_head_dim=value.heads.dim,
        scale=_scale(fused, inputs, query.scale * key.scale),
        softcap=fused.number("softcap", 0.0) or None,
        sinks=inputs.sinks is not None,
        mask=bound.spec,
        rotary=agreed.rotary,
        qk_norm=agreed.norm,
        cache=None if past_key is None else CacheSpec(growth="concat"),
        cross=past_key is None and _is_cross(fused, inputs),
        qk_output=_qk_output(fused),
        io_dtype=fused.dtype(inputs.query.value),
        softmax_dtype=_PRECISION.get(fused.whole("softmax_precision", 0)),
        batch=fused.dim(inputs.query.value, 0, "batch"),
        q_len=fused.dim(inputs.query.value, inputs.scores.query_axis, "q_len"),
        kv_len=_kv_len(fused, inputs),
    )
    operands = Operands(
        query=query.heads,
        key=key.heads,
        value=value.heads,
        past_key=past_key,
        past_value=past_value,
        sinks=inputs.sinks,
        rotary=agreed.tables,
        q_norm_weight=None if query.norm is None else query.norm.weight,
        k_norm_weight=None if key.norm is None else key.norm.weight,
        q_norm_bias=None if query.norm is None else query.norm.bias,
        k_norm_bias=None if key.norm is None else key.norm.bias,
        **bound.operands,
    )
    return _site(fused, inputs, spec, operands, (query, key, value))


def _site(
    fused: FusedNode,
    inputs: _Inputs,
    spec: AttentionSpec,
    operands: Operands,
    lines: tuple[Lineage, ...],
) -> Site:
    node = fused.node
    output, after = upstream.raised(
        Heads(
            value=node.outputs[0],
            layout=inputs.query.layout,
            heads=inputs.query.heads,
            dim=inputs.value.dim,
        ),
        fused.context,
    )
    presents: list[Heads | None] = []
    for index, line, heads in ((1, lines[1], inputs.key), (2, lines[2], inputs.value)):
        own = fused.output(index)
        cached = None if own is None else dataclasses.replace(heads, value=own, layout=Layout.BHSD)
        presents.append(cached or line.present)
    before = [inner for line in lines for inner in line.nodes]
    assert node.graph is not None
    return Site(
        id=node.name or node.op_type,
        spec=spec,
        graph=node.graph,
        operands=operands,
        output=output,
        anchor=node,
        nodes=tuple(dict.fromkeys([*before, node, *after])),
        qk_output=fused.output(3),
        present_key=presents[0],
        present_value=presents[1],
        fused_as=node.op_type,
    )


def _inputs(fused: FusedNode) -> _Inputs:
    query, key, value = (fused.required(index, name) for index, name in enumerate(("Q", "K", "V")))
    layout = {3: Layout.BSM, 4: Layout.BHSD}.get(fused.rank(query))
    if layout is None:
        fused.refuse("rank", f"Q has rank {fused.rank(query)}; expected 3 or 4", value=query)
    if layout is Layout.BSM:
        count, kv_count = fused.whole("q_num_heads", 0), fused.whole("kv_num_heads", 0)
    else:
        count, kv_count = fused.width(query, 1), fused.width(key, 1)
    if kv_count < 1 or count % kv_count:
        fused.refuse("heads-uneven", f"{count} query heads can't share {kv_count} key/value heads")
    past = [fused.input(4), fused.input(5)]
    if (past[0] is None) != (past[1] is None):
        fused.refuse("past-incomplete", "only one of past_key and past_value is given")
    lengths = fused.input(6)
    if lengths is not None and past[0] is not None:
        fused.refuse("past-with-lengths", "past_key and nonpad_kv_seqlen exclude each other")
    return _without_sink(
        fused,
        _Inputs(
            query=fused.heads(query, layout, count),
            key=fused.heads(key, layout, kv_count),
            value=fused.heads(value, layout, kv_count),
            mask=fused.input(3),
            past_key=None if past[0] is None else fused.heads(past[0], Layout.BHSD, kv_count),
            past_value=None if past[1] is None else fused.heads(past[1], Layout.BHSD, kv_count),
            lengths=lengths,
        ),
    )


def _without_sink(fused: FusedNode, inputs: _Inputs) -> _Inputs:
    """The inputs with an extra key of zeros taken for the sink it is."""
    if inputs.past_key is not None or _own_mask(fused, inputs).hides_keys:
        return inputs
    found = sink_key(fused, inputs.key, inputs.value, inputs.mask, inputs.query.heads)
    if found is None:
        return inputs
    return dataclasses.replace(
        inputs, key=found.key, value=found.value, mask=found.mask, sinks=found.sinks
    )


def _mask(fused: FusedNode, inputs: _Inputs) -> Bound:
    """The attributes' own masking, and the mask input named or bound as it is."""
    own = _own_mask(fused, inputs)
    operands: dict[str, Any] = {}
    if inputs.lengths is not None:
        operands["kv_lengths"] = inputs.lengths
    if inputs.mask is None:
        return Bound(spec=own, operands=operands)
    boolean = fused.element(inputs.mask) is ir.DataType.BOOL
    sinks = inputs.sinks is not None
    if inputs.lengths is None:
        read = named(
            fused,
            inputs.mask,
            kind="keep" if boolean else "additive",
            scores=inputs.scores,
            cached=inputs.past_key is not None,
        )
        found = None if read is None else beside(own, read, sinks=sinks)
        if found is not None:
            return with_empty_rows(found, EmptyRow.ZERO, sinks=sinks)
    shape = mask_shape(fused, inputs.mask)
    operands["keep" if boolean else "bias"] = inputs.mask
    spec = dataclasses.replace(
        own,
        keep=shape if boolean else None,
        bias=None if boolean else shape,
        empty_row=EmptyRow.ZERO,
    )
    return Bound(spec=spec, operands=operands)


def _own_mask(fused: FusedNode, inputs: _Inputs) -> MaskSpec:
    left, right = fused.whole("left_window_size", -1), fused.whole("right_window_size", -1)
    return MaskSpec(
        causal=_causal(fused, inputs),
        left_window=None if left < 0 else left,
        right_window=None if right < 0 else right,
        lengths=inputs.lengths is not None,
        empty_row=EmptyRow.NOT_APPLICABLE if inputs.lengths is None else EmptyRow.ZERO,
    )


def _causal(fused: FusedNode, inputs: _Inputs) -> CausalAlignment | None:
    if not fused.whole("is_causal", 0):
        return None
    offset = inputs.past_key is not None or inputs.lengths is not None
    return CausalAlignment.BOTTOM_RIGHT if offset else CausalAlignment.TOP_LEFT


def _agreed(fused: FusedNode, query: Lineage, key: Lineage, value: Lineage) -> Agreed | None:
    """What query and key share; None where they, or key and value, went different ways."""
    if key.heads.heads != value.heads.heads or (key.past is None) != (value.past is None):
        return None
    return upstream.agree(query, key)


def _scale(fused: FusedNode, inputs: _Inputs, above: float) -> float | None:
    """The whole factor on Q Kᵀ: the node's own times what query and key were multiplied by."""
    own = fused.attributes.get("scale")
    if above == 1.0:
        return None if own is None else short(own)
    return short((inputs.query.dim**-0.5 if own is None else own) * above)


def _qk_output(fused: FusedNode) -> QkOutput | None:
    if fused.output(3) is None:
        return None
    mode = fused.whole("qk_matmul_output_mode", 0)
    if not 0 <= mode < len(_OUTPUTS):
        fused.refuse("qk-output-mode", f"qk_matmul_output_mode is {mode}; expected 0 to 3")
    return _OUTPUTS[mode]


def _is_cross(fused: FusedNode, inputs: _Inputs) -> bool:
    """Keys of another length than the queries, or projected from another sequence."""
    axis = inputs.scores.query_axis
    query, key = fused.shape(inputs.query.value), fused.shape(inputs.key.value)
    return query is not None and key is not None and query[axis] != key[axis]


def _kv_len(fused: FusedNode, inputs: _Inputs) -> int | str:
    present = fused.node.outputs[1] if len(fused.node.outputs) > 1 else None
    if inputs.past_key is not None:
        return fused.dim(present, 2, "kv_len")
    return fused.dim(inputs.key.value, inputs.scores.key_axis, "kv_len")


READER = Reader(domain="", op_type="Attention", read=_read)
