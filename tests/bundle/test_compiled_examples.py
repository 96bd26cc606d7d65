"""The short examples in compiled languages: built where their toolchain and packages are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from broken_bundles import damaged_manifest, missing_file, tampered_weight, wrong_answer

BREAKS = [tampered_weight, missing_file, damaged_manifest, wrong_answer]


def outcome(command: list[str], folder: Path, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=os.environ | environ
    )
    return done.returncode, done.stdout + done.stderr


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH")
    code, said = outcome([found, "--version"], Path())
    if code != 0:
        pytest.skip(f"{name} does not start: {said.strip().splitlines()[0]}")
    return found


def built(command: list[str], folder: Path, absent: str, **environ: str) -> None:
    """Run a build; skip where the language's packages (``absent``: how that reads) are not here."""
    code, said = outcome(command, folder, **environ)
    if code != 0 and re.search(absent, said):
        pytest.skip(f"{folder.name}: its packages are not here: {said.strip().splitlines()[0]}")
    assert code == 0, said


def names_what_is_wrong(command: list[str], bundle: Path, **environ: str) -> None:
    code, said = outcome([*command, str(bundle), "--check"], bundle, **environ)
    assert code == 0, said
    assert "ordinary: right" in said
    whole = bundle.with_name("whole")
    shutil.copytree(bundle, whole)
    for break_it in BREAKS:
        shutil.rmtree(bundle)
        shutil.copytree(whole, bundle)
        words = break_it(bundle)
        code, said = outcome([*command, str(bundle), "--check"], bundle.parent, **environ)
        assert code == 1, break_it.__name__
        assert f"FAILED: {words}" in said


def library() -> str:
    """ONNX Runtime's shared library, as its Python package brings it."""
    import onnxruntime

    capi = Path(onnxruntime.__file__).parent / "capi"
    return str([*capi.glob("libonnxruntime.*"), *capi.glob("onnxruntime.dll")][0])


@pytest.mark.slow
def test_rust(bundle: Path) -> None:
    folder = bundle / "examples" / "rust"
    target = str(bundle.parent / "target")
    environ = {"CARGO_TARGET_DIR": target, "ORT_DYLIB_PATH": library()}
    absent = r"no matching package|failed to (get|download|load source)|offline"
    built([tool("cargo"), "build", "--offline"], folder, absent, **environ)
    (folder / "Cargo.lock").unlink()
    names_what_is_wrong([f"{target}/debug/bundle-example"], bundle, **environ)


@pytest.mark.slow
def test_csharp(bundle: Path) -> None:
    folder = bundle / "examples" / "csharp"
    out = str(bundle.parent / "out")
    built([tool("dotnet"), "build", "-o", out], folder, r"NU1101|NU1301|NU1100")
    names_what_is_wrong([f"{out}/app"], bundle)


@pytest.mark.slow
def test_swift(bundle: Path) -> None:
    """Parsed: its package is for Apple's systems."""
    code, said = outcome(
        [tool("swiftc"), "-frontend", "-parse", "main.swift"], bundle / "examples" / "swift"
    )
    assert code == 0, said
