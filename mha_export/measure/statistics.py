"""Percentiles and bootstrap intervals of interleaved rounds of timings."""

from __future__ import annotations

import math
from statistics import NormalDist

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
    block = _block(len(rounds), max(stretch, math.isqrt(len(rounds))))
    medians = np.median(_resampled(rounds, seed, block=block), axis=1)
    low, high = _interval(medians, blocks=len(rounds) // block)
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
    block = _block(len(ratios), stretch)
    drawn = _resampled(ratios[:, None], seed, block=block)
    low, high = _interval(np.median(drawn, axis=1), blocks=len(ratios) // block)
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


def _interval(values: np.ndarray, *, blocks: int) -> tuple[float, float]:
    """Expanded percentile interval: a bootstrap of few blocks is too narrow by itself.

    The tail is Phi(-sqrt(n / (n - 1)) t), t the quantile of Student's distribution of n - 1
    degrees of freedom, for n blocks (Hesterberg 2015, What Teachers Should Know about the
    Bootstrap, section 5.3).
    """
    tail = (1 - CONFIDENCE) / 2
    if blocks > 1:
        spread = math.sqrt(blocks / (blocks - 1)) * _student(1 - tail, blocks - 1)
        tail = NormalDist().cdf(-spread)
    low, high = np.percentile(values, (100 * tail, 100 * (1 - tail)))
    return float(low), float(high)


def _student(quantile: float, freedom: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(quantile)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
