"""Starting is quick and light, and everything starts with no optional package there."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from mha_export.cli._group import cli

LIMIT_S = 0.3
OPTIONAL = (
    *("jinja2", "matplotlib", "onnxruntime", "onnxscript", "openvino", "pandas", "safetensors"),
    *("tensorrt", "tensorrt_rtx", "tokenizers", "torch", "transformers"),
)
HEAVY = ("numpy", "onnx", "onnx_ir", "rich", *OPTIONAL)

WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from mha_export.cli import main
sys.argv[0] = "mha-export"
main()
"""


def bare(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process that can import no optional package."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def cpu_seconds(*arguments: str) -> float:
    """Processor time of one process: what it would take on a machine with nothing else to do."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.skipif(sys.platform == "win32", reason="reads the processor time as POSIX gives it")
@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import mha_export"),
        ("-c", "import sys; sys.argv[1:] = ['--help']; from mha_export.cli import main; main()"),
    ],
    ids=["import", "help"],
)
def test_starting_is_quick(arguments: tuple[str, ...]) -> None:
    cpu_seconds(*arguments)  # fills the byte-code cache
    median = statistics.median(cpu_seconds(*arguments) for _ in range(5))
    assert median < LIMIT_S


@pytest.mark.parametrize("module", ["mha_export", "mha_export.errors", "mha_export.spec"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=True,
    )
    roots = {match.split(".")[0] for match in re.findall(r"\|\s+([\w.]+)$", done.stderr, re.M)}
    assert "mha_export" in roots
    assert roots & set(HEAVY) == set()


def test_help_imports_no_runtime() -> None:
    text = (
        "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr));"
        "sys.argv[1:] = ['--help']; from mha_export.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert "mha_export" in loaded
    assert loaded & set(OPTIONAL) == set()


@pytest.mark.parametrize("command", ["", *sorted(cli.list_commands(None))])  # type: ignore[arg-type]
def test_help_of_every_command_needs_no_optional_package(command: str) -> None:
    done = bare(*([command] if command else []), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Example" in done.stdout


def test_the_base_install_builds_and_inspects(tmp_path: Path) -> None:
    built = bare("build", "--preset", "textbook-512x8", "-o", "m.onnx", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    seen = bare("inspect", "m.onnx", "--json", cwd=tmp_path)
    assert seen.returncode == 0, seen.stderr
    (site,) = json.loads(seen.stdout)["sites"]
    assert site["verdict"] == "attention"
    assert (site["spec"]["q_heads"], site["spec"]["head_dim"]) == (8, 64)


def test_a_source_that_needs_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    header = b"{}"
    weights = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(weights)
    done = bare("inspect", str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'mha-export[hf]'" in done.stderr
