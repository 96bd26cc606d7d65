"""One report from the results of any number of machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mha_export import report
from mha_export.jobs._result import JobResult
from mha_export.jobs._store import check_file


def write_report(
    results: Sequence[str | Path], *, output: str | Path, against: str | Path | None = None
) -> JobResult:
    """Merge ``results`` and render them as the suffix of ``output`` asks.

    Returns:
        A document with the ``verdict`` in one line. ``exit_code`` 1 when any result is a ``fail``,
        ``fallback`` or ``error``, or something got worse than ``against``.

    Errors:
        InputError: no results file is usable, or the suffix names no format.
    """
    report.format_for(output)
    check_file(Path(output))
    merged = report.open_report(results, against=against)
    verdict = report.verdict_of(merged)
    written = report.write_report(merged, output)
    return JobResult(
        document={"verdict": verdict.line, "exit_code": verdict.exit_code, "report": str(written)},
        exit_code=verdict.exit_code,
        notices=tuple(f"left out {row.reason}" for row in merged.damaged),
        files=(written,),
    )
