"""Tuning: what is tried, what is chosen, that an export takes it, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.jobs import (
    ExportSettings,
    RunSettings,
    TuneSettings,
    Workload,
    export_model,
    tune_model,
    write_report,
)
from mha_export.jobs._plan import read_plan
from mha_export.jobs.tune import _by_graph, _fastest
from mha_export.measure import tuning
from mha_export.measure.tuning import SPENT, Tried, Way, latency_settings, lengths_at, ways
from mha_export.report.records import validate
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, MaskSpec

CAUSAL = MaskSpec(causal=CausalAlignment.TOP_LEFT)


def _spec(**fields: object) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 8, **fields})  # type: ignore[arg-type]


def _settings(*lengths: int, budget: float | None = 60.0) -> TuneSettings:
    workloads = tuple(Workload(dims={"batch": 1, "seq": n}) for n in lengths)
    return TuneSettings(run=RunSettings(workloads=workloads, quick=True), budget=budget)


@pytest.fixture(scope="module")
def plan(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = tune_model(encoder, target="cpu", output=path, settings=_settings(4))
    assert result.ok, result.notices
    return path


def test_a_plan_is_valid_and_names_the_fastest(plan: Path) -> None:
    document = json.loads(plan.read_text(encoding="utf-8"))
    validate("plan", document)
    (chosen,) = document["targets"]["cpu"].values()
    timed = {row["form"]: row["latency_ms"]["p50"] for row in document["measured"]}
    assert {"primitive", "onnx", "grouped"} <= set(timed)
    assert timed[chosen["form"]] == min(timed.values())
    assert document["question"]["runtime_version"]
    assert document["machine"]["id"]


@pytest.mark.parametrize("suffix", [".md", ".html"])
def test_a_report_shows_the_plan(plan: Path, tmp_path: Path, suffix: str) -> None:
    """Every way with its time, and which one was chosen; a report in JSON is read again."""
    merged = tmp_path / "report.json"
    assert write_report([plan], output=merged).ok
    page = tmp_path / f"page{suffix}"
    result = write_report([merged], output=page)
    assert "1 plan" in result.document["verdict"]
    text = page.read_text(encoding="utf-8")
    document = json.loads(plan.read_text(encoding="utf-8"))
    assert document["model"] in text
    for row in document["measured"]:
        assert row["form"].replace("_", "\\_") in text
    assert "chosen for" in text
    assert "q_len=4" in text.replace("\\", "")


def test_a_plan_that_is_cut_short_is_named(plan: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(plan.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    result = write_report([plan, cut], output=tmp_path / "report.md")
    assert [str(cut) in notice for notice in result.notices] == [True]


def test_an_export_takes_the_plan(plan: Path, encoder: Path, tmp_path: Path) -> None:
    chosen = json.loads(plan.read_text(encoding="utf-8"))["targets"]["cpu"]
    settings = ExportSettings(plan=plan)
    result = export_model(encoder, targets=["cpu"], out=tmp_path / "out", settings=settings)
    assert result.ok, result.notices
    (variant,) = result.document["variants"]
    forms = {site: outcome["form"] for site, outcome in variant["sites"].items()}
    assert forms == {site: row["form"] for site, row in chosen.items()}


def test_a_second_run_goes_on_from_the_first(
    plan: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(plan.read_text(encoding="utf-8"))["measured"]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("mha_export.jobs.tune.try_ways", never)
    result = tune_model(encoder, target="cpu", output=plan, settings=_settings(4))
    assert result.ok
    assert result.document["measured"] == before


def test_a_spent_budget_leaves_rows_to_go_on_with(encoder: Path, tmp_path: Path) -> None:
    settings = _settings(4, budget=1e-6)
    result = tune_model(encoder, target="cpu", output=tmp_path / "p.json", settings=settings)
    assert result.exit_code == 1
    assert [row["problem"] for row in result.document["measured"]] == [SPENT]
    assert any(SPENT in notice for notice in result.notices)


def test_a_killed_run_loses_only_what_it_was_measuring(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written on the way out: what a kill leaves is what each measurement wrote."""
    path, seen = tmp_path / "plan.json", []

    def dies(*_: object, lengths: dict[str, int], **__: object) -> list[Tried]:
        seen.append(lengths["q_len"])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return [Tried(way=Way(form="primitive"), problem="not here")]

    monkeypatch.setattr("mha_export.jobs.tune.try_ways", dies)
    with pytest.raises(KeyboardInterrupt):
        tune_model(encoder, target="cpu", output=path, settings=_settings(4, 8))
    validate("plan", json.loads(path.read_text(encoding="utf-8")))
    tune_model(encoder, target="cpu", output=path, settings=_settings(4, 8))
    assert seen == [4, 8, 8], "the length that was measured is not measured again"


