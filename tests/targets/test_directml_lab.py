"""DirectML on Linux: what is said without a lab, with one, and what the lab computes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mha_export.errors import TargetUnavailableError
from mha_export.targets import Available, CompileOptions, Program, Unavailable, target_named
from mha_export.targets import _directml_lab as lab
from mha_export.targets._node import NodeEndedError
from mha_export.targets.directml import availability_on, availability_on_linux

VERSIONS = {"onnxruntime": "1.30.0", "directml": "1.15.4", "wine": "10.0", "mesa": "25.0.7"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MHA_EXPORT_DIRECTML_LAB", str(tmp_path))
    (tmp_path / "directml").mkdir()
    return tmp_path


def _state(availability):
    assert availability.build == availability.run
    return availability.run


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_without_a_complete_lab_the_fix_names_windows_and_the_lab(text, folder) -> None:
    if text is not None:
        (folder / "directml" / "lab.json").write_text(text)
    state = _state(availability_on_linux())
    assert isinstance(state, Unavailable)
    assert "Windows" in state.fix
    assert "scripts/directml_lab" in state.fix
    with pytest.raises(TargetUnavailableError, match="no lab") as caught:
        target_named("directml").compile(Program(graphs={}), CompileOptions())
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("root", [True, False])
def test_a_lab_makes_it_available_to_root(root, folder, monkeypatch) -> None:
    (folder / "directml" / "lab.json").write_text(json.dumps(VERSIONS))
    monkeypatch.setattr(lab._platform, "is_root", lambda: root)
    found = availability_on_linux()
    assert found.version == "1.30.0 (DirectML 1.15.4)"
    assert found.device == "software Vulkan (Mesa 25.0.7) under Wine 10.0"
    assert isinstance(_state(found), Available) is root


def test_macos_has_no_directml() -> None:
    state = _state(availability_on("Darwin"))
    assert isinstance(state, Unavailable)
    assert "this is Darwin" in state.reason


def test_a_lab_that_ends_at_once_is_a_crash_with_its_code(folder) -> None:
    enter = folder / "directml" / "enter"
    enter.write_text("#!/bin/sh\nexit 3\n")
    enter.chmod(0o755)
    with pytest.raises(NodeEndedError, match="ended with code 3"):
        lab.serve()


def test_the_lab_says_where_our_files_are(folder) -> None:
    """A stand-in for the lab: it calls back, and answers a request with what it was asked."""
    stand_in = folder / "directml" / "enter"
    stand_in.write_text(
        f"#!{sys.executable}\nimport socket, sys\n"
        "port = int(sys.argv[-1])\n"
        "stream = socket.create_connection(('127.0.0.1', port)).makefile('rw')\n"
        "for line in stream:\n    stream.write(line)\n    stream.flush()\n"
    )
    stand_in.chmod(0o755)
    link = lab.serve()
    link.requests.write('{"op": "load"}\n')
    link.requests.flush()
    assert json.loads(link.replies.readline()) == {"op": "load"}
    assert link.root == "Z:/host"
    link.requests.close()
    link.replies.close()
    assert link.process.wait(timeout=60) == 0


def test_the_real_lab_multiplies_right(needs_target) -> None:
    needs_target("directml")
    command = [sys.executable, "-m", "mha_export.targets._directml_lab"]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
