"""What ``pyproject.toml`` promises: extras that resolve, data that is there, one version."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import mha_export

requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
EXTRAS = {
    *("cpu", "cuda", "tensorrt", "tensorrt-rtx", "directml", "openvino", "webgpu"),
    *("torch", "hf", "report", "demo", "dev"),
}
RUNTIMES = {"onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "openvino", "torch"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    result: dict[str, Any] = document["project"]
    return result


def test_the_promised_extras_are_there(project: dict[str, Any]) -> None:
    assert set(project["optional-dependencies"]) >= EXTRAS


def test_every_requirement_can_be_read(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(item for group in extras.values() for item in group)]:
        requirement = requirements.Requirement(text)
        if requirement.name == project["name"]:
            assert requirement.extras <= set(extras), text


def test_the_base_install_has_no_runtime_and_no_torch(project: dict[str, Any]) -> None:
    names = {requirements.Requirement(text).name for text in project["dependencies"]}
    assert names & RUNTIMES == set()


def test_one_extra_never_brings_two_onnxruntimes(project: dict[str, Any]) -> None:
    """They install over each other. ``webgpu`` builds on the plain one."""
    extras = project["optional-dependencies"]

    def names(extra: str) -> set[str]:
        found = set()
        for text in extras[extra]:
            requirement = requirements.Requirement(text)
            if requirement.name == project["name"]:
                found |= {name for inner in requirement.extras for name in names(inner)}
            else:
                found.add(requirement.name)
        return found

    flavours = {"onnxruntime", "onnxruntime-gpu", "onnxruntime-directml"}
    for extra in extras:
        assert len(names(extra) & flavours) <= 1, extra


def test_the_constraints_fit_the_requirements(project: dict[str, Any]) -> None:
    pinned = {}
    for line in (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            requirement = requirements.Requirement(text)
            (pin,) = requirement.specifier
            assert pin.operator == "==", text
            pinned[requirement.name.lower()] = pin.version
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["demo"], *extras["dev"], *extras["hf"]]
    for text in needed:
        requirement = requirements.Requirement(text)
        if requirement.name != project["name"]:
            version = pinned.get(requirement.name.lower())
            assert version is not None, f"{requirement.name} is not in constraints.txt"
            assert requirement.specifier.contains(version, prereleases=True), text


def test_the_version_is_stated_once() -> None:
    assert metadata.version("mha-export") == mha_export.__version__


def test_the_package_is_typed() -> None:
    assert (Path(mha_export.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run"])
def test_entry_points_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK), f"chmod +x {script}"
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_the_changelog_speaks_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(mha_export.__version__)}\b", text, re.M)


@pytest.mark.parametrize("name", mha_export.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mha_export, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = mha_export.nosuch
