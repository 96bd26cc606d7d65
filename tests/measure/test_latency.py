"""Latency: statistics on made-up rounds, interleaving and failures with made-up workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mha_export.measure import (
    Contender,
    LatencySettings,
    latency,
    machine_record,
    measure_latency,
    statistics,
)
from mha_export.measure._pace import Pace, calm_rounds
from mha_export.measure.roofline import Ceilings, Work, rates
from mha_export.measure.statistics import latency_of, ratio_of
from mha_export.report.records import MachineRecord
from mha_export.targets import Loaded, Outcome

SETTINGS = LatencySettings(rounds=6, turn_ms=4.0, warmup_ms=4.0, seed=1)


def even_pace() -> float:
    return 1.0


class FakeWorker:
    """Answers with times from a list of milliseconds a run; notes each call in ``log``."""

    def __init__(
        self, name: str, ms: float, log: list[tuple[str, int]], dies_at: int | None = None
    ) -> None:
        self.name, self.ms, self.log, self.dies_at = name, ms, log, dies_at
        self.calls = self.loads = 0
        self.load_ms = 0.5

    def time(
        self, inputs: Mapping[str, np.ndarray], graph: str, *, repeats: int, warmup: int, **_: Any
    ) -> Outcome[Sequence[float]]:
        self.calls += 1
        self.log.append((self.name, repeats))
        if self.dies_at is not None and self.calls >= self.dies_at:
            return Outcome(kind="crash", message="killed by SIGSEGV")
        return Outcome(kind="ok", value=[self.ms] * repeats, peak_rss_mb=10.0 * self.calls)

    def restart(self) -> None:
        self.log.append((self.name, 0))

    def load(self, graph: str, **_: Any) -> Outcome[Loaded]:
        self.loads += 1
        return Outcome(kind="ok", value=Loaded(load_ms=self.load_ms))


def _contender(worker: FakeWorker) -> Contender:
    return Contender(name=worker.name, worker=worker, inputs={}, threads=2)  # type: ignore[arg-type]


def test_candidates_take_turns_in_a_shuffled_order() -> None:
    log: list[tuple[str, int]] = []
    workers = [FakeWorker(name, 1.0, log) for name in "abc"]
    measure_latency([_contender(w) for w in workers], settings=SETTINGS, pace=even_pace)
    turns = [name for name, runs in log if runs > 1][-3 * SETTINGS.rounds :]
    rounds = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1


def test_ratios_refer_to_the_baseline() -> None:
    log: list[tuple[str, int]] = []
    workers = [FakeWorker("raw", 2.0, log), FakeWorker("fast", 0.5, log)]
    found = measure_latency(
        [_contender(w) for w in workers], baseline="raw", settings=SETTINGS, pace=even_pace
    )
    assert found["raw"].vs is None
    vs = found["fast"].vs
    assert vs is not None
    assert (vs.baseline, vs.ratio, vs.low, vs.high) == ("raw", 0.25, 0.25, 0.25)
    latency = found["fast"].latency
    assert latency is not None
    assert (latency.p50, latency.rounds, latency.threads) == (0.5, 6, 2)
    assert latency.n == 6 * 8
    assert found["fast"].first_run_ms == 0.5
    assert found["fast"].peak_rss_mb == 10.0 * workers[1].calls


@pytest.mark.parametrize("dies_at", [1, 2, 5], ids=["first run", "probe", "in a round"])
def test_one_that_dies_does_not_take_the_others_with_it(dies_at: int) -> None:
    log: list[tuple[str, int]] = []
    workers = [FakeWorker("a", 1.0, log), FakeWorker("b", 1.0, log, dies_at=dies_at)]
    found = measure_latency(
        [_contender(w) for w in workers], baseline="b", settings=SETTINGS, pace=even_pace
    )
    assert found["b"].latency is None
    assert "SIGSEGV" in (found["b"].problem or "")
    assert found["a"].latency is not None
    assert found["a"].vs is None, "there is no baseline to refer to"


def test_no_candidate_is_timed_in_a_process_with_a_history() -> None:
    log: list[tuple[str, int]] = []
    measure_latency(
        [_contender(FakeWorker(name, 1.0, log)) for name in "ab"], settings=SETTINGS, pace=even_pace
    )
    for name in "ab":
        assert next(runs for who, runs in log if who == name) == 0


@pytest.mark.parametrize(
    ("load_ms", "loads"),
    [
        pytest.param(0.5, 3, id="quick to load: after every stretch"),
        pytest.param(1e4, 1, id="slow to load: once, to know that it is slow"),
    ],
)
def test_candidates_are_loaded_anew_between_stretches(load_ms: float, loads: int) -> None:
    worker = FakeWorker("a", 1.0, [])
    worker.load_ms = load_ms
    settings = dataclasses.replace(SETTINGS, rounds=12)
    measure_latency([_contender(worker)], settings=settings, pace=even_pace)
    assert worker.loads == loads


def test_a_baseline_must_be_a_contender() -> None:
    with pytest.raises(ValueError, match="baseline 'raw' is none of"):
        measure_latency(
            [_contender(FakeWorker("a", 1.0, []))],
            baseline="raw",
            settings=SETTINGS,
            pace=even_pace,
        )


def _rounds(scale: float, seed: int) -> np.ndarray:
    """25 rounds of 20 runs that drift together by 30% and jitter apart by 3%."""
    drift = 1.0 + 0.3 * np.sin(np.arange(25) / 4)[:, None]
    return scale * drift * np.random.default_rng(seed).lognormal(0.0, 0.03, size=(25, 20))


def test_the_ratio_of_a_model_to_itself_holds_one_in_nineteen_of_twenty_tries() -> None:
    found = [ratio_of(_rounds(1.0, 2 * i), _rounds(1.0, 2 * i + 1), name="raw") for i in range(20)]
    assert sum(r.low <= 1.0 <= r.high for r in found) >= 17
    assert max(r.high - r.low for r in found) < 0.05, "the common drift must cancel"


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776), (10, 2.228), (30, 2.042)])
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert statistics._student(0.975, freedom) == pytest.approx(expected, abs=0.02)


def test_an_interval_of_few_blocks_is_wider_than_its_bootstrap() -> None:
    values = np.random.default_rng(0).standard_normal(20_000)
    few, many = (statistics._interval(values, blocks=n) for n in (6, 600))
    assert many == pytest.approx((-1.96, 1.96), abs=0.06)
    assert few[1] > 2.5
    assert few[0] < -2.5


def test_a_true_ratio_is_told_from_one() -> None:
    found = ratio_of(_rounds(0.9, 1), _rounds(1.0, 2), name="raw")
    assert found.high < 1.0
    assert found.ratio == pytest.approx(0.9, abs=0.02)


def test_percentiles_and_interval_are_in_order() -> None:
    latency = latency_of(_rounds(3.0, 4), warmup=7, timer="t")
    assert latency.p10 < latency.p50 < latency.p90 < latency.p99
    assert latency.low is not None
    assert latency.high is not None
    assert latency.low <= latency.p50 <= latency.high
    assert (latency.n, latency.rounds, latency.warmup) == (500, 25, 7)


def test_the_nearer_limit_decides_the_fraction() -> None:
    work = Work(flops=1e9, nbytes=1e8)
    compute_bound = rates(work, 10.0, Ceilings(gemm_gflops=200.0, copy_gbytes_s=100.0))
    assert compute_bound.fraction == pytest.approx(0.5)
    memory_bound = rates(work, 10.0, Ceilings(gemm_gflops=1000.0, copy_gbytes_s=12.5))
    assert memory_bound.fraction == pytest.approx(0.8)
    assert rates(work, 10.0, Ceilings()).fraction is None
    assert compute_bound.gflops == pytest.approx(100.0)


def test_this_machine_has_a_stable_record() -> None:
    first, again = machine_record(), machine_record()
    assert first.id == again.id
    assert first.memory_gb > 0
    assert first.cores
    assert MachineRecord.from_json(first.to_json()) == first


@pytest.mark.parametrize(
    ("turn_ms", "rounds"),
    [
        pytest.param(10.0, (30, 200), id="fast: all rounds"),
        pytest.param(600.0, (30, 50), id="slower: some more"),
        pytest.param(3_000.0, (10, 10), id="slow: as many as there is time for"),
        pytest.param(60_000.0, (5, 5), id="very slow: the least"),
    ],
)
def test_slow_candidates_get_fewer_rounds(turn_ms: float, rounds: tuple[int, int]) -> None:
    settings = LatencySettings()
    turns = latency._Turns(Contender(name="a", worker=None, inputs={}), settings)  # type: ignore[arg-type]
    turns.turn_ms = turn_ms
    assert latency._rounds([turns], settings) == rounds


class RestlessWorker(FakeWorker):
    """Its turns differ by ``spread``, alternately slow and fast."""

    def __init__(self, name: str, spread: float) -> None:
        super().__init__(name, 1.0, [])
        self.spread = spread

    def time(self, *args: Any, repeats: int, **options: Any) -> Outcome[Sequence[float]]:
        outcome = super().time(*args, repeats=repeats, **options)
        ms = 1.0 + self.spread * np.random.default_rng(self.calls).standard_normal()
        return Outcome(kind="ok", value=[ms] * repeats, peak_rss_mb=outcome.peak_rss_mb)


@pytest.mark.parametrize(
    ("spread", "rounds"),
    [
        pytest.param(0.0, 10, id="still: the least"),
        pytest.param(0.05, range(20, 110, 10), id="restless: until the interval is narrow"),
        pytest.param(0.5, 120, id="wild: the most"),
    ],
)
def test_a_restless_machine_is_measured_longer(spread: float, rounds: int | range) -> None:
    settings = LatencySettings(rounds=10, most_rounds=120, interval=0.035, turn_ms=4.0)
    found = measure_latency(
        [_contender(RestlessWorker("a", spread))], settings=settings, pace=even_pace
    )
    got = found["a"].latency
    assert got is not None
    assert got.rounds == rounds or (isinstance(rounds, range) and got.rounds in rounds)
    if isinstance(rounds, range):
        assert got.interval is not None
        assert got.interval <= settings.interval


class SlowedWorker(FakeWorker):
    """Half as fast while the machine is disturbed, which ``pace`` sees too."""

    def __init__(self, disturbed: range) -> None:
        super().__init__("a", 1.0, [])
        self.disturbed = disturbed
        self.round = -1

    def pace(self) -> float:
        self.round += 1
        return 1.3 if self.round in self.disturbed else 1.0

    def time(self, *args: Any, repeats: int, **options: Any) -> Outcome[Sequence[float]]:
        self.ms = 2.0 if self.round in self.disturbed else 1.0
        return super().time(*args, repeats=repeats, **options)


@pytest.mark.parametrize(
    ("disturbed", "counted", "left_out"),
    [
        pytest.param(range(0), 30, 0, id="none"),
        pytest.param(range(25), 35, 25, id="the first 25: measured until 30 count"),
        pytest.param(range(40, 100), 30, 0, id="later than it lasts"),
    ],
)
def test_rounds_of_a_slowed_machine_do_not_count(
    disturbed: range, counted: int, left_out: int
) -> None:
    worker = SlowedWorker(disturbed)
    settings = LatencySettings(rounds=30, turn_ms=4.0, warmup_ms=4.0)
    found = measure_latency([_contender(worker)], settings=settings, pace=worker.pace)["a"].latency
    assert found is not None
    assert (found.rounds, found.disturbed) == (counted, left_out)
    assert (found.p10, found.p99, found.pace_ms) == (1.0, 1.0, 1.0)


def test_where_few_rounds_are_calm_all_count() -> None:
    worker = SlowedWorker(range(5, 100))
    settings = LatencySettings(rounds=30, most_rounds=30, turn_ms=4.0, warmup_ms=4.0)
    found = measure_latency([_contender(worker)], settings=settings, pace=worker.pace)["a"].latency
    assert found is not None
    assert (found.rounds, found.disturbed, found.p50) == (30, 0, 2.0)


@pytest.mark.parametrize(
    ("paces", "calm"),
    [
        pytest.param([1.0] * 9 + [9.0], 10, id="one jerk is the kernel's own, not the machine's"),
        pytest.param([1.0] * 5 + [1.2] * 35, 5, id="a tenth is enough to know the pace"),
        pytest.param([1.0] * 20 + [1.04] * 20, 40, id="within the tolerance"),
        pytest.param([1.0] * 20 + [1.06] * 20, 20, id="beyond it"),
        pytest.param([1.06] * 20 + [1.0] * 20, 20, id="the later half"),
    ],
)
def test_calm_rounds_are_those_near_the_best_tenth(paces: list[float], calm: int) -> None:
    assert calm_rounds(paces).sum() == calm


def test_the_pace_of_this_machine_is_a_time() -> None:
    with Pace() as pace:
        assert 0.0 < pace() < 60_000.0


def test_the_interval_knows_that_the_machine_drifts() -> None:
    rounds = _rounds(1.0, 3)
    drifting = latency_of(rounds, warmup=0, timer="t")
    shuffled = latency_of(np.random.default_rng(0).permutation(rounds), warmup=0, timer="t")
    assert drifting.interval is not None
    assert shuffled.interval is not None
    assert drifting.interval > 1.3 * shuffled.interval


@pytest.mark.parametrize(
    ("ms", "most_s", "rounds", "discarded"),
    [
        pytest.param(1.0, 0.0, 3, 3, id="no time: the fewest rounds"),
        pytest.param(1.0, 1e6, 6, 6, id="time enough"),
        pytest.param(4_000.0, 1e6, 7, 0, id="slow: as fit into most_ms, and none discarded"),
        pytest.param(4_000.0, 0.0, 3, 0, id="slow, no time"),
    ],
)
def test_timing_ends_when_its_time_is_up(
    ms: float, most_s: float, rounds: int, discarded: int
) -> None:
    log: list[tuple[str, int]] = []
    settings = dataclasses.replace(SETTINGS, most_s=most_s, rounds=7 if ms > 1 else 6)
    found = measure_latency(
        [_contender(FakeWorker("a", ms, log))], settings=settings, pace=even_pace
    )["a"].latency
    assert found is not None
    assert found.rounds == rounds
    assert found.warmup == (2 if ms > 1 else 9) + discarded
