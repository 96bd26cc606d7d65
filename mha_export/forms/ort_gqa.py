"""``ort-gqa``: one ``com.microsoft`` GroupQueryAttention node.

    output, present_key, present_value =
        GroupQueryAttention(query, key, value, past_key, past_value, seqlens_k,
                            total_sequence_length, cos_cache, sin_cache, -, attention_bias,
                            head_sink, -, -, -, -, query_seqlens)

Causal, windowed (``local_window_size = left_window + 1``), capped before the mask, sinks and
rotary inside; the cache grows by concatenation, or in a buffer of ``max_length`` whose rows at and
beyond ``kv_lengths`` are unspecified. Facts about runtimes are in docs/forms/ort-gqa.md.
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
from mha_export.forms._layout import Sizes, as_layout, cast, ints, reduce
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._positions import Offset, is_square, offset_of
from mha_export.forms._prepare import Prepared, finished, prepare, scaled
from mha_export.forms._rows import fixes_rows, policy_with_output
from mha_export.forms._scope import MICROSOFT, Scope
from mha_export.forms._support import means_around, means_of_softmax, verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType, EmptyRow, RotaryStyle

_INT32 = ir.DataType.INT32


@dataclass(frozen=True, kw_only=True)
class OrtGqaForm:
    name: str = "ort-gqa"
    min_opset: int = 13
    summary: str = "one com.microsoft GroupQueryAttention node: rotary and cache inside"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(
            self, spec, params, _refusal(spec), means=lambda: _by_other_means(spec, params)
        )

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        tables = operands.rotary
        if spec.cache is not None and tables is not None and tables.key_cos is not None:
            raise ValueError(
                "form ort-gqa keeps rotated keys in its cache, but operands.rotary.key_cos "
                "rotates all keys after the cache: use form onnx or ort-mha"
            )
        return _Node(scope, spec, params, operands).emit()


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    if spec.io_dtype is DType.FP64:
        return Unsupported(feature="io_dtype", needs="fp32, fp16 or bf16")
    if spec.value_dim != spec.head_dim:
        return Unsupported(feature="v_head_dim", needs=f"v_head_dim = head_dim = {spec.head_dim}")
    if spec.head_dim % 8:
        return Unsupported(feature="head_dim", needs=f"a multiple of 8, not {spec.head_dim}")
    if spec.qk_output is not None:
        return Unsupported(feature="qk_output", needs="form onnx or primitive")
    if spec.cache is None and not is_square(spec):
        return Unsupported(
            feature="kv_len", needs="keys of the queries' own length (q_len = kv_len), or a cache"
        )
    if spec.value_source != "own":
        return Unsupported(feature="value_source", needs="a value operand of its own")
    if spec.cross and spec.cache is not None:
        return Unsupported(feature="cross", needs="new keys as many as queries")
    if spec.cache is not None and spec.cache.layout != "bhsd":
        return Unsupported(feature="cache.layout", needs="bhsd: the op keeps its cache that way")
    chunk = spec.batch != 1 and spec.q_len != 1
    if spec.cache is not None and not _causal_in_op(spec) and chunk:
        return Unsupported(
            feature="causal", needs="a causal mask, a batch of 1, or one query beside a cache"
        )
    return None


def _causal_in_op(spec: AttentionSpec) -> bool:
    """The op's diagonal counts from the past: bottom-right, or any where lengths are equal."""
    if spec.mask.causal is None or spec.mask.prefix or not hides_by_infinity(spec):
        return False
    if spec.cache is None:
        # The op's lengths are all s here, so an offset by kv_lengths is not its own.
        return offset_of(spec) is Offset.ZERO
    return offset_of(spec) in (Offset.PAST, Offset.LENGTHS) and not _concat_with_lengths(spec)


def _concat_with_lengths(spec: AttentionSpec) -> bool:
    return spec.cache is not None and spec.cache.growth == "concat" and spec.mask.lengths


def _native(spec: AttentionSpec) -> frozenset[str]:
    can: set[str] = set()
    if _causal_in_op(spec):
        can |= {"causal", "left_window"}
    if spec.cache is not None and spec.cache.growth != "concat" and hides_by_infinity(spec):
        can.add("lengths")
    return frozenset(can) & hiding_parts(spec)


def _rotary_in_op(spec: AttentionSpec) -> bool:
    """Whether the op may rotate: the first channels, a multiple of 16 of them, in order."""
    rotary = spec.rotary
    return (
        rotary is not None
        and rotary.positions == "sequence"
        and rotary.key
        and rotary.dim % 16 == 0
        and spec.rotary_offset == 0
        and not _concat_with_lengths(spec)
    )


def _tables_in_op(spec: AttentionSpec, operands: Operands) -> bool:
    """The op gathers rows itself: whole tables [positions, r/2] with the positions beside them."""
    tables = operands.rotary
    return (
        _rotary_in_op(spec)
        and tables is not None
        and tables.position_ids is not None
        and tables.half_width
        and tables.key_cos is None
    )


def _natural_policy(spec: AttentionSpec) -> EmptyRow:
    policy = kernel_policy(spec)
    return EmptyRow.ZERO if spec.sinks and policy is not EmptyRow.FINITE else policy


def _needs_query_lengths(spec: AttentionSpec, params: FormParams) -> bool:
    """Several queries in several rows beside a past are refused without ``query_seqlens``."""
    stated = params.options.get("query_seqlens")
    if isinstance(stated, bool):
        return stated
    return spec.cache is not None and spec.batch != 1 and spec.q_len != 1


