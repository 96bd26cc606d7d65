"""The command line: exit codes, streams, and one clear message for each kind of bad input."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import mha_export.cli

COMMANDS = sorted(
    m.name for m in pkgutil.iter_modules(mha_export.cli.__path__) if not m.name.startswith("_")
)


def run(
    *args: str | Path, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    program = "import sys; from mha_export.cli import main; sys.argv[0] = 'mha-export'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
        timeout=300,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model.onnx"
    flags = ["--q-heads", "2", "--head-dim", "4", "--d-model", "8", "--weights", "random"]
    assert run("build", *flags, "-o", path).returncode == 0
    return path


def classifier(path: Path) -> Path:
    """A model with a softmax that is not attention."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=("batch", 4))
    weight = ir.val("w", const_value=ir.tensor(np.ones((4, 3), np.float32), name="w"))
    scores, y = ir.val("scores"), ir.val("y", dtype=ir.DataType.FLOAT, shape=("batch", 3))
    nodes = [
        ir.Node("", "MatMul", [x, weight], outputs=[scores], name="matmul"),
        ir.Node("", "Softmax", [scores], {"axis": ir.AttrInt64("axis", -1)}, outputs=[y], name="s"),
    ]
    graph = ir.Graph([x], [y], nodes=nodes, initializers=[weight], opset_imports={"": 21})
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def test_a_name_that_the_console_lacks_is_shown_escaped(tmp_path: Path) -> None:
    result = run(
        "build", "--preset", "bert-base", "-o", tmp_path / "模.onnx", PYTHONIOENCODING="cp1252"
    )
    assert result.returncode == 0, result.stderr
    assert r"\u6a21.onnx" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert "Example:" in result.stdout
    assert f"mha-export {command}" in result.stdout