def test_a_workload_that_was_cut_short_is_measured_anew(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the ways against the other half of another hour would be no comparison."""
    path, seen = tmp_path / "plan.json", []

    def short(*_: object, lengths: dict[str, int], **__: object) -> list[Tried]:
        seen.append(lengths["q_len"])
        ways_ = (Way(form="primitive"), Way(form="onnx"))
        return [Tried(way=way, problem=SPENT if way.form == "onnx" else "no") for way in ways_]

    monkeypatch.setattr("mha_export.jobs.tune.try_ways", short)
    for _ in range(2):
        tune_model(encoder, target="cpu", output=path, settings=_settings(4))
    assert seen == [4, 4]


def test_building_counts_against_the_budget() -> None:
    """The first way is built whatever it takes; the clock then stands before the others."""
    spec = _spec(q_len=4, kv_len=4, mask=CAUSAL)
    tried = tuning.try_ways(
        spec,
        [Way(form="primitive"), Way(form="onnx")],
        target="cpu",
        precision=None,
        opset=23,
        lengths={"batch": 1, "q_len": 4, "kv_len": 4},
        seconds=1e-3,
        quick=True,
        seed=0,
    )
    assert [one.problem for one in tried] == [SPENT, SPENT]


@pytest.mark.parametrize("given", ["dims", "shapes"])
def test_sizes_reach_the_measurement(
    given: str, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ir.load(encoder)
    name, shape = model.graph.inputs[0].name, [3, 5, *list(model.graph.inputs[0].shape)[2:]]
    sizes = {"dims": {"batch": 3, "seq": 5}} if given == "dims" else {"shapes": {name: shape}}
    found: list[dict[str, int]] = []
    monkeypatch.setattr(
        "mha_export.jobs.tune.try_ways", lambda *_, lengths, **__: found.append(lengths) or []
    )
    settings = TuneSettings(run=RunSettings(workloads=(Workload(**sizes),), quick=True))
    tune_model(encoder, target="cpu", output=tmp_path / "plan.json", settings=settings)
    assert [(lengths["batch"], lengths["q_len"]) for lengths in found] == [(3, 5)]


@pytest.mark.parametrize("sizes", [{"dims": {"sequence": 5}}, {"shapes": {"nobody": (1, 2)}}])
def test_a_size_of_nothing_is_refused(
    sizes: dict[str, dict[str, object]], encoder: Path, tmp_path: Path
) -> None:
    settings = TuneSettings(run=RunSettings(workloads=(Workload(**sizes),)))  # type: ignore[arg-type]
    with pytest.raises(InputError):
        tune_model(encoder, target="cpu", output=tmp_path / "plan.json", settings=settings)
    assert not (tmp_path / "plan.json").exists()


def test_prompts_and_steps_have_a_row_each() -> None:
    """grouped is best at one query, tiled at many, and neither can do both."""
    times = {("onnx", 1): 9.0, ("onnx", 64): 9.0, ("grouped", 1): 1.0, ("tiled", 64): 2.0}
    rows = [
        {"lengths": {"q_len": n}, "form": form, "params": {}, "latency_ms": {"p50": ms}}
        for (form, n), ms in times.items()
    ]
    graphs = _by_graph(rows)
    found = {graph: (_fastest(own) or {})["form"] for graph, own in graphs.items()}
    assert found == {"main": "onnx", "prefill": "tiled", "decode": "grouped"}
    assert set(_by_graph(rows[:1])) == {"main"}


def test_a_graph_reads_its_own_row_of_a_plan_first(tmp_path: Path) -> None:
    from mha_export.jobs._phases import plan_names

    rows = {"cpu": {"*": {"form": "onnx"}}, "cpu.decode": {"*": {"form": "grouped"}}}
    (tmp_path / "plan.json").write_text(json.dumps({"targets": rows}), encoding="utf-8")
    plan = read_plan(tmp_path / "plan.json")

    def planned(graph: str) -> str:
        names = plan_names("cpu", graph)  # type: ignore[arg-type]
        return next(choice.form for name in names if (choice := plan.of(name, "layer.0.self")))

    assert [planned(graph) for graph in ("main", "prefill", "decode")] == [
        "onnx",
        "onnx",
        "grouped",
    ]


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_is_a_time(budget: float) -> None:
    with pytest.raises(InputError, match="not a time"):
        TuneSettings(run=RunSettings(), budget=budget)


def test_the_best_over_all_workloads_is_chosen() -> None:
    """a is best at one length by little, b at the other by much; c was not timed at both."""
    times = {("a", 1): 1.0, ("a", 2): 9.0, ("b", 1): 1.1, ("b", 2): 3.0, ("c", 1): 0.9}
    rows = [
        {"lengths": {"q": n}, "form": form, "params": {}, "latency_ms": {"p50": ms}}
        for (form, n), ms in times.items()
    ]
    assert _fastest(rows) == {"form": "b", "params": {}}


@pytest.mark.parametrize(
    ("kv_len", "sizes", "expected"),
    [
        ("past + s", {"s": 1, "past": 9}, 10),
        ("s", {"s": 7}, 7),
        ("t", {}, 128),
        (12, {"s": 3}, 12),
        ("s + 1", {"s": 3}, 4),
    ],
)
def test_lengths_may_be_sums(kv_len: object, sizes: dict[str, int], expected: int) -> None:
    spec = _spec(q_len="s", kv_len=kv_len)
    assert lengths_at(spec, sizes)["kv_len"] == expected


@pytest.mark.parametrize(
    ("q_len", "there", "missing"),
    [
        (1, {"grouped", "primitive", "onnx"}, {"tiled tiles=8 mask=diagonal", "portable"}),
        (128, {"tiled tiles=4 mask=diagonal", "tiled tiles=4 mask=tile"}, {"grouped"}),
        (512, {"tiled tiles=16 mask=tile", "tiled tiles=16 product=attention"}, {"grouped"}),
        (4095, {"tiled tiles=64 product=attention"}, {"tiled tiles=128 mask=tile"}),
        (4096, {"tiled tiles=128 product=attention", "tiled tiles=128 mask=tile"}, {"grouped"}),
    ],
)
def test_ways_fit_the_workload(q_len: int, there: set[str], missing: set[str]) -> None:
    spec = _spec(q_len="s", kv_len="s", mask=CAUSAL)
    names = [way.name for way in ways(spec, opset=23, q_len=q_len, veto=lambda *_: None)]
    assert names[0] == "primitive"
    assert there <= set(names)
    assert not missing & set(names)


def test_a_way_holds_what_the_target_tells_a_form() -> None:
    told = {"ort-mha": {"bias": "whole"}}
    found = ways(_spec(), opset=23, q_len=1, veto=lambda *_: None, told=told)
    assert Way(form="ort-mha", options={"bias": "whole"}) in found
    assert "ort-mha" not in {way.name for way in found}


def test_a_vetoed_form_is_not_tried() -> None:
    spec = _spec(cache=CacheSpec(growth="concat"))
    found = ways(spec, opset=23, q_len=1, veto=lambda form, _: "no" if form == "onnx" else None)
    assert "onnx" not in {way.form for way in found}
    assert Way(form="grouped") in found


@pytest.mark.parametrize("unread", [{"budget": 5.0}, {"vs": "raw"}, {"time_limit": 9.0}])
def test_a_setting_that_a_tuning_does_not_read_is_refused(unread: dict[str, object]) -> None:
    assert TuneSettings(run=RunSettings(quick=True, seed=3)).run.seed == 3
    with pytest.raises(InputError, match="nothing else"):
        TuneSettings(run=RunSettings(**unread))


def test_a_share_of_the_budget_shortens_the_turns() -> None:
    whole = latency_settings(4, seconds=None, quick=False, seed=0)
    cut = latency_settings(4, seconds=2.0, quick=False, seed=0)
    assert cut.most_ms < whole.most_ms
    assert cut.turn_ms < whole.turn_ms


@pytest.mark.parametrize("half", [False, True])
def test_a_way_is_told_apart_from_the_first_that_ran(half: bool) -> None:
    limit = tuning.HALF_ERROR if half else tuning.LARGEST_ERROR
    first = ("onnx", np.array([1.0, 0.5]))

    def difference(found: list[float]) -> str | None:
        return tuning._difference(np.array(found), first, half=half)

    assert difference([1.0, 0.5 + 0.9 * limit]) is None
    for wrong in ([1.0, 0.5 + 1.1 * limit], [1.0, np.nan]):
        assert "wrong: differs from onnx by" in str(difference(wrong))
    assert difference([1.0]) == "wrong: output [1], expected [2]"
