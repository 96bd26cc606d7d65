"""Joining results of many machines, the verdict, and what changed since an earlier report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from mha_export.report import Report, changes_between, merge, open_report, verdict_of
from mha_export.report._figures import figure, milliseconds, ratio
from mha_export.report.records import (
    DoctorRecord,
    ExportRecord,
    HeadRecord,
    HeadsRecord,
    LatencyRecord,
    LayerHeadsRecord,
    Loaded,
    MachineRecord,
    ModelRecord,
    ParityRecord,
    PlacementRecord,
    RatioRecord,
    ResultRecord,
    ResultsRecord,
    StateRecord,
    TargetRecord,
    VariantRecord,
    write_json,
)

MACHINE = MachineRecord(id="m", os="o", cpu="c", memory_gb=1.0)
RIGHT = ResultRecord(
    model="net",
    model_sha256="0",
    target="cpu",
    status="pass",
    workload={"seq": 128},
    placement=PlacementRecord(float_compute_nodes=4, on_target=4),
    parity=ParityRecord(against="x", factor=0.2),
    latency_ms=LatencyRecord(
        p10=9, p50=10, p90=11, p99=12, n=100, warmup=5, timer="t", low=9.9, high=10.1
    ),
)


def _report(*results: ResultRecord, machine: MachineRecord = MACHINE) -> Report:
    run = ResultsRecord(machine=machine, results=results)
    return merge(Loaded(results=((Path("r.json"), run),)))


def test_of_two_results_of_one_measurement_the_later_stays() -> None:
    first = ResultsRecord(machine=MACHINE, results=(RIGHT,))
    second = ResultsRecord(machine=MACHINE, results=(dataclasses.replace(RIGHT, status="fail"),))
    joined = merge(Loaded(results=((Path("a"), first), (Path("b"), second))))
    assert [entry.result.status for entry in joined.entries] == ["fail"]


def test_machines_variants_and_workloads_are_kept_apart() -> None:
    other = dataclasses.replace(MACHINE, id="n")
    results = (
        RIGHT,
        dataclasses.replace(RIGHT, variant="original"),
        dataclasses.replace(RIGHT, workload={"seq": 64}),
        dataclasses.replace(RIGHT, precision="bf16"),
    )
    runs = tuple((Path(m.id), ResultsRecord(machine=m, results=results)) for m in (MACHINE, other))
    joined = merge(Loaded(results=runs))
    assert len(joined.entries) == 8
    assert [m.id for m in joined.machines] == ["m", "n"]


def test_variants_and_capabilities_of_one_model_and_machine_are_joined() -> None:
    """Each run knows the targets it was asked for; the report knows them all."""
    model = ModelRecord(name="net", sha256="0", opsets={"": 20}, producer="p", nodes=1)
    state = StateRecord(status="available")

    def run(target: str, opset: int) -> ResultsRecord:
        variant = VariantRecord(target=target, file=f"{target}.onnx", dtype="fp32", opset=opset)
        known = TargetRecord(target=target, build=state, run=state, version=str(opset))
        return ResultsRecord(
            machine=MACHINE,
            results=(dataclasses.replace(RIGHT, target=target),),
            exports=(ExportRecord(model=model, variants=(variant,)),),
            doctor=DoctorRecord(machine=MACHINE, targets=(known,)),
        )

    runs = [run("wasm", 20), run("cpu", 23), run("wasm", 21)]
    joined = merge(Loaded(results=tuple((Path("r"), own) for own in runs)))
    (export,) = joined.exports.values()
    assert [(v.target, v.opset) for v in export.variants] == [("cpu", 23), ("wasm", 21)]
    assert [(t.target, t.version) for t in joined.doctors["m"].targets] == [
        ("cpu", "23"),
        ("wasm", "21"),
    ]
    assert [len(own.exports[0].variants) for own in joined.runs] == [2]


def test_order_does_not_depend_on_the_order_of_files(sample: Report) -> None:
    again = merge(Loaded(results=tuple((Path("x"), run) for run in reversed(sample.runs))))
    assert [e.result for e in again.entries] == [e.result for e in sample.entries]


def test_sizes_sort_as_numbers() -> None:
    sizes = (128, 64, 1024)
    joined = _report(*(dataclasses.replace(RIGHT, workload={"seq": n}) for n in sizes))
    assert [e.result.workload["seq"] for e in joined.entries] == [64, 128, 1024]


VERDICTS = {"pass": 0, "imprecise": 0, "built": 0, "unsupported": 0, "unavailable": 0}
VERDICTS |= {"fail": 1, "fallback": 1, "error": 1}


@pytest.mark.parametrize(("status", "code"), VERDICTS.items(), ids=VERDICTS)
def test_the_exit_code_follows_the_statuses(status: str, code: int) -> None:
    verdict = verdict_of(_report(dataclasses.replace(RIGHT, status=status)))
    assert verdict.exit_code == code
    assert verdict.line.startswith("FAIL" if code else "PASS")
    assert f"1 {status}" in verdict.line


def test_a_report_of_heads_alone_says_what_it_holds() -> None:
    model = ModelRecord(name="m", sha256="0" * 64)
    layer = LayerHeadsRecord(
        layer=0, site="a", q_heads=2, kv_heads=2, heads=(HeadRecord(head=0), HeadRecord(head=1))
    )
    heads = HeadsRecord(
        machine=MACHINE, model=model, data="d", samples=1, tokens=1, layers=(layer,)
    )
    empty = ResultsRecord(machine=MACHINE)
    alone = merge(Loaded(results=((Path("h.json"), dataclasses.replace(empty, heads=(heads,))),)))
    verdict = verdict_of(alone)
    assert verdict.ok
    assert verdict.line == "PASS 2 heads of 1 model analysed: nothing was run on a target"
    nothing = merge(Loaded(results=((Path("r.json"), empty),)))
    assert verdict_of(nothing).line == "PASS 0 results on 1 machine: nothing was run"


def test_a_regression_fails_a_report_of_passes() -> None:
    new = dataclasses.replace(RIGHT, placement=PlacementRecord(float_compute_nodes=4, on_target=3))
    old, report = _report(RIGHT), _report(new)
    changed = dataclasses.replace(report, changes=changes_between(report, old))
    assert verdict_of(report).ok
    assert not verdict_of(changed).ok


def _latency(p50: float) -> LatencyRecord:
    assert RIGHT.latency_ms is not None
    return dataclasses.replace(
        RIGHT.latency_ms,
        p10=p50 * 0.9,
        p50=p50,
        p90=p50 * 1.1,
        p99=p50 * 1.2,
        low=p50 * 0.99,
        high=p50 * 1.01,
    )


def _with_ratio(p50: float, value: float) -> ResultRecord:
    vs = RatioRecord(baseline="raw", ratio=value, low=value * 0.99, high=value * 1.01)
    return dataclasses.replace(RIGHT, latency_ms=_latency(p50), vs=vs)


def _parity(factor: float) -> ResultRecord:
    return dataclasses.replace(RIGHT, parity=ParityRecord(against="x", factor=factor))


CHANGES: dict[str, tuple[ResultRecord, ResultRecord, list[tuple[str, str]]]] = {
    "nothing": (RIGHT, RIGHT, []),
    "slower": (
        RIGHT,
        dataclasses.replace(RIGHT, latency_ms=_latency(11)),
        [("latency", "regression")],
    ),
    "faster": (
        RIGHT,
        dataclasses.replace(RIGHT, latency_ms=_latency(9)),
        [("latency", "improvement")],
    ),
    "within the interval": (RIGHT, dataclasses.replace(RIGHT, latency_ms=_latency(10.15)), []),
    "slower as the baseline is": (
        _with_ratio(10, 0.8),
        _with_ratio(15, 0.8),
        [("latency", "note")],
    ),
    "slower than the baseline": (
        _with_ratio(10, 0.8),
        _with_ratio(15, 1.2),
        [("latency", "regression")],
    ),
    "the unmodified model is slower": (
        dataclasses.replace(RIGHT, variant="original"),
        dataclasses.replace(RIGHT, variant="original", latency_ms=_latency(12)),
        [("latency", "note")],
    ),
    "past its bound": (_parity(0.5), _parity(1.5), [("parity", "regression")]),
    "four times nearer to it": (_parity(0.1), _parity(0.5), [("parity", "regression")]),
    "four times of next to nothing": (_parity(0.01), _parity(0.05), []),
    "more exact": (_parity(0.9), _parity(0.1), [("parity", "improvement")]),
    "off the target": (
        RIGHT,
        dataclasses.replace(RIGHT, placement=PlacementRecord(float_compute_nodes=4, on_target=3)),
        [("placement", "regression")],
    ),
    "fewer nodes, all on it": (
        RIGHT,
        dataclasses.replace(RIGHT, placement=PlacementRecord(float_compute_nodes=2, on_target=2)),
        [],
    ),
    "now imprecise": (
        RIGHT,
        dataclasses.replace(RIGHT, status="imprecise"),
        [("status", "regression")],
    ),
    "repaired": (
        dataclasses.replace(RIGHT, status="error"),
        RIGHT,
        [("status", "improvement")],
    ),
    "exported again": (
        dataclasses.replace(RIGHT, variant_sha256="1", model_sha256="1"),
        dataclasses.replace(RIGHT, variant_sha256="2", model_sha256="2"),
        [],
    ),
}


@pytest.mark.parametrize(("old", "new", "found"), CHANGES.values(), ids=CHANGES)
def test_what_counts_as_a_change(
    old: ResultRecord, new: ResultRecord, found: list[tuple[str, str]]
) -> None:
    changes = changes_between(_report(new), _report(old))
    assert [(c.kind, c.severity) for c in changes] == found


def test_what_is_no_longer_measured_is_a_regression_and_another_machine_is_not() -> None:
    gone = changes_between(_report(), _report(RIGHT))
    assert [(c.kind, c.severity) for c in gone] == [("missing", "regression")]
    other = dataclasses.replace(MACHINE, id="elsewhere")
    assert changes_between(_report(machine=other), _report(RIGHT)) == ()


def test_against_a_file(tmp_path: Path) -> None:
    old = write_json(tmp_path / "old.json", ResultsRecord(machine=MACHINE, results=(RIGHT,)))
    new = dataclasses.replace(RIGHT, status="fail", reason="wrong")
    path = write_json(tmp_path / "new.json", ResultsRecord(machine=MACHINE, results=(new,)))
    report = open_report([path], against=old)
    assert [c.kind for c in report.changes or ()] == ["status"]
    assert open_report([path]).changes is None


FIGURES: dict[str, tuple[Callable[[float | None], str], float | None, str]] = {
    "nothing": (figure, None, "–"),
    "zero": (figure, 0.0, "0"),
    "small": (figure, 3.214e-7, "3.2e-7"),
    "plain": (figure, 0.51234, "0.512"),
    "whole": (figure, 4310.0, "4310"),
    "large": (figure, 123456.0, "1.2e+5"),
    "infinite": (figure, float("inf"), "∞"),
    "not a number": (figure, float("nan"), "NaN"),
    "microseconds": (milliseconds, 0.004, "4 µs"),
    "milliseconds": (milliseconds, 12.345, "12.3 ms"),
    "hundreds": (milliseconds, 214.4, "214 ms"),
    "seconds": (milliseconds, 1250.0, "1.25 s"),
    "ratio": (ratio, 0.561, "0.56×"),
    "large ratio": (ratio, 9482.0, "9482×"),
}


@pytest.mark.parametrize(("render", "value", "text"), FIGURES.values(), ids=FIGURES)
def test_figures(render: Callable[[float | None], str], value: float | None, text: str) -> None:
    assert render(value) == text
