"""One table of cases, which the chooser of every language must give the same answers to."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import mha_export.bundle
from mha_export.targets._platform import find_program

HERE = Path(__file__).parent
TEMPLATES = Path(mha_export.bundle.__file__).parent / "templates"
MANIFEST, CASES = HERE / "chooser_manifest.json", HERE / "chooser_cases.tsv"
ROWS = [line.split("\t") for line in CASES.read_text(encoding="utf-8").splitlines()[1:]]
EXPECTED = [row[5] for row in ROWS]


def python_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_example", TEMPLATES / "python" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_python(row: list[str]) -> None:
    _, runtime, version, offered, want, expected = row
    example = python_example()
    providers = [] if offered == "-" else offered.split(",")
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    try:
        variant, provider = example.choose(
            manifest, runtime, version, providers, None if want == "-" else want
        )
        found = f"{variant['target']}/{provider}"
    except example.CheckError as error:
        found = "!" + str(error).partition(":")[0]
    assert found == expected


def test_javascript(needs: Callable[[str], None]) -> None:
    node = find_program("node")
    if node is None:
        needs("node")
    chooser = TEMPLATES / "javascript" / "bundle.mjs"
    command = [str(node), str(HERE / "choose_all.mjs"), str(chooser), str(MANIFEST), str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == EXPECTED


def test_cpp(needs: Callable[[str], None], tmp_path: Path) -> None:
    needs("cmake")
    compiler, program = find_program("c++", "g++", "clang++"), tmp_path / "choose_all"
    source = HERE / "choose_all.cpp"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(TEMPLATES / "cpp")]
    subprocess.run([str(compiler), *flags, "-o", str(program), str(source)], check=True)
    command = [str(program), str(HERE), MANIFEST.name, CASES.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == EXPECTED
    for size in (0, 55, 56, 64, 1000):  # lengths around the padding of a block
        (tmp_path / "data").write_bytes(bytes(range(250)) * 4)
        data = (tmp_path / "data").read_bytes()[:size]
        (tmp_path / "data").write_bytes(data)
        hashed = subprocess.run(
            [str(program), str(tmp_path), "data"], capture_output=True, text=True
        )
        assert hashed.stdout.strip() == hashlib.sha256(data).hexdigest()


def test_the_table_tells_the_rules_apart() -> None:
    assert {e for e in EXPECTED if e.startswith("!")} == {
        *("!older", "!provider", "!runtime", "!unknown")
    }
    targets = {v["target"] for v in json.loads(MANIFEST.read_text(encoding="utf-8"))["variants"]}
    assert {e.partition("/")[0] for e in EXPECTED if not e.startswith("!")} == targets
