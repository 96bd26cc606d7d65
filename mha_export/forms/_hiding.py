"""Masks where the scores stay visible: added to them, and what a row without a key becomes.

A mask is added rather than chosen by Where wherever that says the same: addition is one fast pass.
Half precision chooses, for there a forbidden score can overflow, and inf + -inf is not a number.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._layout import floating, lowest, reduce, repeat_kv
from mha_export.forms._mask import Mask
from mha_export.forms._rows import absorbing_fill, policy_of
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType, EmptyRow


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """How forbidden scores of one attention are hidden.

    Attributes:
        cuts: keys that no query of a product sees are left out of it. A row without a key then
            cannot average over all of them by itself.
    """

    spec: AttentionSpec
    operands: Operands
    cuts: bool

    @property
    def fill(self) -> float:
        """What a forbidden score becomes, or is raised by."""
        spec = self.spec
        if not isinstance(spec.mask.fill, str):
            return spec.mask.fill
        if not self._averages:
            return -math.inf
        return lowest(DType.FP16) if self._narrow else absorbing_fill(spec.io_dtype)

    @property
    def _averages(self) -> bool:
        """Whether a finite fill makes an empty row uniform, as the spec has it."""
        spec = self.spec
        uniform = spec.mask.fill == "min" and policy_of(spec) is EmptyRow.UNIFORM
        return uniform and not self.cuts and not spec.sinks and spec.mask.bias is None

    @property
    def _narrow(self) -> bool:
        return self.spec.io_dtype is DType.FP16

    @property
    def _adds_source(self) -> bool:
        source = self.operands.score_mask
        return source is not None and source.kind == "additive"

    @property
    def natural(self) -> EmptyRow | None:
        """What softmax itself gives a row without a key; None where that depends."""
        spec = self.spec
        if not isinstance(spec.mask.fill, str):
            return EmptyRow.FINITE
        if spec.sinks:
            return EmptyRow.ZERO
        if spec.mask.fill == "min" and self._adds_source:
            return None
        return EmptyRow.UNIFORM if self._averages else EmptyRow.NAN

    @property
    def fixes_rows(self) -> bool:
        """Whether the stated policy has to be put in place after the softmax."""
        policy = policy_of(self.spec)
        return policy is not EmptyRow.NOT_APPLICABLE and policy is not self.natural

    def apply(self, scope: Scope, mask: Mask, scores: ir.Value, parts: frozenset[str]) -> ir.Value:
        """The scores with ``parts`` hidden and everything else of the mask added."""
        dtype = ir_dtype(self.spec.io_dtype)
        infinite = isinstance(self.spec.mask.fill, str)
        if not (self._narrow and infinite and parts) or self._adds_source:
            added = mask.additive(parts, self.fill)
            return scores if added is None else scope.op("Add", [scores, added], dtype=dtype)
        added = mask.added()
        if added is not None:
            scores = scope.op("Add", [scores, added], dtype=dtype)
        source = mask.source
        allowed = mask.allowed(parts) if source is None else source.value
        forbidden = floating(scope, self.fill, self.spec.io_dtype)
        return scope.op("Where", [allowed, scores, forbidden], dtype=dtype)

    def stated_row(self, scope: Scope, value: Heads) -> ir.Value:
        """What a row without a key gets: a scalar, or [b, h, 1, e], the mean of [b, k, t, e]."""
        policy = policy_of(self.spec)
        if policy is not EmptyRow.UNIFORM:
            number = 0.0 if policy is EmptyRow.ZERO else math.nan
            return floating(scope, number, self.spec.io_dtype)
        mean = dataclasses.replace(value, value=reduce(scope, "ReduceMean", value.value, [2]))
        return repeat_kv(scope, mean, self.spec.q_heads).value
