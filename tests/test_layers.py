"""Imports go one way: docs/design.md's table is the law, and this reads it from there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mha_export"

Table = Mapping[str, frozenset[str]]


def read_table(text: str) -> dict[str, frozenset[str]]:
    """Rows ``| `a`, `b` | may import |``; "the above" and "everything" mean what they say."""
    section = text.split("## Direction of data", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", section, flags=re.MULTILINE)
    names = [re.findall(r"`(\w+)`", left) for left, _ in rows]
    everything = {name for group in names for name in group}
    table: dict[str, frozenset[str]] = {}
    above: frozenset[str] = frozenset()
    for group, (_, right) in zip(names, rows, strict=True):
        stated = set(re.findall(r"`(\w+)`", right)) & everything
        if "everything but" in right:
            stated = everything - stated
        elif "everything" in right:
            stated = everything
        elif "the above" in right:
            stated |= above
        table |= dict.fromkeys(group, frozenset(stated))
        above = frozenset(stated)
    return table


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


def layer_of(path: Path) -> str:
    """``mha_export/forms/_build.py`` belongs to ``forms``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, inside functions and type checks too."""
    package = ["mha_export", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def violations(path: Path, table: Table) -> list[str]:
    layer = layer_of(path)
    allowed = table[layer] | {layer}
    found = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "mha_export" or len(parts) < 2 or parts[1] == "__version__":
            continue
        if parts[1] not in allowed:
            where = path.relative_to(ROOT)
            found.append(f"{where}:{line}: {layer} imports {name}; it may import {sorted(allowed)}")
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_the_table_is_read_as_it_is_meant(table: Table) -> None:
    assert table["errors"] == frozenset()
    assert table["spec"] == {"errors"}
    assert table["oracle"] == {"spec", "errors"}
    assert {"spec", "operands", "evaluator", "errors", "forms", "recognise", "oracle"} <= table[
        "rewrite"
    ]
    assert "targets" not in table["rewrite"]
    assert "cli" not in table["jobs"]
    assert table["cli"] == frozenset(table)


def test_the_table_has_no_cycle(table: Table) -> None:
    rest = {layer: set(may) - {layer} for layer, may in table.items()}
    while rest:
        free = [layer for layer, may in rest.items() if not may & set(rest)]
        assert free, f"these import each other: {sorted(rest)}"
        for layer in free:
            del rest[layer]


def test_every_layer_is_in_the_table(table: Table) -> None:
    assert {layer_of(path) for path in SOURCES} - set(table) == set()


def test_imports_go_one_way(table: Table) -> None:
    found = [
        line for path in SOURCES if layer_of(path) in table for line in violations(path, table)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("spec/_mask.py", "import mha_export.oracle"),
        ("oracle/_mask.py", "from mha_export.forms import Scope"),
        ("forms/onnx.py", "from mha_export import recognise"),
        ("recognise/_site.py", "def f():\n    from ..targets import all_targets"),
        ("jobs/run.py", "from mha_export.cli import main"),
    ],
)
def test_a_wrong_import_is_found(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "mha_export")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "mha_export" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = violations(path, table)
    assert found.startswith(f"mha_export/{file}:{text.count(chr(10)) + 1}: ")


def ruff_codes(text: str, name: str) -> list[str]:
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--no-cache"]
    done = subprocess.run(
        [*command, "--stdin-filename", str(ROOT / name), "-"],
        input=text,
        text=True,
        capture_output=True,
        cwd=ROOT,
    )
    return re.findall(r": ([A-Z]+\d+) ", done.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "import onnx.helper\n\nonnx.helper.make_node\n",
        "from onnx import helper\n\nhelper.make_node\n",
        "from onnx.helper import make_node\n\nmake_node\n",
        "import onnx\n\nonnx.helper.make_node\n",
    ],
)
def test_onnx_helper_is_banned_in_the_package_only(text: str) -> None:
    assert "TID251" in ruff_codes(text, "mha_export/forms/new.py")
    assert "TID251" not in ruff_codes(text, "tests/forms/test_new.py")


def test_the_package_has_no_banned_import() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251"]
    done = subprocess.run([*command, "mha_export"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
