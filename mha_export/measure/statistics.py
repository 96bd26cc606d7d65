"""Percentiles and bootstrap intervals of interleaved rounds of timings."""

from __future__ import annotations

import math

import numpy as np

from mha_export.report.records import LatencyRecord, RatioRecord

RESAMPLES = 2000
CONFIDENCE = 0.95


def latency_of(
    rounds: np.ndarray,
    *,
    warmup: int,
    timer: str,
    threads: int | None = None,
    stretch: int = 1,
    disturbed: int | None = None,
    pace_ms: float | None = None,
    seed: int = 0,
) -> LatencyRecord:
    """Percentiles over all runs, and the interval of the median by resampling stretches of rounds.

    A machine drifts over seconds, so neighbouring rounds are alike: stretches of about
    sqrt(rounds) consecutive ones, and no fewer than one session made, are drawn together (the
    moving-blocks bootstrap, Kuensch 1989).

    Args:
        rounds: milliseconds [rounds, runs of a round].
        warmup: how many runs came before and are not among them.
        timer: what read the time.
        threads: how many the runtime was given.
        stretch: how many consecutive rounds one session made.
        disturbed: how many rounds more there were in which the machine was slow.
        pace_ms: median time of a fixed piece of work in these rounds.
        seed: of the resampling.
    """
    flat = rounds.reshape(-1)
    p10, p50, p90, p99 = (float(q) for q in np.percentile(flat, (10, 50, 90, 99)))
    medians = np.median(
        _resampled(rounds, seed, block=_block(len(rounds), max(stretch, math.isqrt(len(rounds))))),
        axis=1,
    )
    low, high = _interval(medians)
    return LatencyRecord(
        p10=p10,
        p50=p50,
        p90=p90,
        p99=p99,
        n=int(flat.size),
        warmup=warmup,
        timer=timer,
        threads=threads,
        rounds=int(rounds.shape[0]),
        disturbed=disturbed,
        pace_ms=pace_ms,
        low=low,
        high=high,
    )


def ratio_of(
    rounds: np.ndarray, baseline: np.ndarray, *, name: str, stretch: int = 1, seed: int = 0
) -> RatioRecord:
    """Time over the baseline's: the median of the rounds' own ratios, so that drift cancels.

    Rounds of one pair of sessions share the luck of their memory, so they are drawn together.

    Args:
        rounds: milliseconds [rounds, runs]. baseline: the same rounds of the baseline.
        baseline: see ``rounds``.
        name: of the baseline.
        stretch: how many consecutive rounds one pair of sessions made.
        seed: of the resampling.
    """
    ratios = np.median(rounds, axis=1) / np.median(baseline, axis=1)
    drawn = _resampled(ratios[:, None], seed, block=_block(len(ratios), stretch))
    low, high = _interval(np.median(drawn, axis=1))
    return RatioRecord(
        baseline=name, ratio=float(np.median(ratios)), low=low, high=high, confidence=CONFIDENCE
    )


def _resampled(rounds: np.ndarray, seed: int, *, block: int = 1) -> np.ndarray:
    """[resamples, all runs]: stretches of ``block`` rounds drawn with replacement."""
    count = rounds.shape[0]
    starts = np.random.default_rng(seed).integers(
        0, count - block + 1, size=(RESAMPLES, -(-count // block))
    )
    chosen = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count]
    resampled: np.ndarray = rounds[chosen].reshape(RESAMPLES, -1)
    return resampled


def _block(rounds: int, wanted: int) -> int:
    """Rounds drawn together; where that leaves too few to tell anything, each by itself."""
    return wanted if rounds >= 3 * wanted else 1


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, (tail, 100 - tail))
    return float(low), float(high)
