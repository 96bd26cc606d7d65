"""``primitive``: MatMul, Softmax, MatMul and layout ops, for every runtime from opset 13 on.

    scores = MatMul(Q * scale, Kᵀ) ; cap * Tanh(scores / cap) ; Add or Where mask
    P      = Softmax(scores, -1)   ; output = MatMul(P, V)

The fallback of every other form and the check on them: it states every spec there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import (
    Sizes,
    as_layout,
    cast,
    floating,
    ints,
    lowest,
    repeat_kv,
    transposed_keys,
    unsqueeze,
)
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._prepare import finished, prepare, scaled
from mha_export.forms._rows import policy_of, policy_with_probabilities
from mha_export.forms._scope import Scope
from mha_export.forms._support import verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, EmptyRow, QkOutput


@dataclass(frozen=True, kw_only=True)
class PrimitiveForm:
    name: str = "primitive"
    min_opset: int = 13
    summary: str = "MatMul, Softmax, MatMul in plain ops: runs everywhere, states everything"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(self, spec, params)

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        sizes = Sizes(scope, spec, operands)
        ready = prepare(scope, spec, operands, sizes, ops=False)
        mask = Mask(scope, spec, operands, sizes)
        scores = _Scores(scope, spec, mask)
        scores.raw = _product(scope, spec, ready.query, ready.key)
        scores.softmax(operands, sizes)
        value = as_layout(scope, repeat_kv(scope, ready.value, spec.q_heads), Layout.BHSD)
        output = scope.op(
            "MatMul", [scores.probabilities, value.value], dtype=ir_dtype(spec.io_dtype)
        )
        heads = Heads(value=output, layout=Layout.BHSD, heads=spec.q_heads, dim=spec.value_dim)
        return Emitted(
            output=finished(scope, spec, heads),
            qk_output=None if spec.qk_output is None else scores.kept(spec.qk_output),
            present_key=ready.present_key,
            present_value=ready.present_value,
        )


def _product(scope: Scope, spec: AttentionSpec, query: Heads, key: Heads) -> ir.Value:
    """scale * Q Kᵀ [b, h, s, t].

    The scale goes onto the query: fewer numbers than scores, and half precision overflows later.
    """
    query = as_layout(scope, query, Layout.BHSD)
    if spec.effective_scale != 1.0:
        query = scaled(scope, spec, query, spec.effective_scale)
    k_bhdt = transposed_keys(scope, repeat_kv(scope, key, spec.q_heads))
    return scope.op("MatMul", [query.value, k_bhdt], dtype=ir_dtype(spec.io_dtype))


class _Scores:
    """The score tensor at its four stages."""

    raw: ir.Value
    capped: ir.Value
    masked: ir.Value
    probabilities: ir.Value

    def __init__(self, scope: Scope, spec: AttentionSpec, mask: Mask) -> None:
        self._scope = scope
        self._spec = spec
        self._mask = mask
        self._dtype = ir_dtype(spec.io_dtype)

    def kept(self, kind: QkOutput) -> ir.Value:
        value: ir.Value = getattr(self, kind.value)
        return value

    def softmax(self, operands: Operands, sizes: Sizes) -> None:
        scope, spec = self._scope, self._spec
        self.capped = self._cap(self.raw)
        self.masked = self._hide(self.capped, operands)
        wide = ir_dtype(spec.effective_softmax_dtype)
        scores = cast(scope, self.masked, wide)
        if operands.sinks is None:
            weights = scope.op("Softmax", [scores], {"axis": -1}, dtype=wide)
        else:
            weights = self._with_sink(scores, cast(scope, operands.sinks, wide), sizes)
        self.probabilities = cast(scope, weights, self._dtype)
        if policy_of(spec) is not natural_policy(spec, bound_additive=self._adds_source(operands)):
            self.probabilities = policy_with_probabilities(
                scope, spec, self._mask, self.probabilities, sizes.kv
            )

    @staticmethod
    def _adds_source(operands: Operands) -> bool:
        return operands.score_mask is not None and operands.score_mask.kind == "additive"

    def _cap(self, raw: ir.Value) -> ir.Value:
        cap = self._spec.softcap
        if cap is None:
            return raw
        scope, constant = self._scope, floating(self._scope, cap, self._spec.io_dtype)
        shrunk = scope.op("Div", [raw, constant], dtype=self._dtype)
        bent = scope.op("Tanh", [shrunk], dtype=self._dtype)
        return scope.op("Mul", [bent, constant], dtype=self._dtype)

    def _hide(self, scores: ir.Value, operands: Operands) -> ir.Value:
        scope, spec, mask = self._scope, self._spec, self._mask
        parts = hiding_parts(spec)
        fill = fill_value(spec)
        if not isinstance(spec.mask.fill, str) or (parts and self._adds_source(operands)):
            added = mask.additive(parts, fill)
            if added is None:
                return scores
            return scope.op("Add", [scores, added], dtype=self._dtype)
        added = mask.added()
        if added is not None:
            scores = scope.op("Add", [scores, added], dtype=self._dtype)
        source = operands.score_mask
        allowed = source.value if source is not None and parts else mask.allowed(parts)
        if allowed is None:
            return scores
        forbidden = floating(scope, fill, spec.io_dtype)
        return scope.op("Where", [allowed, scores, forbidden], dtype=self._dtype)

    def _with_sink(self, scores: ir.Value, sinks: ir.Value, sizes: Sizes) -> ir.Value:
        """Softmax over [scores | sink], the last column dropped."""
        scope = self._scope
        one = ints(scope, 1)
        shape = scope.op(
            "Concat", [sizes.batch, one, sizes.q, one], {"axis": 0}, dtype=ir.DataType.INT64
        )
        column = scope.op("Expand", [unsqueeze(scope, sinks, 0, 2, 3), shape], dtype=scores.dtype)
        both = scope.op("Concat", [scores, column], {"axis": -1}, dtype=scores.dtype)
        weights = scope.op("Softmax", [both], {"axis": -1}, dtype=scores.dtype)
        inputs = [weights, ints(scope, 0), ints(scope, -1), ints(scope, -1)]
        return scope.op("Slice", inputs, dtype=scores.dtype)


def fill_value(spec: AttentionSpec) -> float:
    """The number a forbidden score becomes, or is raised by where the fill is finite."""
    if spec.mask.fill == "-inf":
        return -math.inf
    return lowest(spec.io_dtype) if spec.mask.fill == "min" else spec.mask.fill


def natural_policy(spec: AttentionSpec, *, bound_additive: bool) -> EmptyRow:
    """What softmax itself gives an empty row; the stated policy where none can be empty."""
    policy = policy_of(spec)
    if policy is EmptyRow.NOT_APPLICABLE:
        return policy
    if not isinstance(spec.mask.fill, str):
        return EmptyRow.FINITE
    if spec.sinks:
        return EmptyRow.ZERO
    if spec.mask.fill == "-inf" or spec.mask.bias is not None:
        return EmptyRow.NAN
    # An added minimum absorbs every score, but for half precision, whose steps there are 32.
    half = spec.io_dtype.value == "fp16"
    return EmptyRow.FINITE if bound_additive and half else EmptyRow.UNIFORM


FORM = PrimitiveForm()
