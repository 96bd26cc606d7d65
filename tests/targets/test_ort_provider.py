"""Targets that are one provider of ONNX Runtime: where they say they are, how they are set up."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import onnx
import pytest

from mha_export.errors import TargetUnavailableError
from mha_export.targets import Available, CompileOptions, Program, Unavailable, all_targets
from mha_export.targets import _ort_provider as provider
from mha_export.targets._ort import SessionSetup, optimise_once

TARGETS = {
    name: target
    for name, target in all_targets().items()
    if isinstance(target, provider.OrtProviderTarget)
}
SYSTEMS = ("Linux", "Windows", "Darwin")


@pytest.fixture
def everything_is_here(monkeypatch):
    """Distribution, library and device are found, whatever the system."""
    monkeypatch.setattr(provider.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(provider._ort, "clash", lambda: None)
    monkeypatch.setattr(provider.PluginFiles, "library", lambda self, system: Path("library"))
    monkeypatch.setattr(provider.OrtProviderTarget, "_finds_a_device", lambda self, system: True)
    monkeypatch.setattr(provider.Path, "exists", lambda self: True)


def test_there_are_such_targets() -> None:
    assert {"coreml", "qnn", "migraphx", "ort-openvino", "ort-tensorrt"} == set(TARGETS)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_it_is_available_on_its_systems_only(target, system, everything_is_here) -> None:
    found = target.availability_on(system)
    assert found.build == found.run
    assert isinstance(found.run, Available) is (system in target.systems)
    if system in target.systems:
        assert (found.version, found.device) == ("9.9", target.device)
    else:
        assert f"this is {system}" in found.run.reason
        assert found.run.fix == target.fix


def _gone(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


MISSING = {
    "the package": ("metadata.version", _gone, "is not installed"),
    "the library": ("PluginFiles.library", lambda self, system: None, "brings no library"),
    "a device": (
        "OrtProviderTarget._finds_a_device",
        lambda self, system: False,
        "finds no",
    ),
    "the device's file": ("Path.exists", lambda self: False, "does not exist"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_said_with_the_fix(what, everything_is_here, monkeypatch) -> None:
    place, stand_in, says = MISSING[what]
    owner, _, name = place.rpartition(".")
    monkeypatch.setattr(getattr(provider, owner), name, stand_in)
    said = {}
    for target in TARGETS.values():
        state = target.availability_on(target.systems[-1]).run
        if isinstance(state, Unavailable):
            said[target.name] = state.reason
            assert state.fix == target.fix
    assert said, "no target would notice"
    assert all(says in reason for reason in said.values()), said


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_provider_this_onnxruntime_has_not_is_exit_3(target, tmp_path) -> None:
    if isinstance(target.availability().run, Available):
        pytest.skip(f"{target.name} is here")
    if target.plugin is not None and target.plugin.library("Linux") is not None:
        pytest.skip("the plugin is here, without a device")
    setup = target.setup(threads=2, system="Linux")
    assert setup.threads == 2
    assert setup.ep_context is target.context
    if target.plugin is None:
        with pytest.raises(TargetUnavailableError) as caught:
            target.compile(Program(graphs={}), CompileOptions(workdir=tmp_path))
        assert caught.value.exit_code == 3


def test_a_provider_that_saves_no_context_is_an_error(tmp_path) -> None:
    """The CPU has none: an artifact that would have to be compiled again is no artifact."""
    path = tmp_path / "m.onnx"
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[n] a) => (float[n] b) { b = Neg(a) }'
    onnx.save(onnx.parser.parse_model(text), path)
    options = CompileOptions(threads=1, workdir=tmp_path / "built")
    program = Program(graphs={"main": path})
    with pytest.raises(RuntimeError, match="saved nothing"):
        optimise_once(program, SessionSetup(threads=1, ep_context=True), options)
    assert optimise_once(program, SessionSetup(threads=1), options).files
