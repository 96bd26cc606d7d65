"""What an export says of a target that does not answer whether it loads the file."""

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
