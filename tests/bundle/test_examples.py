"""The examples run from a folder outside the project, and name what is wrong with a bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from broken_bundles import BREAKS, older_runtime, tampered_weight

from mha_export.jobs import verify_bundle
from mha_export.jobs.bundle import bundle_export
from mha_export.spec import AttentionSpec
from mha_export.targets._directml_lab import lab_folder
from mha_export.targets._node import chromium_program, modules_folder
from mha_export.targets._platform import find_program

HERE = Path(__file__).parent
Needs = Callable[[str], None]
Link = Callable[[Path], Path]


def outcome(command: list[str], bundle: Path) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=bundle.parent, env=environ)
    return done.returncode, done.stdout + done.stderr


def python(bundle: Path, *words: str) -> tuple[int, str]:
    return outcome([sys.executable, str(bundle / "examples/python/run.py"), *words], bundle)


def node(bundle: Path, *words: str) -> tuple[int, str]:
    program = str(find_program("node"))
    return outcome([program, str(bundle / "examples/javascript/run.mjs"), *words], bundle)


@pytest.mark.parametrize("break_it", BREAKS)
def test_python_names_what_is_wrong(bundle: Path, break_it: Callable[[Path], str]) -> None:
    words = break_it(bundle)
    code, said = python(bundle, "--check")
    assert code == 1, said
    assert f"FAILED: {words}" in said


def test_verify_names_an_older_runtime(bundle: Path) -> None:
    older_runtime(bundle)
    result = verify_bundle(bundle, targets=["cpu"])
    assert result.exit_code == 1
    (row,) = result.document["answers"]
    assert row["status"] == "error"
    assert "is older than 9999.0, which cpu needs" in row["reason"]


def test_python_checks_and_names_a_provider_that_is_not_here(bundle: Path) -> None:
    code, said = python(bundle, "--check")
    assert code == 0, said
    assert "cpu on CPUExecutionProvider" in said
    assert "all checks passed" in said
    code, said = python(bundle, "--check", "--target", "directml")
    assert code == 1
    assert "FAILED: provider: directml needs DmlExecutionProvider" in said


DECODERS = ["decoder", "static_decoder", "fixed_decoder"]


def tokens_of(said: str) -> list[int]:
    return [int(token) for token in said.splitlines()[-1].split()]


@pytest.mark.parametrize("which", DECODERS)
def test_python_streams_a_decoders_tokens(which: str, request: pytest.FixtureRequest) -> None:
    decoder: Path = request.getfixturevalue(which)
    code, said = python(decoder, "--check")
    assert code == 0, said
    known = json.loads((decoder / "manifest.json").read_bytes())["generation"]
    assert len(known["tokens"]) == (13 if which == "fixed_decoder" else 16)
    code, said = python(decoder, "--generate", str(len(known["tokens"])))
    assert code == 0, said
    assert tokens_of(said) == known["tokens"]
    if which == "fixed_decoder":
        code, said = python(decoder, "--generate", "14")
        assert code == 1
        assert "FAILED: the cache has room for 18 tokens, prompt included, not 19" in said


def test_node_checks_and_names_what_is_wrong(
    bundle: Path, needs: Needs, with_modules: Link
) -> None:
    needs("node")
    with_modules(bundle)
    code, said = node(bundle, "--check")
    assert code == 0, said
    assert "cpu on cpu" in said
    code, said = node(bundle, "--check", "--target", "directml")
    assert code == 1
    assert "FAILED: provider: directml needs dml" in said
    whole = bundle.with_name("whole")
    shutil.copytree(bundle, whole, symlinks=True)
    for break_it in BREAKS:
        shutil.rmtree(bundle)
        shutil.copytree(whole, bundle, symlinks=True)
        words = break_it(bundle)
        code, said = node(bundle, "--check")
        assert code == 1, break_it.__name__
        assert f"FAILED: {words}" in said


@pytest.mark.parametrize("which", DECODERS)
def test_node_streams_the_same_tokens(
    which: str,
    tmp_path: Path,
    needs: Needs,
    with_modules: Link,
    request: pytest.FixtureRequest,
) -> None:
    needs("node")
    copy = with_modules(shutil.copytree(request.getfixturevalue(which), tmp_path / "app"))
    code, said = node(copy, "--check")
    assert code == 0, said
    known = json.loads((copy / "manifest.json").read_bytes())["generation"]
    code, said = node(copy, "--generate", str(len(known["tokens"])))
    assert tokens_of(said) == known["tokens"]
    if which == "fixed_decoder":
        code, said = node(copy, "--generate", "14")
        assert code == 1
        assert "FAILED: the cache has room for 18 tokens, prompt included, not 19" in said


@pytest.mark.slow
def test_node_on_windows_with_directml(
    tmp_path: Path, needs: Needs, exporter: Callable[..., Path], plain: AttentionSpec
) -> None:
    """Windows' Node.js and the real DirectML, where scripts/directml_lab has built its lab."""
    needs("directml")
    lab = lab_folder().resolve()
    if not (lab / "directml" / "enter").is_file():
        pytest.skip("DirectML is here without the lab of scripts/directml_lab")
    bundle_export(exporter(tmp_path, "cpu", "directml", spec=plain), out=tmp_path / "app")
    folder = tmp_path / "app" / "examples" / "javascript"
    (folder / "node_modules").symlink_to("/directml/app/node_modules")  # as seen in the lab
    enter = [str(lab / "directml" / "enter"), str(lab), "/directml/node"]
    command = [*enter, f"Z:/host{folder}/run.mjs", "--check", "--provider", "dml"]
    code, said = outcome([*command, "--target", "directml"], tmp_path / "app")
    assert code == 0, said
    assert "directml on dml" in said
    assert "1 attention nodes on dml" in said
    assert "all checks passed" in said


