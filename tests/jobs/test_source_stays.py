"""No job writes its output over what it is made from, or over somebody else's file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from mha_export.errors import InputError
from mha_export.jobs import (
    HeadOptions,
    JobResult,
    PruneGoal,
    analyse_heads,
    build_graph,
    export_model,
    prune_model,
    regroup_model,
    run_models,
    tune_model,
)

YAML = "q_heads: 4\nkv_heads: 2\nhead_dim: 8\n"

JOBS: dict[str, Callable[[Path], JobResult]] = {
    "tune": lambda path: tune_model(path, target="cpu", output=path),
    "heads": lambda path: analyse_heads(path, options=_data(path), output=path),
    "prune": lambda path: prune_model(
        path, goal=PruneGoal(heads=("0:1",)), options=HeadOptions(), output=path
    ),
    "regroup": lambda path: regroup_model(
        path, kv_heads=1, options=HeadOptions(), output=path
    ),
    "run": lambda path: run_models(path, targets=["cpu"], output=path),
    "export": lambda path: export_model(path, targets=["cpu"], out=path.parent),
}  # fmt: skip


def _data(path: Path) -> HeadOptions:
    samples = path.with_name("samples.npz")
    np.savez(samples, x=np.zeros((1, 3, 32), np.float32))
    return HeadOptions(data=samples)


@pytest.fixture
def in_a_folder(encoder: Path, tmp_path: Path) -> Path:
    """The model under a name that an export gives one of its own files."""
    return Path(shutil.copy(encoder, tmp_path / "original.onnx"))


@pytest.mark.parametrize("job", JOBS)
def test_a_source_is_not_written_over(job: str, in_a_folder: Path) -> None:
    before = in_a_folder.read_bytes()
    with pytest.raises(InputError, match="is a file of the source"):
        JOBS[job](in_a_folder)
    assert in_a_folder.read_bytes() == before


def test_a_link_to_the_source_is_the_source(in_a_folder: Path) -> None:
    link = in_a_folder.with_name("link.onnx")
    link.symlink_to(in_a_folder)
    with pytest.raises(InputError, match="is a file of the source"):
        tune_model(in_a_folder, target="cpu", output=link)


def test_a_specification_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(YAML, encoding="utf-8")
    with pytest.raises(InputError, match="is a file of the source"):
        build_graph(path, output=path)
    assert path.read_text(encoding="utf-8") == YAML


@pytest.mark.parametrize("job", ["run"])
def test_a_file_of_the_export_that_is_read_is_not_written_over(
    job: str, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "out"))
    for name in ("export.json", "cpu.onnx", "weights.bin"):
        with pytest.raises(InputError, match="is a file of the source"):
            run_models(folder, targets=["cpu"], output=folder / name)


def test_weights_beside_a_model_are_not_written_over(encoder: Path, tmp_path: Path) -> None:
    """An export's own weights file may have the very name of the source's."""
    model = tmp_path / "model.onnx"
    onnx.save(
        onnx.load(encoder), model, save_as_external_data=True, location="weights.bin",
        size_threshold=0,
    )  # fmt: skip
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"weights\.bin is a file of the source"):
        export_model(model, targets=["cpu"], out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_export_beside_a_model_of_other_names_is_fine(encoder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(encoder, tmp_path / "model.onnx"))
    before = model.read_bytes()
    for _ in range(2):  # the second replaces the first
        assert export_model(model, targets=["cpu"], out=tmp_path).ok
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps({"targets": [{"name": "cpu"}]}), id="capabilities"),
        pytest.param(json.dumps({"results": []}), id="results"),
        pytest.param('{"targets": {"cpu"', id="cut-off"),
        pytest.param("my notes", id="text"),
    ],
)
def test_tune_goes_on_with_plans_alone(text: str, encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="is there, and is no plan"):
        tune_model(encoder, target="cpu", output=path)
    assert path.read_text(encoding="utf-8") == text
