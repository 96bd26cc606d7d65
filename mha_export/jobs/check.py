"""The main job: export, compile, prove, time and report, with every target found here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_export import report
from mha_export.errors import InputError
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import OK, JobResult, worst
from mha_export.jobs._settings import split_settings
from mha_export.jobs._store import PORTABLE
from mha_export.jobs.export import export_model
from mha_export.jobs.report import write_report
from mha_export.jobs.run import RAW, run_models

_REPORTS = ("report.html", "report.md")


def check_source(
    source: Any,
    *,
    out: str | Path,
    targets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Export ``source`` for every target, run all of them here, and write the report.

    Args:
        source: as :func:`mha_export.jobs.export_model` takes it.
        out: folder; beside the export it gets ``results.json``, ``report.html`` and ``report.md``.
        targets: as ``-t``; none: every target found here, and the portable file.
        options: of ``export`` and ``run``, by name (``form``, ``quick``, ``dims``, ...).
        progress: told of every step.

    Returns:
        A document with ``export``, ``results`` and a one-line ``verdict``; the worst exit code.

    Errors:
        InputError: as for its parts.
    """
    source_settings, export_settings, run_settings = split_settings(options or {})
    if run_settings.vs is None and not run_settings.quick:
        run_settings = dataclasses.replace(run_settings, vs=RAW)
    out = Path(out)
    exported = export_model(
        source,
        targets=targets or ("all", PORTABLE),
        out=out,
        source_settings=source_settings,
        settings=export_settings,
        progress=progress,
    )
    if exported.exit_code != OK:
        empty: dict[str, Any] = {"results": []}
        return JobResult(
            document={"export": exported.document, "results": empty, "verdict": "FAIL export"},
            exit_code=exported.exit_code,
            notices=exported.notices,
        )
    results = out / "results.json"
    ran = run_models(out, targets=targets, output=results, settings=run_settings, progress=progress)
    progress("writing the report")
    written, notices = _reports(out, results)
    verdict = report.verdict_of(report.open_report([results]))
    return JobResult(
        document={
            "export": exported.document,
            "results": ran.document,
            "verdict": verdict.line,
        },
        exit_code=worst((ran.exit_code, verdict.exit_code)),
        notices=(*exported.notices, *ran.notices, *notices),
        files=(*exported.files, results, *written),
    )


def _reports(out: Path, results: Path) -> tuple[list[Path], list[str]]:
    """Each report that can be made here; one that needs a missing extra is a notice."""
    written: list[Path] = []
    notices: list[str] = []
    for name in _REPORTS:
        try:
            written += write_report([results], output=out / name).files
        except InputError as error:
            notices.append(f"{name} was not written: {error}")
    return written, notices