@pytest.mark.slow
def test_cpp_with_openvino(bundle: Path, needs: Needs, request: pytest.FixtureRequest) -> None:
    needs("openvino")
    needs("cmake")
    import openvino.utils

    build = bundle.parent / "build"
    source = bundle / "examples" / "cpp"
    found = f"-DOpenVINO_DIR={openvino.utils.get_cmake_path()}"
    for command in (
        ["cmake", "-S", str(source), "-B", str(build), found],
        ["cmake", "--build", str(build), "--target", "openvino_app"],
    ):
        code, said = outcome(command, bundle)
        assert code == 0, said
    program = str(build / "openvino_app")
    decoders = [request.getfixturevalue(which) for which in DECODERS]
    for folder in (bundle, *decoders):
        code, said = outcome([program, str(folder), "--check"], bundle)
        assert code == 0, said
        assert "all checks passed" in said
    code, said = outcome([program, str(bundle), "--check", "--target", "directml"], bundle)
    assert code == 1
    assert "FAILED: runtime: directml is not for openvino" in said
    whole = bundle.with_name("whole")
    shutil.copytree(bundle, whole)
    for break_it in BREAKS:
        shutil.rmtree(bundle)
        shutil.copytree(whole, bundle)
        words = break_it(bundle)
        code, said = outcome([program, str(bundle), "--check"], bundle)
        assert code == 1, break_it.__name__
        assert f"FAILED: {words}" in said


def page(bundle: Path, query: str) -> dict[str, object]:
    driver = str(HERE / "drive_page.mjs")
    command = [str(find_program("node")), driver, str(modules_folder()), str(bundle), query]
    environ = {**os.environ, "MHA_EXPORT_CHROMIUM": str(chromium_program())}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found["strangers"] == []
    assert found["scrolls"] is False
    return found


@pytest.mark.slow
def test_the_page_in_a_browser(
    tmp_path: Path, needs: Needs, with_modules: Link, exporter: Callable[..., Path]
) -> None:
    needs("browser")
    # In plain ops: SwiftShader computes ONNX Runtime's own attention wrongly (docs/targets.md).
    export_dir = exporter(tmp_path, "webgpu", "wasm", "portable", form="primitive")
    bundle_export(export_dir, out=tmp_path / "app")
    bundle = with_modules(tmp_path / "app")
    for provider in ("wasm", "webgpu"):
        found = page(bundle, f"?provider={provider}")
        assert found["ok"] is True, found
        assert (found["provider"], found["target"]) == (provider, provider)
    assert "on WebGPU" in str(found["placement"])
    found = page(bundle, "?provider=cuda")
    assert found["reason"] == "provider: cuda is not in this browser"
    tampered_weight(bundle)
    found = page(bundle, "?provider=wasm")
    assert found["state"] == "failed"
    assert str(found["reason"]).startswith("model/weights.bin: changed")
