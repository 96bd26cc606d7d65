"""Is a bundle whole, and does it compute here what it should?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mha_export.bundle import (
    MANIFEST,
    CheckedFiles,
    Manifest,
    OpenedBundle,
    Problem,
    VariantEntry,
    check_files,
    is_bundle,
    open_bundle,
    read_answers,
    read_manifest,
)
from mha_export.bundle._answers import KnownAnswer
from mha_export.bundle._embedding import PORTABLE, version_numbers
from mha_export.errors import InputError
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import CANNOT_RUN, FAILED, OK, JobResult, worst
from mha_export.report.records import SCHEMA_VERSION
from mha_export.targets import (
    Available,
    CompileOptions,
    Program,
    TargetRequest,
    TargetWorker,
    Unavailable,
    parse_target,
    target_named,
)

__all__ = ["inspect_bundle", "is_bundle", "verify_bundle"]

_FAILURES = ("fail", "fallback", "error")


def verify_bundle(
    bundle: str | Path,
    *,
    targets: Sequence[str] = (),
    files_only: bool = False,
    progress: Progress = silent,
) -> JobResult:
    """Check every byte of ``bundle``, then its known answers on the targets that are here.

    Args:
        bundle: the folder or ``.zip``.
        targets: variants to run; none: every variant whose target can run here.
        files_only: leave the known answers out.
        progress: told of every step.

    Returns:
        ``{"bundle", "problems": [{"file", "reason"}], "answers": [{"target", "status", "reason"}],
        "notes"}``. ``exit_code`` 1: a file is missing or changed, or an answer is wrong; 3: a
        target that was asked for cannot run here.

    Errors:
        InputError: not a bundle, or a target it holds no graph for.
    """
    path = Path(bundle)
    progress("checking files")
    with open_bundle(path) as opened:
        checked = _checked(opened)
        manifest, notes = checked.manifest, checked.notes
        problems = _distinct([*opened.problems, *checked.problems])
        answers: list[dict[str, Any]] = []
        if manifest is not None:
            chosen = _chosen(manifest, targets)
            if not problems and not files_only:
                answers = _Answers(opened.folder, manifest, progress).on(
                    chosen, asked=bool(targets)
                )
    codes = [FAILED] if problems else []
    codes += [FAILED for row in answers if row["status"] in _FAILURES]
    codes += [CANNOT_RUN for row in answers if row["status"] == "unavailable" and targets]
    document = {
        "schema_version": SCHEMA_VERSION,
        "bundle": str(bundle),
        "problems": [{"file": p.file, "reason": p.reason} for p in problems],
        "answers": answers,
        "notes": list(notes),
    }
    return JobResult(document=document, exit_code=worst(codes) if codes else OK, notices=notes)


def inspect_bundle(bundle: str | Path) -> JobResult:
    """The manifest of a bundle's folder or ``.zip``.

    Errors:
        InputError: it is damaged.
    """
    with open_bundle(Path(bundle)) as opened:
        return JobResult(document=read_manifest(opened.folder).to_json())


def _checked(opened: OpenedBundle) -> CheckedFiles:
    """The files against the manifest; a damaged archive may have lost the manifest itself."""
    if not opened.problems or (opened.folder / MANIFEST).is_file():
        return check_files(opened.folder)
    return CheckedFiles(problems=(Problem(file=MANIFEST, reason="missing"),))


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    return list({problem.file: problem for problem in reversed(problems)}.values())[::-1]


def _chosen(manifest: Manifest, targets: Sequence[str]) -> list[tuple[VariantEntry, TargetRequest]]:
    entries = {entry.target: entry for entry in manifest.variants}
    if not targets:
        return [(entry, _own_request(entry)) for entry in manifest.variants]
    chosen = []
    for text in targets:
        if text == PORTABLE:
            chosen.append((entries[PORTABLE], _own_request(entries[PORTABLE])))
            continue
        request = parse_target(text)
        entry = entries.get(request.target.name)
        if entry is None:
            raise InputError(
                f"the bundle holds no variant for {request.target.name}; "
                f"it has {', '.join(entries)}",
                fix="use -t portable, or bundle an export that has it",
            )
        chosen.append((entry, request))
    return chosen


def _own_request(entry: VariantEntry) -> TargetRequest:
    """The target a variant is for; ``portable`` runs on ONNX Runtime's CPU or the reference."""
    names = ("cpu", "reference") if entry.target == PORTABLE else (entry.target,)
    found = [target_named(name) for name in names]
    here = [target for target in found if isinstance(target.availability().run, Available)]
    return TargetRequest(target=(here or found)[0])


