"""``ort-mha``: one ``com.microsoft`` MultiHeadAttention node.

    output, present_key, present_value =
        MultiHeadAttention(query, key, value, -, -, attention_bias, past_key, past_value)

The mask is always ``attention_bias``: ``key_padding_mask`` adds a finite -10000, which a logit can
outbid. ``unidirectional`` is used only where queries and keys line up (equal lengths, or the op's
own past). Facts about runtimes are in docs/forms/ort-mha.md.

Option ``bias``: ``least`` (default) has axes of 1 where nothing differs; ``whole`` says causality
too, and is [b, h, s, t] itself, for kernels that take nothing else (DirectML's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._additive import (
    additive_mask,
    hides_by_infinity,
    kernel_policy,
    means_of_mask,
)
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import Sizes, as_layout, ints, repeat_kv
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._positions import Offset, is_square, offset_of
from mha_export.forms._prepare import Prepared, finished, prepare, scaled
from mha_export.forms._rows import fixes_rows, policy_of, policy_with_output
from mha_export.forms._scope import MICROSOFT, Scope
from mha_export.forms._sink import with_extra_key
from mha_export.forms._support import means_around, means_of_softmax, verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType, EmptyRow


@dataclass(frozen=True, kw_only=True)
class OrtMhaForm:
    name: str = "ort-mha"
    min_opset: int = 13
    summary: str = "one com.microsoft MultiHeadAttention node"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        in_op = _cache_in_op(spec)
        return verdict(
            self,
            spec,
            params,
            _option_refusal(params),
            multi_head_refusal(spec),
            means=lambda: (
                means_of_mask(spec, _native(spec, params, in_op=in_op))
                | multi_head_means(spec, params, in_op=in_op)
            ),
        )

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        in_op = _cache_in_op(spec) and (operands.rotary is None or operands.rotary.key_cos is None)
        return emit_multi_head(
            scope,
            spec,
            operands,
            native=_native(spec, params, in_op=in_op),
            in_op=in_op,
            whole_bias=_whole_bias(params),
        )


def _option_refusal(params: FormParams) -> Unsupported | None:
    if params.options.get("bias", "least") not in ("least", "whole"):
        return Unsupported(feature="bias", needs="'least' or 'whole'")
    return None


def _whole_bias(params: FormParams) -> bool:
    return params.options.get("bias") == "whole"


def multi_head_refusal(spec: AttentionSpec) -> Unsupported | None:
    """What MultiHeadAttention cannot state."""
    if spec.io_dtype is DType.FP64:
        return Unsupported(feature="io_dtype", needs="fp32, fp16 or bf16")
    if spec.softcap is not None:
        return Unsupported(feature="softcap", needs="form onnx, ort-gqa or primitive")
    if spec.qk_output is not None:
        return Unsupported(feature="qk_output", needs="form onnx or primitive")
    return None


def multi_head_means(spec: AttentionSpec, params: FormParams, *, in_op: bool) -> dict[str, str]:
    """What is said around the node instead of in it."""
    means = means_around(spec, params, cache_in_op=in_op) | means_of_softmax(spec)
    if spec.kv_heads != spec.q_heads:
        means["kv_heads"] = "keys and values repeated per query head"
    if spec.sinks:
        means["sinks"] = "an extra all-zero key whose bias is the sink"
    if spec.effective_scale == 0:
        means["scale"] = "multiplied into the query"
    if fixes_rows(spec, kernel_policy(spec)):
        means["empty_row"] = "Where on the output"
    return means


def _cache_in_op(spec: AttentionSpec) -> bool:
    """Past and present of the op: one head size, as many key as query heads, no extra key."""
    return (
        spec.cache is not None
        and spec.cache.growth == "concat"
        and spec.cache.layout == "bhsd"
        and spec.value_source == "own"
        and spec.kv_heads == spec.q_heads
        and spec.value_dim == spec.head_dim
        and not spec.sinks
    )


def _native(spec: AttentionSpec, params: FormParams, *, in_op: bool) -> frozenset[str]:
    """``unidirectional`` hides with the dtype's minimum: only where no row can be empty.

    Without the op's own past its diagonal is defined for equal lengths alone.
    """
    if _whole_bias(params) or not hides_by_infinity(spec) or spec.sinks or spec.mask.prefix:
        return frozenset()
    if policy_of(spec) is not EmptyRow.NOT_APPLICABLE:
        return frozenset()
    where = offset_of(spec)
    lines_up = where is Offset.PAST if in_op else where is Offset.ZERO and is_square(spec)
    return hiding_parts(spec) & {"causal"} if lines_up else frozenset()


def emit_multi_head(
    scope: Scope,
    spec: AttentionSpec,
    operands: Operands,
    *,
    native: frozenset[str],
    in_op: bool,
    always_bias: bool = False,
    whole_bias: bool = False,
    explicit_scale: bool = False,
) -> Emitted:
    """Emit the node and what goes around it.

    Args:
        scope: where the nodes go.
        spec: the attention.
        operands: its bound values.
        native: hiding parts that attributes state.
        in_op: past and present are the op's own.
        always_bias: bind ``attention_bias`` even where it is zero.
        whole_bias: give it its batch and its heads, even where they differ in nothing.
        explicit_scale: write the scale attribute even where it is the op's default.
    """
    sizes = Sizes(scope, spec, operands)
    ready = prepare(scope, spec, operands, sizes, ops=True, cache=not in_op)
    mask = Mask(scope, spec, operands, sizes)
    if mask.bound and not hiding_parts(spec) <= native:
        native = frozenset()
    bias = additive_mask(scope, spec, operands, sizes, mask, native, sink_column=True)
    if bias is None and always_bias:
        bias = mask.full(mask.constant(0.0), frozenset())
    if bias is not None and whole_bias:
        one = ints(scope, 1)
        parts = [sizes.batch, ints(scope, spec.q_heads), one, one]
        shape = scope.op("Concat", parts, {"axis": 0}, dtype=ir.DataType.INT64)
        bias = scope.op("Expand", [bias, shape], dtype=bias.dtype)
    query, key, value = _inputs(scope, spec, operands, ready)
    past: list[ir.Value | None] = [None, None]
    if in_op:
        past = [
            as_layout(scope, heads, Layout.BHSD).value
            for heads in (operands.past_key, operands.past_value)
            if heads is not None
        ]
    typed = (ir_dtype(spec.io_dtype), None)
    made = scope.op_multi(
        "MultiHeadAttention",
        [query.value, key.value, value.value, None, None, bias, *past],
        _attributes(spec, native, explicit_scale=explicit_scale),
        domain=MICROSOFT,
        # A past without its present outputs computes something else: always name them.
        outputs=[typed, typed, typed] if in_op else [typed],
    )
    output = Heads(value=made[0], layout=Layout.BSM, heads=spec.q_heads, dim=spec.value_dim)
    present_key, present_value = ready.present_key, ready.present_value
    if in_op:
        present_key, present_value = (
            Heads(value=value, layout=Layout.BHSD, heads=spec.kv_heads, dim=spec.head_dim)
            for value in made[1:]
        )
    if fixes_rows(spec, kernel_policy(spec)):
        averaged = present_value or ready.value
        output = policy_with_output(scope, spec, mask, output, averaged)
    return Emitted(
        output=finished(scope, spec, output),
        present_key=present_key,
        present_value=present_value,
    )


def _inputs(
    scope: Scope, spec: AttentionSpec, operands: Operands, ready: Prepared
) -> tuple[Heads, Heads, Heads]:
    """[b, length, h * dim] each, keys and values once for every query head."""
    query, key, value = ready.query, ready.key, ready.value
    if spec.effective_scale == 0:
        # A scale of 0 is the op's word for "not given".
        query = scaled(scope, spec, query, 0.0)
    key, value = (repeat_kv(scope, heads, spec.q_heads) for heads in (key, value))
    if operands.sinks is not None:
        key, value = with_extra_key(scope, key), with_extra_key(scope, value)
    query, key, value = (as_layout(scope, x, Layout.BSM) for x in (query, key, value))
    return query, key, value


def _attributes(
    spec: AttentionSpec, native: frozenset[str], *, explicit_scale: bool
) -> dict[str, int | float]:
    attributes: dict[str, int | float] = {"num_heads": spec.q_heads}
    scale = spec.effective_scale or 1.0
    default = 1.0 / math.sqrt(spec.head_dim)
    if explicit_scale or not math.isclose(scale, default, rel_tol=1e-12):
        attributes["scale"] = scale
    if "causal" in native:
        attributes["unidirectional"] = 1
    return attributes


FORM = OrtMhaForm()

__all__ = ["FORM", "OrtMhaForm", "emit_multi_head", "multi_head_means", "multi_head_refusal"]
