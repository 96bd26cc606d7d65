"""Rows without a key: the policy to bring about, and the ops that bring it about."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench, heads_of

from mha_export.forms._layout import Sizes, lowest
from mha_export.forms._mask import Mask
from mha_export.forms._rows import (
    absorbing_fill,
    fixes_rows,
    policy_of,
    policy_with_output,
    policy_with_probabilities,
)
from mha_export.forms.primitive import natural_policy
from mha_export.operands import Layout, Operands, ScoreMask
from mha_export.spec import AttentionSpec, CausalAlignment, DType, EmptyRow, MaskSpec

ZERO, NAN = EmptyRow.ZERO, EmptyRow.NAN
UNIFORM, FINITE, NONE = EmptyRow.UNIFORM, EmptyRow.FINITE, EmptyRow.NOT_APPLICABLE
RNG = np.random.default_rng(8)


def _spec(mask: MaskSpec, **fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 3, "mask": mask} | fields)


def _padded(policy: EmptyRow, fill: Any = "-inf") -> MaskSpec:
    return MaskSpec(padding=True, fill=fill, empty_row=policy)


POLICIES = [
    # mask, sinks, the policy that a form has to see to
    (MaskSpec(), False, NONE),
    (MaskSpec(causal=CausalAlignment.TOP_LEFT), False, NONE),
    *[(_padded(policy), False, policy) for policy in (ZERO, NAN, UNIFORM, FINITE)],
    *[(_padded(policy, "min"), False, policy) for policy in (ZERO, NAN, UNIFORM)],
    (_padded(FINITE, "min"), False, UNIFORM),
    (_padded(FINITE, -9.0), False, FINITE),
    (_padded(ZERO), True, NONE),
    (_padded(NAN), True, NAN),
    (_padded(UNIFORM), True, UNIFORM),
    (MaskSpec(empty_row=ZERO), False, NONE),
    (MaskSpec(empty_row=NAN), True, NONE),
    (MaskSpec(bias=("q_len", "kv_len"), empty_row=ZERO), False, ZERO),
    (MaskSpec(bias=("q_len", "kv_len")), False, NONE),
    (MaskSpec(bias=("mask_len",), empty_row=NAN), False, NAN),
    (MaskSpec(causal=CausalAlignment.TOP_LEFT, empty_row=ZERO), False, ZERO),
]


@pytest.mark.parametrize(("mask", "sinks", "policy"), POLICIES)
def test_the_policy_to_bring_about(mask: MaskSpec, sinks: bool, policy: EmptyRow) -> None:
    spec = _spec(mask, sinks=sinks)
    assert policy_of(spec) is policy
    for natural in EmptyRow:
        assert fixes_rows(spec, natural) is (policy not in (NONE, natural))


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP64], ids=lambda d: d.value)
def test_an_absorbing_fill_absorbs_and_is_not_the_minimum(dtype: DType) -> None:
    fill = absorbing_fill(dtype)
    assert lowest(dtype) < fill < 1e30 * -1e3
    if dtype is not DType.BF16:
        kind = np.float32 if dtype is DType.FP32 else np.float64
        assert kind(fill) + kind(1e3) == kind(fill)


KEEP = RNG.random((4, 5, 7)) < 0.6
KEEP[..., 0] = True
KEEP[1, 2] = KEEP[3, 0] = KEEP[3, 4] = False
HAS_KEY = KEEP.any(axis=-1)[None, ..., None]
"""[1, h, s, 1]: three rows are empty, of one head each."""


def _kept(policy: EmptyRow) -> AttentionSpec:
    return _spec(MaskSpec(keep=(4, "q_len", "kv_len"), empty_row=policy))


def _mask(bench: Bench, spec: AttentionSpec, *, bound: bool) -> tuple[Mask, Sizes]:
    named: dict[str, Any] = {
        name: bench.heads(name, np.zeros((3, heads, length, 3), np.float32), Layout.BSM)
        for name, heads, length in (("query", 4, 5), ("key", 2, 7), ("value", 2, 7))
    }
    keep = bench.value("keep_mask", KEEP)
    named |= {"score_mask": ScoreMask(value=keep, kind="keep")} if bound else {"keep": keep}
    operands = Operands(**named)
    sizes = Sizes(bench.scope, spec, operands)
    return Mask(bench.scope, spec, operands, sizes), sizes


def _stated(policy: EmptyRow, uniform: np.ndarray) -> Any:
    return {ZERO: 0.0, NAN: math.nan, UNIFORM: uniform}[policy]


@pytest.mark.parametrize("bound", [False, True], ids=["parts", "bound"])
@pytest.mark.parametrize("layouts", [(out, value) for out in Layout for value in Layout])
@pytest.mark.parametrize("policy", [ZERO, NAN, UNIFORM], ids=lambda policy: policy.value)
def test_an_output_gets_the_stated_rows(
    policy: EmptyRow, layouts: tuple[Layout, Layout], bound: bool
) -> None:
    bench, spec = Bench(), _kept(policy)
    output = RNG.standard_normal((3, 4, 5, 3)).astype(np.float32)
    values = RNG.standard_normal((3, 2, 7, 3)).astype(np.float32)
    mask, _ = _mask(bench, spec, bound=bound)
    given = bench.heads("out", output, layouts[0])
    value = bench.heads("v", values, layouts[1])
    fixed = policy_with_output(bench.scope, spec, mask, given, value)
    assert (fixed.layout, fixed.heads, fixed.dim) == (layouts[0], 4, 3)
    assert fixed.value.dtype == ir.DataType.FLOAT
    mean = np.repeat(values.mean(axis=2, keepdims=True), 2, axis=1)
    expected = np.where(HAS_KEY, output, _stated(policy, mean))
    np.testing.assert_allclose(
        heads_of(bench.run(fixed.value)[0], fixed), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("policy", [ZERO, NAN, UNIFORM], ids=lambda policy: policy.value)
def test_probabilities_get_the_stated_rows(policy: EmptyRow) -> None:
    bench, spec = Bench(), _kept(policy)
    given = RNG.random((3, 4, 5, 7)).astype(np.float32)
    mask, sizes = _mask(bench, spec, bound=False)
    value = bench.value("given", given)
    fixed = policy_with_probabilities(bench.scope, spec, mask, value, sizes.kv)
    expected = np.where(HAS_KEY, given, _stated(policy, np.float32(1 / 7)))
    np.testing.assert_allclose(bench.run(fixed)[0], expected, rtol=1e-5, atol=1e-6)


MIN, BIASED = _padded(UNIFORM, "min"), MaskSpec(bias=("q_len", "kv_len"), empty_row=ZERO)
NATURAL = [
    # mask, sinks, dtype, whether a source's own additive mask is bound, what plain ops give
    (MaskSpec(), False, DType.FP32, False, NONE),
    (_padded(ZERO), False, DType.FP32, False, NAN),
    (_padded(ZERO), True, DType.FP32, False, NONE),
    (_padded(NAN), True, DType.FP32, False, ZERO),
    (_padded(ZERO, -9.0), False, DType.FP32, False, FINITE),
    (MIN, False, DType.FP32, False, UNIFORM),
    (MIN, False, DType.FP32, True, UNIFORM),
    (MIN, False, DType.FP16, False, UNIFORM),
    (MIN, False, DType.FP16, True, FINITE),
    (MIN, False, DType.BF16, True, UNIFORM),
    (BIASED, False, DType.FP32, False, NAN),
    (dataclasses.replace(BIASED, fill="min"), False, DType.FP32, False, NAN),
]


@pytest.mark.parametrize(("mask", "sinks", "dtype", "bound", "natural"), NATURAL)
def test_what_plain_ops_give_by_themselves(
    mask: MaskSpec, sinks: bool, dtype: DType, bound: bool, natural: EmptyRow
) -> None:
    spec = _spec(mask, sinks=sinks, io_dtype=dtype)
    assert natural_policy(spec, bound_additive=bound) is natural
