"""The runnable examples: templates of this package, copied into a bundle.

They read everything about the model from ``manifest.json``, so that only the few places between
``@@`` depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

FOLDER = "examples"


def write_examples(folder: Path, values: Mapping[str, str]) -> list[str]:
    """Copy every template into ``folder / "examples"``; names of what was written.

    Args:
        folder: the bundle.
        values: what replaces ``@@NAME@@``.
    """
    written: list[str] = []
    _copy(resources.files("mha_export.bundle") / "templates", folder / FOLDER, values, written)
    return written


def _copy(source: Any, target: Path, values: Mapping[str, str], written: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for item in sorted(source.iterdir(), key=lambda item: str(item.name)):
        if item.name.startswith((".", "__pycache__")):
            continue
        if item.is_dir():
            _copy(item, target / item.name, values, written)
            continue
        text = item.read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace(f"@@{name}@@", value)
        path = target / item.name
        path.write_text(text, encoding="utf-8", newline="\n")
        written.append(path.as_posix())
