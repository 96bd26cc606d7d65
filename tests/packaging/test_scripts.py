"""Scripts in Python start by themselves in the development environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FIRST = "import _development"
PYTHON = sorted(
    path.name
    for path in SCRIPTS.iterdir()
    if path.is_file() and path.read_text(encoding="utf-8").startswith("#!/usr/bin/env python")
)


def _outside(name: str, venv: Path) -> subprocess.CompletedProcess[str]:
    """The script by an interpreter that sees no installed package."""
    return subprocess.run(
        [sys.executable, "-S", SCRIPTS / name, "--help"],
        env={**os.environ, "MHA_EXPORT_VENV": str(venv), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", PYTHON)
def test_a_script_imports_the_environment_before_what_has_to_be_installed(name: str) -> None:
    lines = (SCRIPTS / name).read_text(encoding="utf-8").splitlines()
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    at = imports.index(FIRST.split()[1])
    assert set(imports[:at]) <= {*sys.stdlib_module_names, "__future__", "collections.abc"}


def test_without_an_environment_a_script_says_what_builds_it(tmp_path: Path) -> None:
    ended = _outside("bench_speed", tmp_path / "absent")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "no mha_export" in ended.stderr
    assert "fix: run scripts/test once" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_script_goes_on_in_the_environment(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "inside: $2"\n', encoding="utf-8")
    python.chmod(0o755)
    ended = _outside("bench_speed", tmp_path / "venv")
    assert (ended.returncode, ended.stdout) == (0, "inside: --help\n")
