"""The mask of a form whose only word for it is an additive tensor of exactly [.., s, t]."""

from __future__ import annotations

import math

import onnx_ir as ir

from mha_export.forms._layout import Sizes, lowest
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts, hiding_parts
from mha_export.forms._rows import absorbing_fill, policy_of
from mha_export.forms._scope import Scope
from mha_export.forms._sink import with_sink_column
from mha_export.operands import Operands
from mha_export.spec import AttentionSpec, DType, EmptyRow


def absorbs(spec: AttentionSpec) -> bool:
    """Whether ``uniform`` rows come of a finite fill that absorbs the scores (not in fp16)."""
    return (
        spec.mask.fill == "min"
        and policy_of(spec) is EmptyRow.UNIFORM
        and spec.io_dtype is not DType.FP16
        and spec.mask.bias is None
    )


def hides_by_infinity(spec: AttentionSpec) -> bool:
    """Whether -inf says what the fill says: a finite fill can be outbid, absorbing ones average."""
    return isinstance(spec.mask.fill, str) and not absorbs(spec)


def kernel_policy(spec: AttentionSpec) -> EmptyRow:
    """What a fused kernel gives a row without a key by itself.

    Under -inf that is its own affair: ``n/a``, nothing to build on. A number as fill gives what it
    gives, the minimum that absorbs every score the mean.
    """
    if not isinstance(spec.mask.fill, str):
        return EmptyRow.FINITE
    return EmptyRow.NOT_APPLICABLE if hides_by_infinity(spec) else EmptyRow.UNIFORM


def additive_fill(spec: AttentionSpec) -> float:
    """What a hidden pair gets added: -inf, the finite fill, or one that absorbs every score."""
    if not isinstance(spec.mask.fill, str):
        return spec.mask.fill
    return absorbing_fill(spec.io_dtype) if absorbs(spec) else -math.inf


def additive_mask(
    scope: Scope,
    spec: AttentionSpec,
    operands: Operands,
    sizes: Sizes,
    mask: Mask,
    native: frozenset[str],
    *,
    sink_column: bool = False,
    minimum_hides: bool = False,
) -> ir.Value | None:
    """[b or 1, h or 1, s, t] float: everything the form's attributes do not say; None for nothing.

    With ``minimum_hides`` the op may take its dtype's minimum for -inf, and give a row of nothing
    else zeros. A bias operand can hold it: half of it absorbs every score just as well.

    With ``sink_column`` it is [b or 1, h, s, t + 1], see :mod:`mha_export.forms._sink`.
    """
    rest = hiding_parts(spec) - native
    fill = additive_fill(spec)
    value = mask.additive(rest, fill)
    if value is not None and mask.bound and rest and absorbs(spec):
        # Kernels take their dtype's minimum for -inf; half of it still absorbs every score.
        floor = mask.constant(fill)
        value = scope.op("Max", [value, floor], dtype=value.dtype)
    elif value is not None and minimum_hides and spec.mask.bias is not None:
        lowest_value = mask.constant(lowest(spec.io_dtype))
        is_lowest = scope.op("Equal", [value, lowest_value], dtype=ir.DataType.BOOL)
        half = mask.constant(absorbing_fill(spec.io_dtype))
        value = scope.op("Where", [is_lowest, half, value], dtype=value.dtype)
    if sink_column and operands.sinks is not None:
        return with_sink_column(scope, spec, sizes, value, operands.sinks)
    return None if value is None else mask.full(value, rest)


def means_of_mask(
    spec: AttentionSpec, native: frozenset[str], *, boolean: bool = False
) -> dict[str, str]:
    """How each part that is not native is said: for ``Supported.by_other_means``."""
    rest = hiding_parts(spec) - native
    means = dict.fromkeys(sorted(rest - {"bias"}), "boolean mask" if boolean else "additive mask")
    if boolean:
        means.pop("keep", None)
    if "alibi" in added_parts(spec.mask):
        means["alibi"] = "additive mask"
    return means