def _by_other_means(spec: AttentionSpec, params: FormParams) -> dict[str, str]:
    means = means_of_mask(spec, _native(spec)) | means_of_softmax(spec)
    means |= means_around(spec, params, cache_in_op=True)
    if _rotary_in_op(spec):
        means.pop("rotary")
    if spec.effective_scale == 0:
        means["scale"] = "multiplied into the query"
    if fixes_rows(spec, _natural_policy(spec)):
        means["empty_row"] = "Where on the output"
    if spec.cache is not None and spec.cache.growth == "static":
        means["cache"] = "rows at and beyond kv_lengths are unspecified"
    return means


class _Node:
    """Emits the node around prepared queries, keys and values."""

    def __init__(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> None:
        self.scope = scope
        self.spec = spec
        self.params = params
        self.operands = operands
        self.sizes = Sizes(scope, spec, operands)
        self.rotates = _tables_in_op(spec, operands)
        self.mask = Mask(scope, spec, operands, self.sizes)

    def emit(self) -> Emitted:
        scope, spec, operands = self.scope, self.spec, self.operands
        ready = prepare(
            scope, spec, operands, self.sizes, ops=True, rotary=not self.rotates, cache=False
        )
        native = _native(spec)
        # The op's own causal mask stays beside a bound one: hiding twice with -inf hides once.
        bias = additive_mask(
            scope, spec, operands, self.sizes, self.mask, native, minimum_hides=True
        )
        made = self._op(ready, bias, native)
        output = Heads(value=made[0], layout=Layout.BSM, heads=spec.q_heads, dim=spec.head_dim)
        present = [
            Heads(value=value, layout=Layout.BHSD, heads=spec.kv_heads, dim=spec.head_dim)
            for value in made[1:]
        ]
        if fixes_rows(spec, _natural_policy(spec)):
            averaged = present[1] if spec.cache is not None else ready.value
            output = policy_with_output(scope, spec, self.mask, output, averaged)
        return Emitted(
            output=finished(scope, spec, output),
            present_key=present[0] if spec.cache is not None else None,
            present_value=present[1] if spec.cache is not None else None,
        )

    def _op(self, ready: Prepared, bias: ir.Value | None, native: frozenset[str]) -> list[ir.Value]:
        scope, spec, operands = self.scope, self.spec, self.operands
        query = ready.query
        if spec.effective_scale == 0:
            query = scaled(scope, spec, query, 0.0)
        query, key, value = (
            as_layout(scope, heads, Layout.BSM) for heads in (query, ready.key, ready.value)
        )
        past = [
            None if heads is None else as_layout(scope, heads, Layout.BHSD).value
            for heads in (operands.past_key, operands.past_value)
        ]
        seqlens_k, total = self._lengths()
        cos = sin = None
        if self.rotates and operands.rotary is not None:
            cos, sin = operands.rotary.cos, operands.rotary.sin
        inputs = [query.value, key.value, value.value, *past, seqlens_k, total]
        inputs += [cos, sin, None, bias, operands.sinks, None, None, None, None]
        if _needs_query_lengths(spec, self.params):
            inputs.append(self._per_row(self.sizes.q))
        typed = (ir_dtype(spec.io_dtype), None)
        return scope.op_multi(
            "GroupQueryAttention",
            inputs,
            self._attributes(native),
            domain=MICROSOFT,
            outputs=[typed, typed, typed],
        )

    def _lengths(self) -> tuple[ir.Value, ir.Value]:
        """``seqlens_k`` [b] (valid keys - 1), ``total_sequence_length`` (their maximum): int32."""
        scope, spec = self.scope, self.spec
        one = ints(scope, 1)
        if spec.cache is not None and spec.cache.growth != "concat":
            lengths = self.operands.kv_lengths
            assert lengths is not None
            lengths = cast(scope, lengths, ir.DataType.INT64)
            last = scope.op("Sub", [lengths, one], dtype=ir.DataType.INT64)
            longest = reduce(scope, "ReduceMax", lengths, [0])
            return cast(scope, last, _INT32), self._scalar(longest)
        last = scope.op("Sub", [self.sizes.kv, one], dtype=ir.DataType.INT64)
        return self._per_row(last), self._scalar(self.sizes.kv)

    def _per_row(self, size: ir.Value) -> ir.Value:
        narrow = cast(self.scope, size, _INT32)
        return self.scope.op("Expand", [narrow, self.sizes.batch], dtype=_INT32)

    def _scalar(self, size: ir.Value) -> ir.Value:
        narrow = cast(self.scope, size, _INT32)
        inputs = [narrow, ints(self.scope, 0)]
        return self.scope.op("Squeeze", inputs, dtype=_INT32, shape=[])

    def _attributes(self, native: frozenset[str]) -> dict[str, int | float]:
        spec = self.spec
        attributes: dict[str, int | float] = {
            "num_heads": spec.q_heads,
            "kv_num_heads": spec.kv_heads,
        }
        scale = spec.effective_scale or 1.0
        if not math.isclose(scale, 1.0 / math.sqrt(spec.head_dim), rel_tol=1e-12):
            attributes["scale"] = scale
        if "causal" not in native:
            attributes["causal"] = 0
        if "left_window" in native and spec.mask.left_window is not None:
            attributes["local_window_size"] = spec.mask.left_window + 1
        if spec.softcap is not None:
            attributes["softcap"] = spec.softcap
        if self.rotates and spec.rotary is not None:
            attributes["do_rotary"] = 1
            if spec.rotary.style is RotaryStyle.INTERLEAVED:
                attributes["rotary_interleaved"] = 1
        return attributes


FORM = OrtGqaForm()
