"""How long a run takes, and how that compares with another."""

from __future__ import annotations

from dataclasses import dataclass

from mha_export.errors import InputError
from mha_export.report.records._codec import Record


@dataclass(frozen=True, kw_only=True)
class LatencyRecord(Record):
    """Milliseconds of one run, device synchronised; ``warmup`` earlier runs do not count."""

    p10: float
    p50: float
    p90: float
    p99: float
    n: int
    warmup: int
    timer: str
    threads: int | None = None
    rounds: int | None = None
    disturbed: int | None = None
    """Rounds besides, in which the machine itself ran slower than it does: they do not count."""
    pace_ms: float | None = None
    """Median time, in the rounds that count, of a fixed piece of work: how fast the machine was."""
    low: float | None = None
    """95% bootstrap interval of p50."""
    high: float | None = None

    def __post_init__(self) -> None:
        if not self.p10 <= self.p50 <= self.p90 <= self.p99:
            raise InputError(
                f"latency percentiles are not in order: p10 {self.p10}, p50 {self.p50}, "
                f"p90 {self.p90}, p99 {self.p99}"
            )

    @property
    def interval(self) -> float | None:
        """Width of the interval of the median, relative to it; None where there is none."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / self.p50


@dataclass(frozen=True, kw_only=True)
class RatioRecord(Record):
    """Time over the baseline's in the same rounds, with its bootstrap interval; below 1: faster."""

    baseline: str
    ratio: float
    low: float
    high: float
    confidence: float = 0.95
