"""The main job: export, compile, prove, time and report, with every target found here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_export import report
from mha_export.errors import InputError
from mha_export.jobs._export_folder import is_export, open_export
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult, worst
from mha_export.jobs._settings import ExportSettings, SourceSettings, split_settings
from mha_export.jobs._store import MANIFEST, PORTABLE, check_folder
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
        source: as :func:`mha_export.jobs.export_model` takes it; or an export folder, which is
            then checked as it is.
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
    folder = Path(source) if isinstance(source, (str, Path)) else None
    if folder is not None and is_export(folder):
        exported = _as_it_is(folder, out, source_settings, export_settings)
    else:
        folder = out
        exported = export_model(
            source,
            targets=targets or ("all", PORTABLE),
            out=out,
            source_settings=source_settings,
            settings=export_settings,
            progress=progress,
        )
    if not exported.files:
        empty: dict[str, Any] = {"results": []}
        return JobResult(
            document={"export": exported.document, "results": empty, "verdict": "FAIL export"},
            exit_code=exported.exit_code,
            notices=exported.notices,
        )
    results = out / "results.json"
    ran = run_models(
        folder, targets=targets, output=results, settings=run_settings, progress=progress
    )
    progress("writing the report")
    written, notices = _reports(out, results)
    verdict = report.verdict_of(report.open_report([results]))
    return JobResult(
        document={
            "export": exported.document,
            "results": ran.document,
            "verdict": verdict.line,
        },
        exit_code=worst((exported.exit_code, ran.exit_code, verdict.exit_code)),
        notices=(*exported.notices, *ran.notices, *notices),
        files=(*exported.files, results, *written),
    )


def _as_it_is(
    folder: Path, out: Path, source_settings: SourceSettings, export_settings: ExportSettings
) -> JobResult:
    """An export that is there already; what would steer an export has nothing to steer."""
    if dataclasses.replace(source_settings, seed=0) != SourceSettings() or (
        dataclasses.replace(export_settings, seed=0) != ExportSettings()
    ):
        raise InputError(
            f"{folder} is an export already; options that steer an export change nothing in it",
            fix="leave them out, or check the model it was made from",
        )
    document = open_export(folder).record.to_json()
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    return JobResult(document=document, files=(folder / MANIFEST,))


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
