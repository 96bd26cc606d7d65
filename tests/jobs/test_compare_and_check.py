from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from spellings import PLAIN, attention

from mha_export.errors import InputError, TargetUnavailableError
from mha_export.jobs import (
    ExportSettings,
    check_source,
    compare_models,
    doctor,
    export_model,
    run_models,
    write_report,
)


def test_a_model_equals_its_export(exported: Path) -> None:
    result = compare_models(exported / "original.onnx", exported / "cpu.onnx")
    assert result.exit_code == 0
    assert result.document["equal"]


def test_a_changed_scale_is_found_and_named(encoder: Path, encoder_scaled: Path) -> None:
    result = compare_models(encoder, encoder_scaled)
    assert result.exit_code == 1
    first = result.document["first_difference"]
    assert first["site"] == "layer.0.self"
    assert first["stage"] == "scores"
    assert "scale" in first["message"]


def test_one_model_on_two_targets(encoder: Path) -> None:
    result = compare_models(encoder, targets=["cpu", "reference"])
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("targets", "kind", "message"),
    [
        pytest.param([], InputError, "nothing to compare", id="one side"),
        pytest.param(["cpu", "reference", "openvino"], InputError, "at most two", id="three"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    encoder: Path, targets: list[str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        compare_models(encoder, targets=targets)


def test_an_absent_target_cannot_be_compared(encoder: Path, absent_target: str) -> None:
    with pytest.raises(TargetUnavailableError, match="cannot run"):
        compare_models(encoder, targets=["cpu", absent_target])


def test_check_leaves_one_folder_with_everything(encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = check_source(encoder, out=out, targets=["cpu", "portable"], options={"quick": True})
    assert result.exit_code == 0, result.notices
    assert result.document["verdict"].startswith("PASS")
    for name in ("cpu.onnx", "portable.onnx", "export.json", "results.json", "report.html"):
        assert (out / name).is_file()
    assert "layer.0.self" in (out / "report.html").read_text()


def test_check_stops_where_the_export_failed(encoder18: Path, tmp_path: Path) -> None:
    options = {"quick": True, "form": "onnx", "opset": 18, "require_fused": True}
    result = check_source(encoder18, out=tmp_path / "out", targets=["cpu"], options=options)
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["quik", "workloads", "targets"])
def test_an_option_that_steers_nothing_is_refused(encoder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"no option '{name}'") as caught:
        check_source(encoder, out=tmp_path / "out", options={name: True})
    assert "quick" in str(caught.value.fix)


def test_an_export_folder_is_checked_as_it_is(
    exported: Path, encoder_scaled: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    shutil.copy(encoder_scaled, broken / "cpu.onnx")
    found = {
        folder: check_source(folder, targets=["cpu"], out=tmp_path / "o", options={"quick": True})
        for folder in (exported, broken)
    }
    assert found[exported].exit_code == 0
    assert found[broken].exit_code == 1
    assert any(
        "parts from the original at layer.0.self, scores" in n for n in found[broken].notices
    )
    page = (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    assert "layer.0.self, scores: scale is 0.424264, not 0.353553" in page


def test_nothing_steers_an_export_that_is_there(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an export already"):
        check_source(exported, out=tmp_path / "o", options={"form": "onnx"})
    assert not (tmp_path / "o").exists()


def test_results_of_two_models_make_one_report(encoder: Path, tmp_path: Path) -> None:
    from mha_export.jobs import RunSettings, run_models

    files = []
    for name in ("one", "two"):
        copy = tmp_path / f"{name}.onnx"
        copy.write_bytes(encoder.read_bytes())
        files.append(tmp_path / f"{name}.json")
        run_models(copy, targets=["cpu"], output=files[-1], settings=RunSettings(quick=True))
    result = write_report(files, output=tmp_path / "report.json")
    assert result.exit_code == 0
    rows = _results(json.loads((tmp_path / "report.json").read_text()))
    assert {"one", "two"} <= {row["model"] for row in rows}


def _results(node: object) -> list[dict[str, str]]:
    if isinstance(node, dict):
        own = node.get("results", [])
        found = [row for row in own if isinstance(row, dict) and "model" in row]
        return found + [row for value in node.values() for row in _results(value)]
    if isinstance(node, list):
        return [row for value in node for row in _results(value)]
    return []


def test_doctor_lists_every_target_and_says_what_is_missing(
    tmp_path: Path, absent_target: str
) -> None:
    result = doctor(targets=[absent_target, "reference"], quick=True, output=tmp_path / "caps.json")
    rows = {row["target"]: row for row in result.document["targets"]}
    assert result.exit_code == 3
    assert rows[absent_target]["run"]["fix"]
    assert rows["reference"]["run"]["status"] == "available"
    assert rows["reference"]["capabilities"]
    assert (tmp_path / "caps.json").is_file()


@pytest.mark.parametrize(
    ("other", "exit_code"), [("window:61", 1), ("causal", 1), ("window:60", 0)]
)
def test_a_window_is_compared_beyond_its_end(tmp_path: Path, other: str, exit_code: int) -> None:
    for name, mask in (("a", "window:60"), ("b", other)):
        ir.save(attention(PLAIN.but(mask=mask)), tmp_path / f"{name}.onnx")
    found = compare_models(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert found.exit_code == exit_code
    assert not found.notices


@pytest.mark.parametrize(("other", "status"), [("window:61", "fail"), ("window:60", "pass")])
def test_a_run_goes_beyond_the_end_of_a_window(tmp_path: Path, other: str, status: str) -> None:
    alone = ExportSettings(standalone=True)
    for name, mask in (("a", "window:60"), ("b", other)):
        ir.save(attention(PLAIN.but(mask=mask)), tmp_path / f"{name}.onnx")
        export_model(
            tmp_path / f"{name}.onnx", targets=["cpu"], out=tmp_path / name, settings=alone
        )
    shutil.copy(tmp_path / "b" / "cpu.onnx", tmp_path / "a" / "cpu.onnx")
    (row,) = run_models(tmp_path / "a", targets=["cpu"]).document["results"]
    assert row["status"] == status, row["reason"]
    assert "beyond the windows" in [case["name"] for case in row["parity"]["by_case"]]


def test_a_window_that_was_not_reached_is_told(tmp_path: Path) -> None:
    ir.save(attention(PLAIN.but(mask="window:60")), tmp_path / "a.onnx")
    ir.save(attention(PLAIN.but(mask="causal")), tmp_path / "b.onnx")
    options = {"dims": ["seq=9"]}
    found = compare_models(tmp_path / "a.onnx", tmp_path / "b.onnx", options=options)
    assert any("more than were compared" in notice for notice in found.notices)