class _Answers:
    """Known answers on one target after another, each in a worker process."""

    def __init__(self, folder: Path, manifest: Manifest, progress: Progress) -> None:
        self._folder = folder
        self._cases = read_answers(folder, manifest.answers)
        self._progress = progress

    def on(
        self, chosen: Sequence[tuple[VariantEntry, TargetRequest]], *, asked: bool
    ) -> list[dict[str, Any]]:
        rows = []
        for entry, request in chosen:
            state = request.target.availability().run
            if isinstance(state, Unavailable):
                if asked:
                    rows.append(_row(entry, request, "unavailable", f"{state.reason}; {state.fix}"))
                continue
            self._progress(f"known answers on {request.name}: {entry.target}")
            rows.append(self._row(entry, request))
        return rows

    def _row(self, entry: VariantEntry, request: TargetRequest) -> dict[str, Any]:
        if old := _too_old(entry, request):
            return _row(entry, request, "error", old)
        with TargetWorker(request.target.name) as worker:
            program = Program(graphs={"main": self._folder / entry.file})
            precision = request.precision or _precision(entry, request)
            built = worker.compile(program, CompileOptions(precision=precision))
            if built.value is None:
                return _row(entry, request, "error", f"build: {built.reason}")
            status, reason = self._judged(worker)
            if status != "fail" and status != "error":
                placed = worker.placement()
                if placed.value is not None and not placed.value.complete:
                    where = placed.value.elsewhere[0]
                    return _row(entry, request, "fallback", f"ran elsewhere: {where}")
        return _row(entry, request, status, reason)

    def _judged(self, worker: TargetWorker) -> tuple[str, str | None]:
        found: tuple[str, str | None] = ("pass", None)
        for case in self._cases:
            outcome = worker.run(case.inputs)
            if outcome.value is None:
                return "error", f"case '{case.name}': {outcome.reason}"
            found = max(found, _judged(case, outcome.value), key=lambda f: _RANK[f[0]])
        return found


_RANK = {"pass": 0, "imprecise": 1, "fail": 2}


def _judged(case: KnownAnswer, outputs: dict[str, Any]) -> tuple[str, str | None]:
    status, message = case.judge(outputs)
    return status, None if message is None else f"case '{case.name}': {message}"


def _too_old(entry: VariantEntry, request: TargetRequest) -> str | None:
    """Whether the runtime is older than the variant needs, by the row of that runtime."""
    availability = request.target.availability()
    if availability.version is None:
        return None
    for place in entry.runs_on:
        if place.runtime == availability.runtime and version_numbers(
            availability.version
        ) < version_numbers(place.minimum):
            return (
                f"{place.runtime} {availability.version} is older than {place.minimum}, "
                f"which {entry.target} needs"
            )
    return None


def _precision(entry: VariantEntry, request: TargetRequest) -> str | None:
    told = entry.options.get(request.target.name, {}).get("INFERENCE_PRECISION_HINT")
    return told if told in request.target.precisions else None


def _row(
    entry: VariantEntry, request: TargetRequest, status: str, reason: str | None
) -> dict[str, Any]:
    return {"variant": entry.target, "target": request.name, "status": status, "reason": reason}
