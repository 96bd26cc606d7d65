"""``onnx``: one ``ai.onnx`` Attention node, opset 23, 24 or 25.

    Y, present_key, present_value, qk =
        Attention(Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen)

Each opset is used only for what it can say: 24 adds ``nonpad_kv_seqlen`` (and TensorScatter for a
static cache), 25 the two windows. What the op has no word for becomes its mask. Source: the ONNX
operator specification; facts about runtimes are in docs/forms/onnx.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._additive import (
    absorbs,
    additive_mask,
    hides_by_infinity,
    means_of_mask,
)
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import Sizes, as_layout
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts, hiding_parts
from mha_export.forms._positions import Offset, offset_of
from mha_export.forms._prepare import Prepared, finished, prepare, scaled
from mha_export.forms._rows import fixes_rows, policy_with_output
from mha_export.forms._scope import Scope
from mha_export.forms._sink import with_extra_key
from mha_export.forms._support import means_around, verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, EmptyRow, QkOutput

_QK_MODES = {
    QkOutput.RAW: 0,
    QkOutput.CAPPED: 1,
    QkOutput.MASKED: 2,
    QkOutput.PROBABILITIES: 3,
}


@dataclass(frozen=True, kw_only=True)
class OnnxForm:
    name: str = "onnx"
    min_opset: int = 23
    summary: str = "one ai.onnx Attention node (opset 23, 24 or 25)"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(
            self, spec, params, _refusal(spec), means=lambda: _by_other_means(spec, params)
        )

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        sizes = Sizes(scope, spec, operands)
        in_op = _cache_in_op(spec) and (operands.rotary is None or operands.rotary.key_cos is None)
        ready = prepare(scope, spec, operands, sizes, ops=True, cache=not in_op)
        mask = Mask(scope, spec, operands, sizes)
        native = _native(spec, params.opset, in_op=in_op)
        if mask.bound and not hiding_parts(spec) <= native:
            native = frozenset()
        return _Node(scope, spec, operands, sizes, mask, native).emit(ready, in_op=in_op)


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    if spec.qk_output is None:
        return None
    if spec.sinks:
        return Unsupported(
            feature="qk_output",
            needs="a form without the sink's extra key among the scores (primitive)",
        )
    if spec.qk_output in (QkOutput.MASKED, QkOutput.PROBABILITIES) and fixes_rows(
        spec, _natural_policy(spec)
    ):
        return Unsupported(
            feature="qk_output",
            needs=f"empty_row {_natural_policy(spec).value}: the op itself writes these scores",
        )
    if spec.qk_output is QkOutput.MASKED and spec.mask.fill == "min":
        return Unsupported(feature="qk_output", needs="fill '-inf' or a finite fill")
    if spec.qk_output is QkOutput.MASKED and spec.mask.bias is not None:
        return Unsupported(
            feature="qk_output",
            needs="a form that adds a bias as it is (primitive): here its minimum is halved",
        )
    return None


def _cache_in_op(spec: AttentionSpec) -> bool:
    """Whether past and present may be the op's own: a concat cache laid out as the op reads it."""
    return (
        spec.cache is not None
        and spec.cache.growth == "concat"
        and spec.cache.layout == "bhsd"
        and spec.value_source == "own"
        and not spec.sinks
    )


def _native(spec: AttentionSpec, opset: int, *, in_op: bool) -> frozenset[str]:
    """The hiding parts the op's attributes and inputs state with the spec's own meaning.

    They hide with -inf: a finite fill can be outbid, so it must be added; a dtype minimum is the
    same as -inf in every row that has a key.
    """
    mask = spec.mask
    if not hides_by_infinity(spec) or spec.sinks:
        return frozenset()
    where = offset_of(spec)
    # A length the op is told moves its diagonal too: top-left causal needs it as a mask instead.
    told = opset >= 24 and not in_op and where is not Offset.ZERO
    can = {"lengths"} if told else set()
    natural = Offset.PAST if in_op else Offset.LENGTHS if told else Offset.ZERO
    if where is natural:
        if not mask.prefix:
            can.add("causal")
        if opset >= 25:
            can |= {"left_window", "right_window"}
    return frozenset(can) & hiding_parts(spec)


def _natural_policy(spec: AttentionSpec) -> EmptyRow:
    """What the op gives a row whose keys are all masked: zero since opset 23."""
    if not isinstance(spec.mask.fill, str):
        return EmptyRow.FINITE
    return EmptyRow.UNIFORM if absorbs(spec) else EmptyRow.ZERO


def _scale_outside(spec: AttentionSpec) -> bool:
    """The op takes the square root of its scale: one that is not positive goes onto the query."""
    return spec.effective_scale <= 0


def _boolean(spec: AttentionSpec) -> bool:
    """Whether the mask may be boolean: nothing is added, and hidden means -inf."""
    return not added_parts(spec.mask) and hides_by_infinity(spec) and not spec.sinks


def _by_other_means(spec: AttentionSpec, params: FormParams) -> dict[str, str]:
    in_op = _cache_in_op(spec)
    native = _native(spec, params.opset, in_op=in_op)
    means = means_of_mask(spec, native, boolean=_boolean(spec))
    means |= means_around(spec, params, cache_in_op=in_op)
    if spec.sinks:
        means["sinks"] = "an extra all-zero key whose bias is the sink"
    if _scale_outside(spec):
        means["scale"] = "multiplied into the query"
    if fixes_rows(spec, _natural_policy(spec)):
        means["empty_row"] = "Where on the output"
    return means


