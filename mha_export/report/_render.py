"""A report to a file, by suffix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mha_export.errors import InputError
from mha_export.report._against import changes_between
from mha_export.report._merge import Report, merge, with_changes
from mha_export.report.formats import Format, all_formats
from mha_export.report.records import read_results, write_text


def open_report(paths: Iterable[Path | str], *, against: Path | str | None = None) -> Report:
    """Read and join results (or earlier ``.json`` reports); ``against`` adds what changed.

    Errors:
        InputError: none of the files can be used, or ``against`` cannot.
    """
    report = merge(read_results(paths))
    if against is None:
        return report
    return with_changes(report, changes_between(report, merge(read_results([against]))))


def format_for(path: Path | str) -> Format:
    """The format a file name asks for.

    Errors:
        InputError: no format has that suffix.
    """
    suffix = Path(path).suffix.lower()
    for candidate in all_formats():
        if suffix in candidate.suffixes:
            return candidate
    known = ", ".join(suffix for candidate in all_formats() for suffix in candidate.suffixes)
    raise InputError(
        f"{path}: no report format "
        + (f"ends in {suffix!r}" if suffix else "is named, for want of a suffix"),
        fix=f"end it in one of {known}",
    )


def write_report(report: Report, path: Path | str) -> Path:
    """Render ``report`` as the suffix of ``path`` asks, and write it whole or not at all.

    Errors:
        InputError: unknown suffix, a folder that does not exist, or an extra that is not installed.
    """
    return write_text(path, format_for(path).render(report))
