"""Bounds that correct implementations stay within and semantic faults do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mha_export.bounds import (
    IMPRECISE_FACTOR,
    copy_floor,
    ensemble_error,
    error_bounds,
    forward_floor,
    judge,
    numpy_dtype,
    plain_outputs,
    score_bounds,
    score_problem,
    unit_roundoff,
)
from mha_export.cases import cases
from mha_export.oracle import OracleInputs, RotaryInputs, attention
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    QkOutput,
    RotarySpec,
)

CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
SPECS = {
    "plain": AttentionSpec(q_heads=4, kv_heads=2, head_dim=8),
    "causal": AttentionSpec(q_heads=4, kv_heads=2, head_dim=8, mask=CAUSAL),
    "padded": AttentionSpec(
        q_heads=2,
        kv_heads=2,
        head_dim=8,
        mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
    ),
    "empty rows": AttentionSpec(
        q_heads=2, kv_heads=1, head_dim=8, mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO)
    ),
    "capped": AttentionSpec(q_heads=2, kv_heads=1, head_dim=8, softcap=5.0, sinks=True),
    "rotary": AttentionSpec(
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        mask=CAUSAL,
        cache=CacheSpec(),
        rotary=RotarySpec(dim=8, theta=1e4),
        qk_norm=QkNormSpec(kind="rms"),
    ),
    "mean": AttentionSpec(q_heads=4, kv_heads=4, head_dim=8, combine="mean"),
}
DTYPES = (DType.FP32, DType.FP16, DType.BF16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_every_plain_implementation_passes(name: str, dtype: DType) -> None:
    """Leave each out of the ensemble in turn: the others and the floor still admit it."""
    spec = SPECS[name].replace(io_dtype=dtype)
    if spec.combine == "mean":
        return
    for case in cases(spec, battery="full"):
        exact = attention(spec, case.inputs)
        bounds = error_bounds(spec, case.inputs, exact)
        usable = ~bounds.overflow & ~exact.empty_rows
        problem = score_problem(spec, case.inputs, exact)
        for index, plain in enumerate(plain_outputs(problem, dtype)):
            if not np.isfinite(plain[usable]).all():
                continue
            rest = np.zeros_like(bounds.ensemble)
            for other, output in enumerate(plain_outputs(problem, dtype)):
                if other != index:
                    error = np.abs(np.where(np.isfinite(output), output - exact.output, 0.0))
                    rest = np.maximum(rest, error.max(axis=-1))
            found = judge(plain[usable], exact.output[usable], rest[usable], bounds.floor[usable])
            assert found.status == "pass", (case.name, index, found)


FAULTS: dict[str, Any] = {
    "scale off by a percent": lambda spec: spec.replace(scale=spec.effective_scale * 1.01),
    "no softcap": lambda spec: spec.replace(softcap=None),
    "window of 4": lambda spec: spec.replace(mask=dataclasses.replace(spec.mask, left_window=4)),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plain", "scale off by a percent"),
        ("causal", "scale off by a percent"),
        ("capped", "no softcap"),
        ("causal", "window of 4"),
        ("plain", "window of 4"),
    ],
)
def test_a_semantic_fault_fails_in_fp32(name: str, fault: str) -> None:
    spec = SPECS[name]
    worst = "pass"
    for case in cases(spec, battery="full"):
        exact = attention(spec, case.inputs)
        bounds = error_bounds(spec, case.inputs, exact)
        wrong = attention(FAULTS[fault](spec), case.inputs).output.astype(np.float32)
        found = judge(wrong, exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
        if found.status == "fail":
            worst = "fail"
    assert worst == "fail"


def _inputs(dtype: DType, magnitude: float = 1.0) -> tuple[AttentionSpec, OracleInputs]:
    rng = np.random.default_rng(3)
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=16, io_dtype=dtype)
    kind = numpy_dtype(dtype)

    def draw(length: int) -> np.ndarray:
        drawn = magnitude * rng.standard_normal((2, 2, length, 16))
        return drawn.astype(kind).astype(np.float64)

    return spec, OracleInputs(query=draw(5), key=draw(24), value=draw(24))


def test_coarse_rounding_is_imprecise_and_more_is_a_failure() -> None:
    spec, inputs = _inputs(DType.FP16)
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    noise = np.random.default_rng(1).choice([-1.0, 1.0], exact.output.shape)
    statuses = {}
    for times in (0.5, 3.0, 2 * IMPRECISE_FACTOR):
        actual = exact.output + times * bounds.bound[..., None] * noise
        found = judge(actual, exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
        statuses[times] = found.status
        assert found.factor == pytest.approx(times, rel=0.01)
    assert statuses == {0.5: "pass", 3.0: "imprecise", 2 * IMPRECISE_FACTOR: "fail"}
    actual = exact.output + 3.0 * bounds.bound[..., None] * noise
    assert judge(actual, exact.output, bounds.ensemble, bounds.floor).status == "fail"


@pytest.mark.parametrize("magnitude", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_what_passes_is_never_beyond_coarse(dtype: DType, magnitude: float) -> None:
    """Else an ``imprecise`` row would turn into ``fail`` for another row that passes."""
    spec, inputs = _inputs(dtype, magnitude)
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    assert np.all(bounds.coarse >= bounds.bound)
    for kind in QkOutput:
        scores = score_bounds(spec, inputs, exact, kind)
        assert np.all(scores.coarse >= scores.bound)


def test_a_moved_key_is_never_imprecise() -> None:
    """One key of 24 left out in fp16, where the bound is widest: beyond ``coarse`` somewhere."""
    spec, inputs = _inputs(DType.FP16)
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    fewer = dataclasses.replace(
        inputs,
        key=inputs.key[:, :, :-1],
        value=None if inputs.value is None else inputs.value[:, :, :-1],
    )
    actual = attention(spec, fewer).output
    found = judge(actual, exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
    assert found.status == "fail"
    assert found.factor > 5


@pytest.mark.parametrize(
    ("actual", "exact", "status", "mismatches"),
    [
        ([1.0, np.nan], [1.0, 2.0], "fail", 1),
        ([1.0, 2.0], [1.0, np.nan], "fail", 1),
        ([1.0, np.nan], [1.0, np.nan], "pass", 0),
        ([np.inf, 2.0], [np.inf, 2.0], "pass", 0),
        ([-np.inf, 2.0], [np.inf, 2.0], "fail", 1),
        ([np.inf, np.nan], [1.0, 2.0], "fail", 2),
        ([1.0, 2.0], [1.0, 2.0], "pass", 0),
    ],
)
def test_nan_and_infinity_are_counted_apart(
    actual: list[float], exact: list[float], status: str, mismatches: int
) -> None:
    found = judge(
        np.array([actual]), np.array([exact]), np.zeros(1), np.full(1, 1e-6), coarse=np.ones(1)
    )
    assert (found.status, found.nan_mismatch) == (status, mismatches)


def test_a_wrong_shape_fails_with_both_shapes() -> None:
    found = judge(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros(2), np.zeros(2))
    assert found.status == "fail"
    assert found.reason == "shape [2, 3]; expected [2, 4]"


def test_the_reason_names_the_worst_entry() -> None:
    actual, exact = np.zeros((1, 3)), np.zeros((1, 3))
    actual[0, 2] = 0.5
    found = judge(actual, exact, np.zeros(1), np.full(1, 1e-3))
    assert found.where == (0, 2)
    assert found.reason == "error 500 times the bound, at [0, 2]: got 0.5, expected 0"


def test_two_correct_orders_pass_at_logits_of_ten_thousand() -> None:
    """There they differ by hundreds of times what they do at ordinary ones."""
    spec, inputs = _inputs(DType.FP32, magnitude=50.0)
    exact = attention(spec, inputs)
    assert exact.raw is not None
    assert np.abs(exact.raw).max() > 1e3
    bounds = error_bounds(spec, inputs, exact)
    ordinary_spec, ordinary = _inputs(DType.FP32)
    ordinary_bounds = error_bounds(ordinary_spec, ordinary, attention(ordinary_spec, ordinary))
    assert bounds.bound.max() > 20 * ordinary_bounds.bound.max()
    for plain in plain_outputs(score_problem(spec, inputs, exact), DType.FP32):
        assert judge(plain, exact.output, bounds.ensemble, bounds.floor).status == "pass"


def test_overflow_is_seen() -> None:
    """Every plain fp16 implementation overflows on logits of 10^5, and the bounds say so."""
    spec, inputs = _inputs(DType.FP16, magnitude=300.0)
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    assert bounds.overflow.any()
    assert np.isfinite(bounds.ensemble).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_are_what_the_whole_holds(dtype: DType) -> None:
    spec, inputs = _inputs(dtype)
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    np.testing.assert_array_equal(ensemble_error(spec, inputs, exact), bounds.ensemble)
    np.testing.assert_array_equal(forward_floor(spec, inputs, exact), bounds.floor)
    np.testing.assert_array_equal(bounds.bound, 2 * bounds.ensemble + bounds.floor)
    assert (bounds.floor > 0).all()
    assert bounds.floor.max() < 100 * unit_roundoff(dtype)


def test_rotated_keys_in_the_cache_may_be_rounded_and_copied_values_too_little() -> None:
    spec = SPECS["rotary"]
    case = next(iter(cases(spec, battery="quick")))
    present = attention(spec, case.inputs).present_key
    floor = copy_floor(spec, present)
    assert floor.shape == present.shape[:-1]
    zero = np.zeros_like(floor)
    assert judge(present.astype(np.float32), present, zero, floor).status == "pass"
    assert judge(present * 1.0001, present, zero, floor).status == "fail"


@pytest.mark.parametrize("kind", list(QkOutput))
def test_scores_have_bounds_of_their_own(kind: QkOutput) -> None:
    spec = SPECS["capped"].replace(qk_output=kind, mask=CAUSAL)
    for case in cases(spec, battery="ordinary"):
        exact = attention(spec, case.inputs)
        rows = score_bounds(spec, case.inputs, exact, kind)
        scores = exact.scores(kind)
        assert rows.bound.shape == scores.shape
        rounded = scores.astype(np.float32)[..., None]
        assert judge(rounded, scores[..., None], rows.ensemble, rows.floor).status == "pass"
        wrong = rounded * np.float32(1.001)
        assert judge(wrong, scores[..., None], rows.ensemble, rows.floor).status == "fail"


def _scores_within(spec: AttentionSpec, inputs: OracleInputs, found: np.ndarray) -> str:
    assert spec.qk_output is not None
    exact = attention(spec, inputs)
    rows = score_bounds(spec, inputs, exact, spec.qk_output)
    wanted = exact.scores(spec.qk_output)[..., None]
    return judge(found[..., None], wanted, rows.ensemble, rows.floor).status


def test_a_rotated_channel_that_cancels_keeps_the_rounding_of_its_pair() -> None:
    """Turned by 45 degrees, (1, 1 + 1e-7) leaves fp32 an error as large as what is left of it."""
    rotary = RotarySpec(dim=2)
    spec = AttentionSpec(
        q_heads=1,
        kv_heads=1,
        head_dim=2,
        scale=1.0,
        rotary=rotary,
        qk_output=QkOutput.RAW,
        q_len="s",
        kv_len="s",
    )
    root = np.full((1, 1, 1), np.sqrt(0.5)).astype(np.float32)
    near = np.array([[[[1.0, np.float64(np.float32(1.0 + 1e-7))]]]])
    key = np.array([[[[np.sqrt(0.5), np.sqrt(0.5)]]]]).astype(np.float32).astype(np.float64)
    inputs = OracleInputs(
        query=near,
        key=key,
        value=np.zeros((1, 1, 1, 2)),
        rotary=RotaryInputs(cos=root.astype(np.float64), sin=root.astype(np.float64)),
    )
    exact = attention(spec, inputs).scores(QkOutput.RAW)
    unit = unit_roundoff(DType.FP32)
    assert _scores_within(spec, inputs, exact + 2 * unit) == "pass"
    assert _scores_within(spec, inputs, exact + 100 * unit) == "fail"


def test_masked_scores_that_cancel_keep_the_rounding_of_what_was_added() -> None:
    spec = AttentionSpec(
        q_heads=1,
        kv_heads=1,
        head_dim=1,
        scale=1.0,
        mask=MaskSpec(bias=(1, 1)),
        qk_output=QkOutput.MASKED,
    )
    one = np.ones((1, 1, 1, 1))
    inputs = OracleInputs(query=1000 * one, key=one, value=one, bias=np.array([[-1000.0]]))
    unit = unit_roundoff(DType.FP32)
    exact = attention(spec, inputs).scores(QkOutput.MASKED)
    assert exact.item() == 0.0
    assert _scores_within(spec, inputs, exact + 2000 * unit) == "pass"
    assert _scores_within(spec, inputs, exact + 50_000 * unit) == "fail"


def test_a_saturated_cap_forgets_the_error_of_the_product() -> None:
    spec = AttentionSpec(
        q_heads=1, kv_heads=1, head_dim=1, scale=1.0, softcap=2.0, qk_output=QkOutput.CAPPED
    )
    one = np.ones((1, 1, 1, 1))
    inputs = OracleInputs(query=1e4 * one, key=one, value=one)
    exact = attention(spec, inputs).scores(QkOutput.CAPPED)
    unit = unit_roundoff(DType.FP32)
    assert _scores_within(spec, inputs, exact + 4 * unit) == "pass"
    assert _scores_within(spec, inputs, exact + 40 * unit) == "fail"