@dataclass(frozen=True)
class _Node:
    """Emits the node itself around prepared queries, keys and values."""

    scope: Scope
    spec: AttentionSpec
    operands: Operands
    sizes: Sizes
    mask: Mask
    native: frozenset[str]

    def emit(self, ready: Prepared, *, in_op: bool) -> Emitted:
        scope, spec = self.scope, self.spec
        query, key, value = ready.query, ready.key, ready.value
        if _scale_outside(spec):
            query = scaled(scope, spec, query, spec.effective_scale)
        attn_mask = self._attn_mask()
        if self.operands.sinks is not None:
            key, value = with_extra_key(scope, key), with_extra_key(scope, value)
        query, key, value = self._one_rank(query, key, value)
        past_key = past_value = None
        if in_op:
            assert self.operands.past_key is not None
            assert self.operands.past_value is not None
            past_key = as_layout(scope, self.operands.past_key, Layout.BHSD).value
            past_value = as_layout(scope, self.operands.past_value, Layout.BHSD).value
        lengths = self.operands.kv_lengths if "lengths" in self.native else None
        made = self._op(
            [query.value, key.value, value.value, attn_mask, past_key, past_value, lengths],
            self._attributes(query),
            in_op=in_op,
        )
        output = Heads(value=made[0], layout=query.layout, heads=spec.q_heads, dim=spec.value_dim)
        if fixes_rows(spec, _natural_policy(spec)):
            output = policy_with_output(
                scope, spec, self.mask, output, self._all_values(ready, made, in_op=in_op)
            )
        present_key, present_value = ready.present_key, ready.present_value
        if in_op:
            present_key = self._present(made[1], spec.head_dim)
            present_value = self._present(made[2], spec.value_dim)
        return Emitted(
            output=finished(scope, spec, output),
            qk_output=made[3] if spec.qk_output is not None else None,
            present_key=present_key,
            present_value=present_value,
        )

    def _present(self, value: ir.Value, dim: int) -> Heads:
        return Heads(value=value, layout=Layout.BHSD, heads=self.spec.kv_heads, dim=dim)

    def _all_values(self, ready: Prepared, made: list[ir.Value], *, in_op: bool) -> Heads:
        return self._present(made[2], self.spec.value_dim) if in_op else ready.value

    def _one_rank(self, query: Heads, key: Heads, value: Heads) -> tuple[Heads, Heads, Heads]:
        """All three as [b, length, heads * dim] where most are, else as [b, heads, length, dim]."""
        flat = sum(heads.layout is not Layout.BHSD for heads in (query, key, value))
        layout = Layout.BSM if flat >= 2 else Layout.BHSD
        one, two, three = (as_layout(self.scope, x, layout) for x in (query, key, value))
        return one, two, three

    def _attributes(self, query: Heads) -> dict[str, int | float]:
        spec = self.spec
        attributes: dict[str, int | float] = {}
        if query.layout is Layout.BSM:
            attributes |= {"q_num_heads": spec.q_heads, "kv_num_heads": spec.kv_heads}
        scale = 1.0 if _scale_outside(spec) else spec.effective_scale
        if not math.isclose(scale, 1.0 / math.sqrt(spec.head_dim), rel_tol=1e-12):
            attributes["scale"] = scale
        if spec.softcap is not None:
            attributes["softcap"] = spec.softcap
        if "causal" in self.native:
            attributes["is_causal"] = 1
        for side in ("left_window", "right_window"):
            if side in self.native:
                attributes[f"{side}_size"] = getattr(spec.mask, side)
        if spec.qk_output is not None:
            attributes["qk_matmul_output_mode"] = _QK_MODES[spec.qk_output]
        if spec.effective_softmax_dtype is not spec.io_dtype:
            attributes["softmax_precision"] = ir_dtype(spec.effective_softmax_dtype).value
        return attributes

    def _op(
        self,
        inputs: list[ir.Value | None],
        attributes: dict[str, int | float],
        *,
        in_op: bool,
    ) -> list[ir.Value]:
        typed = (ir_dtype(self.spec.io_dtype), None)
        outputs: list[tuple[ir.DataType | None, None] | None] = [typed]
        wants_qk = self.spec.qk_output is not None
        if in_op or wants_qk:
            # A past without its present outputs is refused by ONNX Runtime: always name them.
            outputs += [typed, typed] if in_op else [None, None]
        if wants_qk:
            outputs.append(typed)
        return self.scope.op_multi("Attention", inputs, attributes, outputs=outputs)

    def _attn_mask(self) -> ir.Value | None:
        """The mask input, expanded to [.., s, t]: ONNX Runtime refuses a query axis of 1."""
        rest = hiding_parts(self.spec) - self.native
        keep = self._keep_mask(rest)
        if keep is not None:
            return self.mask.full(keep, rest)
        return additive_mask(
            self.scope,
            self.spec,
            self.operands,
            self.sizes,
            self.mask,
            self.native,
            sink_column=True,
            minimum_hides=True,
        )

    def _keep_mask(self, rest: frozenset[str]) -> ir.Value | None:
        source = self.operands.score_mask
        if not rest or not _boolean(self.spec):
            return None
        if source is not None:
            return source.value if source.kind == "keep" else None
        return self.mask.allowed(rest)


FORM = OnnxForm()
