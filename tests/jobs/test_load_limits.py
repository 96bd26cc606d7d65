"""What an export says and does where a target does not answer, or does not load the file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from mha_export.jobs import _loading as loading
from mha_export.jobs import export_model
from mha_export.targets import Limits, target_named

BAD_ENDS = Path(__file__).parents[1] / "targets"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Every load check hangs until its limit."""
    monkeypatch.syspath_prepend(str(BAD_ENDS))
    jobs = importlib.import_module("misbehaving_jobs")
    monkeypatch.setattr(loading, "refusal_of", jobs.never_answer)
    monkeypatch.setattr(loading, "_LIMITS", Limits(seconds=0.5))
    asked: Callable[..., None] = jobs.never_answer
    return asked


def test_a_load_check_that_ends_at_its_limit_is_told_in_the_report(
    encoder: Path, tmp_path: Path, silent: Callable[..., None]
) -> None:
    result = export_model(encoder, targets=["cpu", "reference"], out=tmp_path / "out")
    assert result.ok
    for variant in result.document["variants"]:
        (note,) = variant["notes"]
        assert note.startswith(f"whether {variant['target']} loads the file is not known")
        assert "0.5 s" in note
        assert f"{variant['target']}: {note}" in result.notices
        (outcome,) = variant["sites"].values()
        assert outcome["status"] == "fused"


def test_a_target_that_did_not_answer_is_not_asked_again(
    encoder: Path, silent: Callable[..., None]
) -> None:
    cpu = [(target_named("cpu"), None)]
    with loading.load_check() as check:
        assert check.refusal(ir.load(encoder), cpu) is None
        worker = check._worker.pid
        assert check.refusal(ir.load(encoder), cpu) is None
        assert check._worker.pid == worker
        assert list(check.unanswered) == ["cpu"]
        assert not check.notes([(target_named("reference"), None)])


def test_a_model_stays_at_its_opset_where_a_later_one_does_not_load(
    encoder18: Path, tmp_path: Path
) -> None:
    """ONNX Runtime has RandomUniformLike up to opset 21."""
    model = ir.load(encoder18)
    given = model.graph.inputs[0]
    random = ir.Node("", "RandomUniformLike", [given], name="random")
    model.graph.insert_before(model.graph[0], random)
    noise = random.outputs[0]
    noise.name, noise.type, noise.shape = "noise", given.type, given.shape
    model.graph.outputs.append(noise)
    path = tmp_path / "noisy.onnx"
    ir.save(model, path)
    result = export_model(path, targets=["cpu"], out=tmp_path / "out")
    (variant,) = result.document["variants"]
    assert (result.ok, variant["opset"], variant["refusal"]) == (True, 18, None)
    assert {site["status"] for site in variant["sites"].values()} == {"fused"}
    (note,) = variant["notes"]
    assert note.startswith("left at opset 18: at 23, cpu:")
