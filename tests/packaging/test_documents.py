"""What the documents point to exists: files, headings, commands, options, names of the API."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import mha_export
from mha_export.cli._group import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)


def commands(text: str) -> Iterator[list[str]]:
    """Every ``mha-export ...`` line of a code block, taken apart as a shell does."""
    for language, body in code_blocks(text):
        if language not in ("", "bash", "console", "sh"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ")
            if words.startswith("mha-export "):
                yield shlex.split(words, comments=True)[1:]


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        assert path.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_commands_and_their_options_exist(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        shown = "mha-export " + " ".join(words)
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--version", "-h"), shown
            continue
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None, f"{shown}: no such command"
        known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
        known |= {"--help", "-h"}
        for word in words[1:]:
            if word.startswith("-") and not word.lstrip("-").isdigit():
                assert word.partition("=")[0] in known, f"{shown}: no option {word}"


def test_scripts_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bscripts/\w+", text))
    assert named >= {"scripts/demo", "scripts/test"}
    for name in named:
        assert (ROOT / name).is_file(), name


def test_python_examples_use_names_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [body for language, body in code_blocks(text) if language == "python"]
    assert examples
    for body in examples:
        compile(body, "README.md", "exec")
        for name in re.findall(r"\bmx\.(\w+)", body):
            assert hasattr(mha_export, name), f"mha_export.{name} does not exist"


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in cli.list_commands(click.Context(cli)):
        assert f"mha-export {name}" in text, f"README.md does not show mha-export {name}"


def test_registries_and_machine_paths_are_not_named() -> None:
    hosts = ("py" + "pi.org", "python" + "hosted", "registry.npm" + "js", "deb." + "debian")
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert not [host for host in hosts if host in text], document
