"""Latency one can trust: candidates in turn, round by round, each in a worker process of its own.

Sessions of one process slow each other three to ten times when their idle threads spin; the
workers run with spinning off, and only one of them works at a time. The order of a round is
shuffled. Each turn begins with a run that does not count: another candidate has had the caches
since. Every few rounds each candidate is loaded anew, for where its memory happens to lie makes
a session a percent faster or slower than its twin.
Ratios are taken within rounds, so a machine that slows down for a while slows both sides. Rounds
in which the machine itself was slow (see ``_pace``) do not count. Rounds go on until enough count
and the intervals are narrow, or the time is up, so a restless machine is measured longer. A run of
a second and more warms nothing that lasts: none is discarded before it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mha_export.measure._pace import Pace, calm_rounds
from mha_export.measure.statistics import latency_of, ratio_of
from mha_export.report.records import LatencyRecord, RatioRecord
from mha_export.targets import Limits, Outcome, TargetWorker

TIMER = "perf_counter around each run, device synchronised"
MOST_RUNS = 200
LEAST_ROUNDS = 5
FEWEST_ROUNDS = 3
"""However little time there is: an interval of two says nothing."""
FEWEST_CALM = 10
SLOW_MS = 1_000.0


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """How long to measure.

    Attributes:
        rounds: how often the candidates take turns, at least; so many must count.
        interval: rounds go on until every interval is this narrow: that of the ratios where there
            is a baseline, else that of the medians, relative to them.
        most_rounds: but no more rounds than this.
        stretch: after so many rounds every candidate is loaded anew; after more where loading
            takes longer than the turns in between.
        turn_ms: how long a turn should take; its runs follow from the first timings.
        warmup_ms: how long each candidate runs before the first round.
        most_ms: how long the turns of the slowest candidate may take together; no more rounds are
            run (but never fewer than five) than fit into it.
        most_s: after so many seconds, warm-up included, no more rounds begin (but never fewer
            than three).
        limits: of one turn.
        seed: of the order and of the resampling.
    """

    rounds: int = 30
    stretch: int = 3
    interval: float = 0.04
    most_rounds: int = 200
    turn_ms: float = 120.0
    warmup_ms: float = 400.0
    most_ms: float = 30_000.0
    most_s: float = math.inf
    limits: Limits = dataclasses.field(default_factory=Limits)
    seed: int = 0

    @classmethod
    def quick(cls, *, seed: int = 0) -> LatencySettings:
        """A tenth of the default time, however restless the machine."""
        return cls(
            rounds=9, most_rounds=9, turn_ms=40.0, warmup_ms=80.0, most_ms=2_000.0, seed=seed
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One candidate: a worker that has compiled its program, and what to run."""

    name: str
    worker: TargetWorker
    inputs: Mapping[str, np.ndarray]
    graph: str = "main"
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What became of a contender. ``problem``: why there is no ``latency``."""

    latency: LatencyRecord | None = None
    vs: RatioRecord | None = None
    first_run_ms: float | None = None
    peak_rss_mb: float | None = None
    problem: str | None = None


class _Turns:
    """A contender during the rounds."""

    def __init__(self, contender: Contender, settings: LatencySettings) -> None:
        self.contender = contender
        self.first_run_ms: float | None = None
        self.peak_rss_mb = 0.0
        self.problem: str | None = None
        self.warmup = 0
        self.discarded = 1
        self.runs = 1
        self.turn_ms = 0.0
        self.load_ms = 0.0
        self.rounds: list[Sequence[float]] = []
        self._settings = settings

    def warm_up(self) -> None:
        """The first run by itself, then enough runs to know how many make a turn.

        In a new process: what one has run before, here its parity cases, still shows in the memory
        of its later sessions, by a percent.
        """
        self.contender.worker.restart()
        first = self._time(repeats=1, warmup=0)
        if first is None:
            return
        self.first_run_ms = first[0]
        probe = self._time(repeats=1, warmup=0)
        if probe is not None and probe[0] >= SLOW_MS:
            self.discarded, self.warmup, self.turn_ms = 0, 2, probe[0]
            return
        probe = self._time(repeats=3, warmup=0)
        if probe is None:
            return
        each = max(float(np.median(probe)), 1e-3)
        more = min(int(self._settings.warmup_ms / each), MOST_RUNS)
        self.warmup = 5 + more
        self.runs = max(1, min(int(self._settings.turn_ms / each), MOST_RUNS))
        self.turn_ms = (1 + self.runs) * each
        if more:
            self._time(repeats=more, warmup=0)

    def turn(self) -> None:
        times = self._time(repeats=self.runs, warmup=self.discarded)
        if times is not None:
            self.rounds.append(times)

    def load_anew(self) -> None:
        """A fresh session in place of the one there is."""
        if self.problem is not None:
            return
        outcome = self.contender.worker.load(self.contender.graph, limits=self._settings.limits)
        if not outcome.ok or outcome.value is None:
            self.problem = outcome.reason
            return
        self.load_ms = max(self.load_ms, outcome.value.load_ms)
        self._time(repeats=1, warmup=self.discarded)

    def _time(self, *, repeats: int, warmup: int) -> Sequence[float] | None:
        if self.problem is not None:
            return None
        contender = self.contender
        outcome: Outcome[Sequence[float]] = contender.worker.time(
            contender.inputs,
            contender.graph,
            repeats=repeats,
            warmup=warmup,
            limits=self._settings.limits,
        )
        self.peak_rss_mb = max(self.peak_rss_mb, outcome.peak_rss_mb)
        if not outcome.ok or outcome.value is None:
            self.problem = outcome.reason
            return None
        return outcome.value

    def array(self) -> np.ndarray:
        return np.asarray(self.rounds, dtype=np.float64)


def measure_latency(
    contenders: Sequence[Contender],
    *,
    baseline: str | None = None,
    settings: LatencySettings | None = None,
    pace: Callable[[], float] | None = None,
    progress: Callable[[int, int], None] = lambda done, most: None,
) -> dict[str, Timing]:
    """Time every contender, interleaved.

    Args:
        contenders: each with a name of its own.
        baseline: name of the contender that ratios refer to; it gets none itself.
        settings: how long.
        pace: gives the time of a fixed piece of work, once a round; default: ``Pace``.
        progress: told before every round how many are done, and how many there are at most.

    Returns:
        By name. One that fails on the way is a ``problem``; the others go on.

    Errors:
        ValueError: two contenders share a name, or ``baseline`` names none.
    """
    settings = settings or LatencySettings()
    turns = {contender.name: _Turns(contender, settings) for contender in contenders}
    if len(turns) != len(contenders):
        raise ValueError("contenders share a name")
    if baseline is not None and baseline not in turns:
        raise ValueError(f"baseline {baseline!r} is none of {sorted(turns)}")
    ends = time.monotonic() + settings.most_s
    for contender in turns.values():
        contender.warm_up()
    if pace is not None:
        counted = _take_turns(turns, baseline, settings, pace, ends, progress)
    else:
        with Pace() as own_pace:
            counted = _take_turns(turns, baseline, settings, own_pace, ends, progress)
    return {name: _timing(turns, name, baseline, settings, counted) for name in turns}


@dataclass(frozen=True, eq=False)
class _Counted:
    """Which rounds count, and the pace of the machine in each."""

    calm: np.ndarray
    paces: np.ndarray

    @property
    def number(self) -> int:
        return int(self.calm.sum())

    @property
    def disturbed(self) -> int:
        return self.calm.size - self.number

    @property
    def pace_ms(self) -> float:
        return float(np.median(self.paces[self.calm]))


def _take_turns(
    turns: Mapping[str, _Turns],
    baseline: str | None,
    settings: LatencySettings,
    pace: Callable[[], float],
    ends: float,
    progress: Callable[[int, int], None],
) -> _Counted:
    """All rounds; returns which of them count: where few would, nothing can be told, and all do."""
    order = np.random.default_rng(settings.seed)
    names = list(turns)
    least, most = _rounds(turns.values(), settings)
    paces: list[float] = []
    counted = None
    since = 0

    def time_is_up() -> bool:
        return len(paces) >= FEWEST_ROUNDS and time.monotonic() >= ends

    while counted is None or (
        len(paces) < most
        and not time_is_up()
        and (counted.number < least or _wide(turns, baseline, settings, counted))
    ):
        for _ in range(min(least, most - len(paces))):
            if time_is_up():
                break
            if since >= _stretch(turns.values(), settings):
                since = 0
                for name in names:
                    turns[name].load_anew()
            progress(len(paces), most)
            paces.append(pace())
            for index in order.permutation(len(names)):
                turns[names[index]].turn()
            since += 1
        counted = _Counted(calm_rounds(paces), np.asarray(paces))
    if counted.number < FEWEST_CALM:
        return dataclasses.replace(counted, calm=np.ones_like(counted.calm))
    return counted


def _rounds(turns: Iterable[_Turns], settings: LatencySettings) -> tuple[int, int]:
    """The least and the most rounds."""
    slowest = max((turn.turn_ms for turn in turns), default=0.0)
    affordable = int(settings.most_ms / slowest) if slowest else settings.most_rounds
    most = max(min(settings.most_rounds, affordable), LEAST_ROUNDS)
    return min(settings.rounds, most), most


def _stretch(turns: Iterable[_Turns], settings: LatencySettings) -> int:
    """Rounds between two loads: loading takes at most as long as they do."""
    shares = [turn.load_ms / turn.turn_ms for turn in turns if turn.turn_ms]
    return max(settings.stretch, math.ceil(max(shares, default=0.0)))


def _wide(
    turns: Mapping[str, _Turns],
    baseline: str | None,
    settings: LatencySettings,
    counted: _Counted,
) -> bool:
    """Whether an interval is still wider than asked for; one that failed has none."""
    timings = [_timing(turns, name, baseline, settings, counted) for name in turns]
    if baseline is not None and turns[baseline].problem is None:
        intervals = [t.vs.high - t.vs.low for t in timings if t.vs is not None]
    else:
        intervals = [t.latency.interval or 0.0 for t in timings if t.latency is not None]
    return any(width > settings.interval for width in intervals)


def _timing(
    turns: Mapping[str, _Turns],
    name: str,
    baseline: str | None,
    settings: LatencySettings,
    counted: _Counted,
) -> Timing:
    own = turns[name]
    if own.problem is not None or not own.rounds:
        return Timing(
            first_run_ms=own.first_run_ms,
            peak_rss_mb=own.peak_rss_mb or None,
            problem=own.problem or "no round was run",
        )
    vs = None
    if baseline is not None and baseline != name:
        base = turns[baseline]
        if base.problem is None:
            vs = ratio_of(
                own.array()[counted.calm],
                base.array()[counted.calm],
                name=baseline,
                stretch=_stretch(turns.values(), settings),
                seed=settings.seed,
            )
    return Timing(
        latency=latency_of(
            own.array()[counted.calm],
            disturbed=counted.disturbed,
            pace_ms=counted.pace_ms,
            stretch=_stretch(turns.values(), settings),
            warmup=own.warmup + own.discarded * len(own.rounds),
            timer=TIMER,
            threads=own.contender.threads,
            seed=settings.seed,
        ),
        vs=vs,
        first_run_ms=own.first_run_ms,
        peak_rss_mb=own.peak_rss_mb or None,
    )
