"""Versioned records of every result, and the page that joins them.

:mod:`mha_export.report.records` holds the dataclasses behind every JSON file, ``schemas/`` their
JSON Schemas, ``formats/`` one file per output format. Names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.report._against import Change, changes_between
    from mha_export.report._merge import Entry, Report, merge
    from mha_export.report._render import format_for, open_report, write_report
    from mha_export.report._verdict import Verdict, verdict_of

_HOME_OF = {
    "Change": "_against",
    "Entry": "_merge",
    "Report": "_merge",
    "Verdict": "_verdict",
    "changes_between": "_against",
    "format_for": "_render",
    "merge": "_merge",
    "open_report": "_render",
    "verdict_of": "_verdict",
    "write_report": "_render",
}

__all__ = [
    "Change",
    "Entry",
    "Report",
    "Verdict",
    "changes_between",
    "format_for",
    "merge",
    "open_report",
    "verdict_of",
    "write_report",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