def test_inspect_prints_json_alone_on_stdout(model: Path) -> None:
    result = run("inspect", model, "--json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    (site,) = document["sites"]
    assert site["verdict"] == "attention"
    assert site["spec"]["q_heads"] == 2


def test_inspect_of_a_model_without_attention_is_no_error(tmp_path: Path) -> None:
    result = run("inspect", classifier(tmp_path / "c.onnx"), "--json")
    assert result.returncode == 0
    (site,) = json.loads(result.stdout)["sites"]
    assert site["verdict"] == "not_attention"
    assert site["reason"]["message"]


def test_the_main_path_by_hand(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("export", model, "-t", "cpu", "-o", out).returncode == 0
    assert run("run", out, "-o", tmp_path / "r.json", "--quick").returncode == 0
    report = run("report", tmp_path / "r.json", "-o", tmp_path / "report.html")
    assert report.returncode == 0
    assert report.stdout.startswith("PASS")
    assert "<html" in (tmp_path / "report.html").read_text()
    same = run("compare", out / "original.onnx", out / "cpu.onnx")
    assert same.returncode == 0
    assert same.stdout.rstrip().endswith("equal")


def truncated(path: Path, model: Path) -> Path:
    path.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    return path


BAD_SOURCES = {
    "missing": lambda folder, model: folder / "missing.onnx",
    "not ONNX": lambda folder, model: _written(folder / "text.onnx", b"hello, not a model"),
    "empty": lambda folder, model: _written(folder / "empty.onnx", b""),
    "truncated": lambda folder, model: truncated(folder / "cut.onnx", model),
    "an empty folder": lambda folder, model: folder,
    "another suffix": lambda folder, model: _written(folder / "a.xyz", b"x"),
    "a hub name": lambda folder, model: "org/name",
}


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", BAD_SOURCES)
@pytest.mark.parametrize("command", ["inspect", "export", "check"])
def test_a_bad_source_is_one_message_and_exit_2(
    command: str, kind: str, model: Path, tmp_path: Path
) -> None:
    source = BAD_SOURCES[kind](tmp_path, model)
    out = tmp_path / "never"
    more = [] if command == "inspect" else ["-t", "cpu", "-o", out]
    result = run(command, source, *more)
    _refused(result, 2)
    assert not out.exists()


def _refused(result: subprocess.CompletedProcess[str], code: int) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") + result.stderr.count("Error:") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(["export", "MODEL", "-t", "nope", "-o", "OUT"], "nope", id="target"),
        pytest.param(["export", "MODEL", "--form", "nope", "-o", "OUT"], "nope", id="form"),
        pytest.param(["export", "MODEL", "-t", "cpu"], "--output", id="no output"),
        pytest.param(["export", "CLASSIFIER", "-t", "cpu", "-o", "OUT"], "no attention", id="none"),
        pytest.param(["check", "CLASSIFIER", "-t", "cpu", "-o", "OUT"], "no attention", id="check"),
        pytest.param(["export", "MODEL", "-t", "cpu", "--cache", "static", "-o", "OUT"],
                     "bidirectional", id="cache"),
        pytest.param(["export", "MODEL", "-t", "cpu", "--split", "prefill-decode", "-o", "OUT"],
                     "--cache static", id="split"),
        pytest.param(["export", "MODEL", "--weights", "int3", "-o", "OUT"], "int3", id="weights"),
        pytest.param(["tune", "MODEL", "-t", "cpu", "--shape", "nobody=1,2", "-o", "OUT"], "nobody",
                     id="tune shape"),
        pytest.param(["run", "MODEL", "-t", "cpu", "--dim", "x"], "--dim", id="dim"),
        pytest.param(["export", "MODEL", "-t", "cpu", "--dim", "sequence=8", "-o", "OUT"],
                     "sequence", id="export dim"),
        pytest.param(["export", "MODEL", "-t", "cpu", "--shape", "y=2,8", "-o", "OUT"], "--shape y",
                     id="export shape"),
        pytest.param(["run", "MODEL", "-t", "cpu", "--inputs", "missing.npz"], "missing.npz",
                     id="inputs"),
        pytest.param(["compare", "MODEL"], "nothing to compare", id="compare"),
        pytest.param(["report", "missing.json", "-o", "r.html"], "missing.json", id="results"),
        pytest.param(["report", "missing.json", "-o", "r.pdf"], "r.pdf", id="format"),
        pytest.param(["build", "--q-heads", "8", "--kv-heads", "3", "--head-dim", "4", "-o", "OUT"],
                     "not a multiple", id="heads"),
        pytest.param(["build", "--preset", "nope", "-o", "OUT"], "nope", id="preset"),
        pytest.param(["doctor", "-t", "nope"], "nope", id="doctor"),
        pytest.param(["nope"], "nope", id="command"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_message_and_exit_2(
    args: list[str], words: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "never"
    places = {"MODEL": model, "OUT": out, "CLASSIFIER": tmp_path / "c.onnx"}
    classifier(tmp_path / "c.onnx")
    result = run(*(places.get(arg, arg) for arg in args), cwd=tmp_path)
    _refused(result, 2)
    assert words in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob("r.*"))


def test_a_target_that_cannot_run_here_is_exit_3(
    model: Path, tmp_path: Path, absent_target: str
) -> None:
    result = run("run", model, "-t", absent_target, "-o", tmp_path / "r.json")
    assert result.returncode == 3
    assert "Traceback" not in result.stderr
    assert absent_target in result.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert row["status"] == "unavailable"


def test_a_difference_is_exit_1(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    flags = ["--q-heads", "2", "--head-dim", "4", "--d-model", "8", "--weights", "random"]
    run("build", *flags, "--scale", "0.9", "-o", other)
    result = run("compare", model, other, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["first_difference"]["site"]


def test_a_reader_that_leaves_early_changes_no_exit_code(model: Path) -> None:
    program = "from mha_export.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "inspect", str(model), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        words = process.stderr.read()
    assert process.returncode == 0, words
    assert "Broken" not in words


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_a_terminated_run_removes_its_temporary_folders(model: Path, tmp_path: Path) -> None:
    program = "from mha_export.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "run", str(model), "-t", "reference", "--quick"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "parity" in line:
                break
        assert list(tmp_path.iterdir())
        process.terminate()
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("mha_export-*"))


def test_a_bad_file_comes_before_an_absent_target(model: Path) -> None:
    result = run("compare", model, "missing.onnx", "-t", "directml")
    assert result.returncode == 2
    assert "missing.onnx" in result.stderr
