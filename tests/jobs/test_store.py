from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.jobs._store import (
    INLINE_BYTES,
    MANIFEST,
    ORIGINAL,
    WEIGHTS,
    check_file,
    check_folder,
    staged_file,
    staged_folder,
    write_models,
)


def model_with(array: np.ndarray, *, op: str = "Add") -> ir.Model:
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=array.shape)
    weight = ir.val("weight", const_value=ir.tensor(array, name="weight"))
    y = ir.val("y", dtype=ir.DataType.FLOAT, shape=array.shape)
    node = ir.Node("", op, [x, weight], outputs=[y], name="node")
    graph = ir.Graph(
        [x], [y], nodes=[node], initializers=[weight], opset_imports={"": 21}, name="main"
    )
    return ir.Model(graph, ir_version=10)


BIG = np.arange(1024, dtype=np.float32)


def test_equal_weights_of_two_graphs_are_stored_once(tmp_path: Path) -> None:
    models = {"a": model_with(BIG), "b": model_with(BIG.copy(), op="Mul")}
    write_models(tmp_path, models, standalone=False)
    assert (tmp_path / WEIGHTS).stat().st_size == BIG.nbytes
    for stem in models:
        onnx.checker.check_model(tmp_path / f"{stem}.onnx")
        (weight,) = ir.load(tmp_path / f"{stem}.onnx").graph.initializers.values()
        assert weight.const_value is not None
        np.testing.assert_array_equal(weight.const_value.numpy(), BIG)


def test_different_weights_are_both_kept(tmp_path: Path) -> None:
    write_models(tmp_path, {"a": model_with(BIG), "b": model_with(BIG + 1)}, standalone=False)
    assert (tmp_path / WEIGHTS).stat().st_size == 2 * BIG.nbytes


def test_the_models_given_are_left_as_they_were(tmp_path: Path) -> None:
    model = model_with(BIG)
    before = model.graph.initializers["weight"].const_value
    write_models(tmp_path, {"a": model}, standalone=False)
    assert model.graph.initializers["weight"].const_value is before


def test_small_tensors_stay_in_the_graph(tmp_path: Path) -> None:
    small = np.zeros(INLINE_BYTES // 4, dtype=np.float32)
    write_models(tmp_path, {"a": model_with(small)}, standalone=False)
    assert not (tmp_path / WEIGHTS).exists()


def test_standalone_files_need_no_weights_file(tmp_path: Path) -> None:
    write_models(tmp_path, {"a": model_with(BIG)}, standalone=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx"]
    onnx.checker.check_model(tmp_path / "a.onnx")


def test_same_models_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_models(tmp_path / name, {"a": model_with(BIG)}, standalone=False)
    for file in ("a.onnx", WEIGHTS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def write_and_fail(out: Path) -> None:
    with staged_folder(out) as stage:
        (stage / "new.txt").write_text("new")
        raise RuntimeError("halfway")


def write_file_and_fail(out: Path) -> None:
    with staged_file(out) as stage:
        stage.write_text("new")
        raise RuntimeError("halfway")


def test_a_folder_whose_writing_fails_is_untouched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept.txt").write_text("kept")
    with pytest.raises(RuntimeError, match="halfway"):
        write_and_fail(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["kept.txt"]


def test_a_second_export_replaces_files_of_the_first_and_keeps_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for text in ("first", "second"):
        with staged_folder(out) as stage:
            (stage / "a.txt").write_text(text)
        (out / "mine.txt").write_text("mine")
    assert (out / "a.txt").read_text() == "second"
    assert (out / "mine.txt").read_text() == "mine"


def test_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="is a file"), staged_folder(tmp_path / "out"):
        pass


def test_a_file_whose_writing_fails_is_untouched(tmp_path: Path) -> None:
    out = tmp_path / "a.onnx"
    out.write_text("old")
    with pytest.raises(RuntimeError, match="halfway"):
        write_file_and_fail(out)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"), staged_file(tmp_path):
        pass


def write_export(out: Path, *variants: str) -> None:
    with staged_folder(out) as stage:
        for name in (*variants, f"{ORIGINAL}.onnx", WEIGHTS):
            (stage / name).write_text("graph")
        manifest = {"variants": [{"file": name} for name in variants]}
        (stage / MANIFEST).write_text(json.dumps(manifest))


def test_graphs_of_an_earlier_export_do_not_stay_beside_weights_of_a_later_one(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    write_export(out, "cpu.onnx", "openvino.onnx")
    (out / "mine.onnx").write_text("mine")
    write_export(out, "cpu.onnx")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["cpu.onnx", MANIFEST, "mine.onnx", f"{ORIGINAL}.onnx", WEIGHTS]
    )


def test_a_move_that_stops_halfway_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_export(out, "cpu.onnx")
    move = Path.replace

    def stop_at_weights(self: Path, target: Path) -> Path:
        if self.name == WEIGHTS:
            raise KeyboardInterrupt
        return move(self, target)

    monkeypatch.setattr(Path, "replace", stop_at_weights)
    with pytest.raises(KeyboardInterrupt):
        write_export(out, "cpu.onnx")
    assert not (out / MANIFEST).exists()


def test_what_a_killed_export_left_is_removed_and_that_of_a_live_one_is_not(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    live = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for process in (ended, live):
            (tmp_path / f".out.partial-{process.pid}").mkdir()
        other = tmp_path / f".out2.partial-{ended.pid}"
        other.mkdir()
        write_export(tmp_path / "out", "cpu.onnx")
        left = {path.name for path in tmp_path.iterdir()}
    finally:
        live.communicate()
    assert left == {"out", f".out.partial-{live.pid}", other.name}


@pytest.mark.parametrize(
    ("check", "path", "words"),
    [
        pytest.param(check_folder, "file", "is a file", id="folder-is-file"),
        pytest.param(check_folder, "file/out", "is a file", id="folder-under-file"),
        pytest.param(check_file, "folder", "is a folder", id="file-is-folder"),
        pytest.param(check_file, "none/r.json", "is no folder", id="file-in-no-folder"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_work(
    check: Callable[[Path], None], path: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=words):
        check(tmp_path / path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_new_nested_folder_is_fine(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
