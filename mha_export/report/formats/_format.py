"""What a report format is. A file of this package that defines ``FORMAT`` is found by itself."""

from __future__ import annotations

from functools import cache
from typing import Protocol, runtime_checkable

from mha_export.discovery import members
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
    found = members("mha_export.report.formats", "FORMAT")
    return tuple(sorted(found, key=lambda item: item.name))
