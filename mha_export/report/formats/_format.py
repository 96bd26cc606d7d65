"""What a report format is. A file of this package that defines ``FORMAT`` is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from mha_export.report._merge import Report


@runtime_checkable
class Format(Protocol):
    """One way to write a report."""

    name: str
    suffixes: tuple[str, ...]
    """Lower case, with the dot."""

    def render(self, report: Report) -> str:
        """The whole file. Same report, same bytes.

        Errors:
            mha_export.errors.InputError: the format needs an extra that is not installed.
        """
        ...


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format of this package, in the order of their names."""
    found = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"mha_export.report.formats.{module.name}")
            found.append(loaded.FORMAT)
    return tuple(sorted(found, key=lambda item: item.name))
