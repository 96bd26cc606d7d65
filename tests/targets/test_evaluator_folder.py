"""What an evaluator in a worker puts on disk goes with it, however its worker leaves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.forms import FormParams, build_model, form_named
from mha_export.spec import AttentionSpec
from mha_export.targets import target_named
from mha_export.targets._evaluator import WorkerEvaluator


@pytest.mark.parametrize("dies", [False, True])
def test_nothing_is_left_in_the_temporary_folder(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4)
    model: ir.Model = build_model(form_named("primitive"), spec, FormParams(opset=18))
    inputs = {name: np.ones((1, 3, 8), np.float32) for name in ("query", "key", "value")}
    evaluator = WorkerEvaluator(target_named("reference"))
    assert evaluator.run(model, inputs)
    assert list(tmp_path.iterdir())
    if dies:
        process = evaluator._worker._process
        assert process is not None
        process.kill()
        process.wait()
    del evaluator
    assert list(tmp_path.iterdir()) == []
