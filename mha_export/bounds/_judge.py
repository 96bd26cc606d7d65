"""The judgement of one array against the exact one and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

IMPRECISE_FACTOR = 32.0
"""Largest error, in units of the bound, that may still be rounding (ORT CPU's fp16 attention
is 5 to 21 times as coarse as its own primitive)."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one comparison found.

    Attributes:
        status: ``pass`` within the bound everywhere; ``imprecise`` right but coarser; ``fail``.
        max_abs: largest absolute error, over entries finite on both sides.
        max_rel: the same relative to the largest exact entry.
        rmse: root mean square error.
        bound: the bound of the row with the largest factor.
        factor: largest error in units of its row's bound (1 or less passes).
        nan_mismatch: entries that are NaN or infinite on one side and not the same on the other.
        where: index of the worst entry.
        reason: None, or what failed in words.
    """

    status: Literal["pass", "imprecise", "fail"]
    max_abs: float
    max_rel: float
    rmse: float
    bound: float
    factor: float
    nan_mismatch: int
    where: tuple[int, ...] = ()
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.status != "fail"


def judge(
    actual: np.ndarray,
    exact: np.ndarray,
    ensemble: np.ndarray,
    floor: np.ndarray,
    *,
    coarse: np.ndarray | None = None,
) -> Judgement:
    """Judge ``actual`` [..., e] against ``exact`` with row bounds [...].

    ``pass``: no entry is off by more than ``2 * ensemble + floor`` of its row. ``imprecise``:
    within :data:`IMPRECISE_FACTOR` of that bound *and* below ``coarse`` in every row, with the
    same NaN and infinities; without ``coarse`` nothing is imprecise. All else fails; so do
    wrong shapes and any NaN or Inf that is not in the exact answer too.
    """
    if actual.shape != exact.shape:
        return _failure(f"shape {list(actual.shape)}; expected {list(exact.shape)}", actual.size)
    got, want = actual.astype(np.float64), exact.astype(np.float64)
    if not got.size:
        return Judgement(
            status="pass", max_abs=0.0, max_rel=0.0, rmse=0.0, bound=0.0, factor=0.0, nan_mismatch=0
        )
    finite = np.isfinite(got) & np.isfinite(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    mismatches = int(np.count_nonzero(~finite & ~same))
    error = np.zeros_like(want)
    np.subtract(got, want, out=error, where=finite)
    np.abs(error, out=error)
    bound_rows = np.broadcast_to(2.0 * ensemble + floor, want.shape[:-1])
    bound = np.broadcast_to(bound_rows[..., None], want.shape)
    factor = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(factor)), want.shape))
    worst = float(factor[where])
    magnitude = float(np.max(np.abs(want), initial=0.0, where=finite))
    max_abs = float(error.max())
    status, reason = _verdict(error, coarse, worst, mismatches)
    if reason is not None:
        reason = f"{reason}, at {list(where)}: got {got[where]:.9g}, expected {want[where]:.9g}"
    return Judgement(
        status=status,
        max_abs=max_abs,
        max_rel=max_abs / magnitude if magnitude else 0.0,
        rmse=float(np.sqrt(np.mean(error**2))) if max_abs < 1e150 else max_abs,
        bound=float(bound[where]),
        factor=worst,
        nan_mismatch=mismatches,
        where=where,
        reason=reason,
    )


def _verdict(
    error: np.ndarray, coarse: np.ndarray | None, worst: float, mismatches: int
) -> tuple[Literal["pass", "imprecise", "fail"], str | None]:
    if mismatches:
        return "fail", f"{mismatches} entries are NaN or infinite on one side only"
    if worst <= 1.0:
        return "pass", None
    if (
        coarse is not None
        and worst <= IMPRECISE_FACTOR
        and bool(np.all(error <= coarse[..., None]))
    ):
        return "imprecise", f"error {worst:.3g} times the bound, as coarse rounding gives"
    return "fail", f"error {worst:.3g} times the bound"


def _failure(reason: str, count: int) -> Judgement:
    return Judgement(
        status="fail",
        max_abs=float("inf"),
        max_rel=float("inf"),
        rmse=float("inf"),
        bound=0.0,
        factor=float("inf"),
        nan_mismatch=count,
        reason=reason,
    )
