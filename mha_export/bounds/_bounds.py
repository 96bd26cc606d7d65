"""Error bounds of a spec on given inputs, row by row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from mha_export.bounds._lost import lost_by_keys, lost_by_queries, normalised
from mha_export.bounds._plain import (
    ENSEMBLE,
    NUMPY,
    ScoreProblem,
    plain_outputs,
    plain_scores,
    unit_roundoff,
)
from mha_export.oracle import OracleInputs, OracleResult
from mha_export.oracle._inputs import geometry_of
from mha_export.oracle._mask import MINIMUM
from mha_export.oracle._rotary import rotate_all_keys, rotate_new
from mha_export.spec import AttentionSpec, DType, EmptyRow, QkOutput

_ABSORBS = 0.25
"""Of the lowest finite number: what is added and lies below this absorbs every score."""


@dataclass(frozen=True, kw_only=True)
class ErrorBounds:
    """Per row [b, h, s] of an output [b, h, s, e].

    Attributes:
        ensemble: worst error of the plain implementations; 0 where all left the dtype's range.
        floor: the forward error bound.
        coarse: error above which a row is no longer explained by rounding: ``sqrt(u)`` times the
            spread of the values the row could have mixed, beyond the row's own bound. Dropping or
            adding a key moves the row by about that spread.
        overflow: rows in which every plain implementation left the dtype's range.
    """

    ensemble: np.ndarray
    floor: np.ndarray
    coarse: np.ndarray
    overflow: np.ndarray

    @property
    def bound(self) -> np.ndarray:
        total: np.ndarray = 2.0 * self.ensemble + self.floor
        return total


def problem_bounds(
    problem: ScoreProblem,
    dtype: DType,
    *,
    output: np.ndarray,
    probabilities: np.ndarray,
    roundings: int = 1,
) -> ErrorBounds:
    """Bounds for the exact ``output`` [b,h,s,e] and ``probabilities`` [b,h,s,t] of ``problem``.

    ``roundings``: how often each query and key channel was rounded before the product (more
    than once where norm or rotary precede it).
    """
    worst = np.zeros(output.shape[:-1])
    overflow = np.ones(output.shape[:-1], dtype=bool)
    finite_row = np.isfinite(output).all(axis=-1)
    for plain in plain_outputs(problem, dtype):
        usable = np.isfinite(plain).all(axis=-1) & finite_row
        off = np.zeros_like(output)
        np.subtract(plain, output, out=off, where=usable[..., None])
        worst = np.maximum(worst, np.max(np.abs(off), axis=-1, initial=0.0))
        overflow &= ~usable
    floor, spread = _floor_and_spread(problem, dtype, output, probabilities, roundings)
    return ErrorBounds(
        ensemble=worst,
        floor=floor,
        coarse=np.sqrt(unit_roundoff(dtype)) * spread + 2.0 * worst + floor,
        overflow=overflow & finite_row,
    )


def _floor_and_spread(
    problem: ScoreProblem,
    dtype: DType,
    output: np.ndarray,
    probabilities: np.ndarray,
    roundings: int,
) -> tuple[np.ndarray, np.ndarray]:
    """First-order effect of one rounding per intermediate, and the spread of the mixed values.

    A score off by ``delta_t`` (score, mask, distance from the row's maximum, exponential) moves the
    output by ``sum_t P_t (e^(delta_t + delta) - 1) |v_t - out|`` at most, and never beyond the
    values of the keys that take part. Quotient, product with the value, the result itself and the
    two sums over the keys err relative to ``sum_t P_t |v_t|``.
    """
    unit = unit_roundoff(dtype)
    summing = _accumulator(dtype) * np.sqrt(problem.v_bkte.shape[2])
    group = problem.q_bhsd.shape[1] // problem.k_bktd.shape[1]
    k = np.repeat(problem.k_bktd, group, axis=1)
    v = np.repeat(problem.v_bkte, group, axis=1)
    live = probabilities > 0
    additive = np.where(live & np.isfinite(problem.additive_bhst), problem.additive_bhst, 0.0)
    absorbed = additive <= _ABSORBS * MINIMUM[dtype]
    felt = np.where(absorbed, 0.0, np.abs(additive))  # a score it absorbs leaves no rounding behind
    size = felt + _score_rounding(problem, np.swapaxes(k, -1, -2), roundings, dtype)
    scores = problem.scale * np.matmul(problem.q_bhsd, np.swapaxes(k, -1, -2)) + additive
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=live)
    below = np.where(live, top - np.where(live, scores, 0.0), 0.0)
    delta = np.where(live, unit * (size + below), 0.0)
    mean = np.sum(np.where(live, probabilities, 0.0) * delta, axis=-1, keepdims=True)
    shift = np.minimum(delta + mean, 30.0)
    weight = np.where(live, probabilities * (np.expm1(shift) + unit), 0.0)
    exact = np.where(np.isfinite(output), output, 0.0)
    moved = np.zeros(output.shape[:-1])
    mixed = np.zeros(output.shape[:-1])
    spread = np.zeros(output.shape[:-1])
    for e in range(v.shape[-1]):
        v_t = np.where(live, v[..., None, :, e], 0.0)
        away = np.where(live, np.abs(v_t - exact[..., e : e + 1]), 0.0)
        moved = np.maximum(moved, np.sum(weight * away, axis=-1))
        mixed = np.maximum(mixed, np.sum(np.where(live, probabilities, 0.0) * np.abs(v_t), axis=-1))
        spread = np.maximum(spread, np.max(away, axis=-1, initial=0.0))
    return np.minimum(moved, spread) + (3.0 * unit + 2.0 * summing) * mixed, spread


def _score_rounding(
    problem: ScoreProblem, kt: np.ndarray, roundings: int, dtype: DType
) -> np.ndarray:
    """Size of the score's error in units of u.

    The roundings of the products in the mean square, of the sum of d of them (``sqrt(d)`` roundings
    of the accumulator: Higham and Mary 2019), and of the score itself.
    """
    q_squared, k_squared = np.square(problem.q_bhsd), np.square(kt)
    products = np.sqrt(np.matmul(q_squared, k_squared))
    q_lost = np.broadcast_to(problem.q_lost, q_squared.shape)
    lost = np.sqrt(
        np.matmul(np.square(q_lost), k_squared)
        + np.matmul(q_squared, np.square(_of_query_heads(problem, kt)))
    )
    score = np.abs(np.matmul(problem.q_bhsd, kt))
    summing = _accumulator(dtype) / unit_roundoff(dtype) * np.sqrt(kt.shape[-2])
    size: np.ndarray = abs(problem.scale) * (roundings * products + lost + (1.0 + summing) * score)
    return size


def _of_query_heads(problem: ScoreProblem, kt: np.ndarray) -> np.ndarray:
    """``k_lost`` [b,h,d,t], as ``kt`` [b,h,d,t] repeats its heads."""
    lost = np.swapaxes(np.broadcast_to(problem.k_lost, problem.k_bktd.shape), -1, -2)
    return np.repeat(lost, kt.shape[1] // lost.shape[1], axis=1)


def _accumulator(dtype: DType) -> float:
    """Unit roundoff of the type sums are kept in: fp32, or fp64 for fp64."""
    return min(unit_roundoff(dtype), unit_roundoff(DType.FP32))


def score_problem(spec: AttentionSpec, inputs: OracleInputs, exact: OracleResult) -> ScoreProblem:
    """The arithmetic between the rotated, normalised operands and the context, in float64.

    Errors:
        mha_export.errors.InputError: ``exact`` was evaluated without its scores.
    """
    geometry = geometry_of(spec, inputs)
    query = normalised(spec.qk_norm, inputs.query, inputs.q_norm_weight, inputs.q_norm_bias)
    query, _ = rotate_new(spec, inputs, geometry, query, inputs.key.astype(np.float64))
    key = rotate_all_keys(spec, inputs, exact.present_key)
    value = key[..., : spec.value_dim] if exact.present_value is None else exact.present_value
    masked, capped = exact.scores(QkOutput.MASKED), exact.scores(QkOutput.CAPPED)
    hidden = np.isneginf(masked)
    additive = np.full(masked.shape, -np.inf)
    np.subtract(masked, capped, out=additive, where=~hidden)
    return ScoreProblem(
        q_bhsd=query,
        k_bktd=key,
        v_bkte=value,
        additive_bhst=additive,
        scale=spec.effective_scale,
        softcap=spec.softcap,
        sinks_h=None if inputs.sinks is None else inputs.sinks.astype(np.float64),
        q_lost=lost_by_queries(spec, inputs, query),
        k_lost=lost_by_keys(spec, inputs, key),
    )


def error_bounds(spec: AttentionSpec, inputs: OracleInputs, exact: OracleResult) -> ErrorBounds:
    """Bounds of the context: rows [b,h,s], or [b,s] where heads are averaged."""
    problem = score_problem(spec, inputs, exact)
    probabilities = exact.scores(QkOutput.PROBABILITIES)
    output = exact.output
    if spec.combine == "mean":
        v = np.repeat(problem.v_bkte, spec.group, axis=1)
        output = np.matmul(probabilities, v)
    found = problem_bounds(
        problem,
        spec.io_dtype,
        output=output,
        probabilities=probabilities,
        roundings=_roundings(spec),
    )
    settled = exact.empty_rows & np.isfinite(output).all(axis=-1)
    if np.any(settled) and spec.mask.empty_row is not EmptyRow.FINITE:
        found = dataclasses.replace(
            found,
            ensemble=np.where(settled, 0.0, found.ensemble),
            overflow=found.overflow & ~settled,
        )
    return _averaged(found) if spec.combine == "mean" else found


def score_bounds(
    spec: AttentionSpec, inputs: OracleInputs, exact: OracleResult, kind: QkOutput
) -> ErrorBounds:
    """Bounds of every entry [b,h,s,t] of a score tensor that is also an output.

    ``raw``: the error of the product, and two roundings (scale, result). ``capped``: that error
    times the slope of the cap, ``1 - (capped / c)^2``, and four (quotient, tanh to a unit in the
    last place, product). ``masked``: three more of what is added (a slope times a distance, the
    bias, their sum) and one of the sum. ``probabilities``: the context of an identity as values.
    """
    problem = score_problem(spec, inputs, exact)
    scores = exact.scores(kind)
    if kind is QkOutput.PROBABILITIES:
        identity = np.broadcast_to(
            np.eye(scores.shape[-1]), (*problem.k_bktd.shape[:2], *(scores.shape[-1],) * 2)
        )
        rows = problem_bounds(
            dataclasses.replace(problem, v_bkte=identity),
            spec.io_dtype,
            output=scores,
            probabilities=scores,
            roundings=_roundings(spec),
        )
        return ErrorBounds(
            **{
                field.name: np.broadcast_to(getattr(rows, field.name)[..., None], scores.shape)
                for field in dataclasses.fields(rows)
            }
        )
    k = np.swapaxes(np.repeat(problem.k_bktd, spec.group, axis=1), -1, -2)
    dtype = NUMPY[spec.io_dtype]
    worst = np.zeros(scores.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for variant in ENSEMBLE:
            plain = plain_scores(
                problem.q_bhsd.astype(dtype), k.astype(dtype), problem.scale, variant
            )
            error = np.abs(plain.astype(np.float64) - exact.scores(QkOutput.RAW))
            worst = np.maximum(worst, np.where(np.isfinite(error), error, 0.0))
    slope, rounded = _after_product(problem, exact, kind)
    worst = slope * worst
    size = slope * _score_rounding(problem, k, _roundings(spec), spec.io_dtype)
    floor = unit_roundoff(spec.io_dtype) * (size + rounded)
    return ErrorBounds(
        ensemble=worst,
        floor=floor,
        coarse=np.sqrt(unit_roundoff(spec.io_dtype)) * (size + rounded) + 2.0 * worst + floor,
        overflow=np.zeros(scores.shape, dtype=bool),
    )


def _after_product(
    problem: ScoreProblem, exact: OracleResult, kind: QkOutput
) -> tuple[np.ndarray | float, np.ndarray]:
    """How much of a raw score's error is left of it, and what is rounded on the way (times u)."""
    raw, capped = exact.scores(QkOutput.RAW), exact.scores(QkOutput.CAPPED)
    slope: np.ndarray | float = 1.0
    rounded = 2.0 * np.abs(raw)
    if kind is not QkOutput.RAW and problem.softcap is not None:
        slope = 1.0 - np.square(capped / problem.softcap)
        rounded = 4.0 * np.abs(capped)
    if kind is QkOutput.MASKED:
        masked = exact.scores(QkOutput.MASKED)
        added = np.where(np.isfinite(problem.additive_bhst), np.abs(problem.additive_bhst), 0.0)
        rounded = rounded + 3.0 * added + np.where(np.isfinite(masked), np.abs(masked), 0.0)
    return slope, rounded


def copy_floor(spec: AttentionSpec, exact: np.ndarray) -> np.ndarray:
    """Floor [b,k,t] of a present key or value [b,k,t,x]: only norm and rotary round it."""
    size = np.max(np.abs(exact), axis=-1, initial=0.0)
    rounded: np.ndarray = 2.0 * _roundings(spec) * unit_roundoff(spec.io_dtype) * size
    return rounded


def ensemble_error(spec: AttentionSpec, inputs: OracleInputs, exact: OracleResult) -> np.ndarray:
    """Worst error [b,h,s] of the plain ``spec.io_dtype`` implementations on these inputs."""
    return error_bounds(spec, inputs, exact).ensemble


def forward_floor(spec: AttentionSpec, inputs: OracleInputs, exact: OracleResult) -> np.ndarray:
    """The forward error bound [b,h,s] on these inputs."""
    return error_bounds(spec, inputs, exact).floor


def _roundings(spec: AttentionSpec) -> int:
    return 1 + (4 if spec.qk_norm is not None else 0) + (3 if spec.rotary is not None else 0)


def _averaged(bounds: ErrorBounds) -> ErrorBounds:
    return ErrorBounds(
        ensemble=bounds.ensemble.mean(axis=1),
        floor=bounds.floor.mean(axis=1),
        coarse=bounds.coarse.mean(axis=1),
        overflow=np.any(bounds.overflow, axis=1),
    )
