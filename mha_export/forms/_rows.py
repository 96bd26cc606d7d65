"""Rows without a key: what each form gives by itself, and how the stated policy is put in place."""

from __future__ import annotations

import math

import onnx_ir as ir

from mha_export.forms._layout import (
    as_layout,
    cast,
    floating,
    four_dimensional,
    ints,
    lowest,
    reduce,
    repeat_kv,
)
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._scope import Scope
from mha_export.operands import Heads, Layout, ir_dtype
from mha_export.spec import AttentionSpec, DType, EmptyRow


def policy_of(spec: AttentionSpec) -> EmptyRow:
    """The policy a form must bring about; ``n/a`` where no row can be empty or sinks decide.

    With a sink the softmax of an empty row is defined: zero. ``finite`` under the dtype minimum
    is the mean over all keys, since the minimum absorbs every score.
    """
    mask = spec.mask
    if spec.sinks and mask.empty_row is EmptyRow.ZERO:
        return EmptyRow.NOT_APPLICABLE
    if mask.empty_row is EmptyRow.FINITE and mask.fill == "min":
        return EmptyRow.UNIFORM
    if not hiding_parts(spec) and mask.bias is None:
        return EmptyRow.NOT_APPLICABLE
    return mask.empty_row


def fixes_rows(spec: AttentionSpec, natural: EmptyRow) -> bool:
    """Whether a form that gives ``natural`` has to put the stated policy in place."""
    policy = policy_of(spec)
    return policy is not EmptyRow.NOT_APPLICABLE and policy is not natural


def policy_with_probabilities(
    scope: Scope, spec: AttentionSpec, mask: Mask, probabilities: ir.Value, t: ir.Value
) -> ir.Value:
    """[b, h, s, t] with the stated policy in the rows without a key."""
    dtype = ir_dtype(spec.io_dtype)
    policy = policy_of(spec)
    if policy is EmptyRow.UNIFORM:
        one = floating(scope, 1.0, spec.io_dtype)
        stated = scope.op("Div", [one, cast(scope, t, dtype)], dtype=dtype)
    else:
        stated = floating(scope, 0.0 if policy is EmptyRow.ZERO else math.nan, spec.io_dtype)
    return scope.op("Where", [mask.row_has_key(), probabilities, stated], dtype=dtype)


def policy_with_output(
    scope: Scope, spec: AttentionSpec, mask: Mask, output: Heads, value: Heads
) -> Heads:
    """The output with the stated policy in the rows without a key.

    ``value`` [b, k, t, e] is what ``uniform`` averages over.
    """
    policy = policy_of(spec)
    dtype = ir_dtype(spec.io_dtype)
    natural = output.layout
    split = four_dimensional(scope, output)
    has_key = mask.row_has_key()
    if mask.bound:
        has_key = scope.op("Expand", [has_key, ints(scope, 1, 1, 1, 1)], dtype=has_key.dtype)
    if policy is EmptyRow.UNIFORM:
        wide = as_layout(scope, repeat_kv(scope, value, spec.q_heads), split.layout)
        axis = 2 if split.layout is Layout.BHSD else 1
        stated = reduce(scope, "ReduceMean", wide.value, [axis])
    else:
        stated = floating(scope, 0.0 if policy is EmptyRow.ZERO else math.nan, spec.io_dtype)
    if split.layout is Layout.BSHD:
        has_key = scope.op("Transpose", [has_key], {"perm": [0, 2, 1, 3]}, dtype=has_key.dtype)
    fixed = scope.op("Where", [has_key, split.value, stated], dtype=dtype)
    heads = Heads(value=fixed, layout=split.layout, heads=output.heads, dim=output.dim)
    return as_layout(scope, heads, natural)


def absorbing_fill(dtype: DType) -> float:
    """A finite fill that absorbs every score and that no kernel takes for its own minimum."""
    return lowest(dtype) / 2
