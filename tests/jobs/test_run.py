from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mha_export.cli._group import cli
from mha_export.errors import InputError
from mha_export.jobs import RunSettings, run_models
from mha_export.jobs._subject import open_subject
from mha_export.report.records import validate
from mha_export.targets import probe, target_named
from mha_export.targets._capabilities import write_cached

QUICK = RunSettings(quick=True)


def test_every_variant_of_a_folder_passes_with_its_placement(
    exported: Path, tmp_path: Path
) -> None:
    result = run_models(exported, output=tmp_path / "r.json", settings=QUICK)
    document = json.loads((tmp_path / "r.json").read_text())
    validate("results", document)
    assert result.exit_code == 0, result.notices
    names = {(row["target"], row["variant"]) for row in document["results"]}
    assert names == {
        ("cpu", "cpu"),
        ("cpu", "portable"),
        ("reference", "reference"),
        ("reference", "portable"),
    }
    for row in document["results"]:
        assert row["status"] == "pass", row["reason"]
        assert row["placement"]["on_target"] == row["placement"]["float_compute_nodes"] > 0
        assert row["latency_ms"]["p50"] > 0
        assert len(row["parity"]["by_case"]) >= 2


def test_a_bare_model_is_its_own_original_and_every_step_is_counted(encoder: Path) -> None:
    steps: list[str] = []
    result = run_models(encoder, targets=["cpu"], settings=QUICK, progress=steps.append)
    (row,) = result.document["results"]
    assert row["status"] == "pass"
    assert row["variant"] == "original"
    cases = len(row["parity"]["by_case"])
    for words in ("the exact answer to input", "input"):
        step = f"parity on cpu (original): {words} "
        told = [each for each in steps if each.startswith(step)]
        assert told == [f"{step}{number} of {cases}" for number in range(1, cases + 1)]
    assert "timing cpu (original): round 1 of at most 9" in steps


def test_two_sizes_are_two_results(encoder: Path) -> None:
    settings = RunSettings.from_options(dims=["seq=4", "seq=9", "batch=2"], quick=True)
    result = run_models(encoder, targets=["cpu"], settings=settings)
    sizes = [row["workload"]["seq"] for row in result.document["results"]]
    assert sizes == [4, 9]


def test_when_the_budget_is_used_up_three_inputs_are_judged_and_nothing_timed(
    encoder: Path,
) -> None:
    (result,) = run_models(encoder, targets=["cpu"], settings=RunSettings(budget=1e-6)).document[
        "results"
    ]
    assert result["status"] == "pass"
    assert len(result["parity"]["by_case"]) == 3
    assert result["latency_ms"] is None
    why = "the time was up (--budget 1e-06)"
    assert result["reason"].startswith("judged on 3 of ")
    assert result["reason"].endswith(f" inputs: {why}; not timed: {why}")
    with pytest.raises(InputError, match="budget is 0; expected a number above 0"):
        RunSettings(budget=0)


def test_the_ratio_to_the_unmodified_model(exported: Path) -> None:
    settings = RunSettings(quick=True, vs="raw")
    result = run_models(exported, targets=["cpu"], settings=settings)
    for row in result.document["results"]:
        assert row["vs"]["baseline"] == "raw"
        assert row["vs"]["low"] <= row["vs"]["ratio"] <= row["vs"]["high"]


def test_a_wrong_variant_fails_and_its_inputs_replay(
    exported: Path, encoder_scaled: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "a broken one"
    shutil.copytree(exported, broken)
    shutil.copy(encoder_scaled, broken / "cpu.onnx")
    output = tmp_path / "r.json"
    result = run_models(broken, targets=["cpu"], output=output, settings=QUICK)
    assert result.exit_code == 1
    wrong = next(row for row in result.document["results"] if row["variant"] == "cpu")
    assert wrong["status"] == "fail"
    first = wrong["parity"]["first_difference"]
    assert (first["site"], first["stage"]) == ("layer.0.self", "scores")
    assert "at layer.0.self, scores: scale is 0.424264, not 0.353553" in wrong["reason"]
    program, *words, inputs = shlex.split(wrong["replay"])
    assert program == "mha-export"
    with np.load(inputs) as arrays:
        assert arrays["hidden_states"].shape[1] <= 2, "the failing case was shrunk"
    again = CliRunner().invoke(cli, [*words, inputs])
    assert again.exit_code == 1
    assert "at layer.0.self, scores: scale is" in again.output


def test_an_absent_target_is_a_record_and_exit_3(exported: Path, absent_target: str) -> None:
    result = run_models(exported, targets=[absent_target], settings=QUICK)
    assert result.exit_code == 3
    (row,) = result.document["results"]
    assert row["status"] == "unavailable"
    assert row["reason"]


def test_a_target_without_a_graph_is_refused(encoder: Path, tmp_path: Path) -> None:
    from mha_export.jobs import export_model

    export_model(encoder, targets=["cpu"], out=tmp_path / "out")
    with pytest.raises(InputError, match="no graph for target reference"):
        run_models(tmp_path / "out", targets=["reference"], settings=QUICK)


@pytest.mark.parametrize("missing", ["export.json", "cpu.onnx", "original.onnx"])
def test_a_folder_with_a_missing_file_is_named(
    exported: Path, tmp_path: Path, missing: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    (broken / missing).unlink()
    with pytest.raises(InputError, match=missing):
        run_models(broken, settings=QUICK)


@pytest.mark.parametrize(
    ("dims", "shapes", "message"),
    [
        pytest.param(["seq"], [], "NAME=N", id="no size"),
        pytest.param(["seq=x"], [], "is not a size", id="not a number"),
        pytest.param(["seq=-1"], [], "is not a size", id="negative"),
        pytest.param([], ["x=1,y"], "is not a size", id="shape"),
    ],
)
def test_bad_sizes_are_refused(dims: list[str], shapes: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunSettings.from_options(dims=dims, shapes=shapes)


def test_an_unknown_dimension_is_refused(encoder: Path) -> None:
    settings = RunSettings.from_options(dims=["nope=3"], quick=True)
    with pytest.raises(InputError, match="nope"):
        run_models(encoder, targets=["cpu"], settings=settings)


def test_the_portable_graph_alone_runs_without_the_graphs_of_targets(exported: Path) -> None:
    candidates = open_subject(exported, ["portable"]).candidates
    assert {"cpu", "reference"} <= {candidate.request.name for candidate in candidates}
    assert {candidate.variant for candidate in candidates} == {"portable"}


def test_a_portable_graph_that_is_not_there_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "without"
    shutil.copytree(exported, folder)
    record = json.loads((folder / "export.json").read_text())
    record["variants"] = [row for row in record["variants"] if row["target"] != "portable"]
    (folder / "export.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="no graph for target portable; it has cpu, reference"):
        open_subject(folder, ["portable"])


@pytest.mark.parametrize("name", ["r", "none/r.json"])
def test_an_output_that_cannot_be_written_is_refused_before_any_run(
    exported: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "r").mkdir()
    steps: list[str] = []
    with pytest.raises(InputError, match="folder"):
        run_models(exported, output=tmp_path / name, progress=steps.append)
    assert not steps


def test_what_doctor_found_here_comes_along(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    before = run_models(encoder, targets=["reference"], settings=QUICK)
    assert before.document["doctor"] is None, "nothing was probed here"
    target = target_named("reference")
    found = probe(target, quick=True)
    write_cached(target, None, target.availability(), found)
    after = run_models(encoder, targets=["reference"], settings=QUICK)
    (row,) = after.document["doctor"]["targets"]
    assert [cell["state"] for cell in row["capabilities"]] == [cell.state for cell in found.rows]
