"""What to keep of a failed parity check: the smallest input that shows it, and its replay."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from mha_export.measure.model_inputs import ModelCase
from mha_export.measure.parity import Run, judge_case, save_case
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.measure.shrink import shrink
from mha_export.report.records import CaseRecord, ParityRecord


def keep_failures(
    parity: ParityRecord,
    *,
    model: ir.Model,
    reference: ModelReference,
    expected: Sequence[Expected],
    run: Run,
    folder: Path | str,
    stem: str,
    command: Callable[[Path], str],
) -> ParityRecord:
    """``parity`` with a replay for its worst failing case, as ``<stem>-<case>.npz``.

    A wrong answer is cut down first. What does not run is kept as it is: each try of a crash or a
    hang may cost the whole time limit.

    Args:
        parity: as :func:`mha_export.measure.parity.check_parity` gave it.
        model: the original, whose inputs say which axes go together.
        reference: what ``parity`` was judged by.
        expected: the cases it was judged on.
        run: the candidate.
        folder: where the file goes; made when there is something to keep.
        stem: first part of the file name.
        command: the command line that runs a kept file again.
    """
    failing = [case for case in parity.by_case if case.status in ("fail", "error")]
    by_name = {item.case.name: item.case for item in expected if item.problem is None}
    failing = [case for case in failing if case.name in by_name]
    if not failing:
        return parity
    worst = max(failing, key=lambda case: (case.status == "fail", case.factor or 0.0))

    def fails(case: ModelCase) -> bool:
        wanted = reference.expected(case)
        return wanted.problem is None and judge_case(wanted, run).status == "fail"

    case = by_name[worst.name]
    if worst.status == "fail":
        case = shrink(model, case, fails)
    path = save_case(Path(folder) / f"{stem}-{_slug(worst.name)}.npz", case.inputs)
    kept = dataclasses.replace(worst, inputs_file=str(path), replay=command(path))
    return dataclasses.replace(
        parity, by_case=tuple(kept if case is worst else case for case in parity.by_case)
    )


def replay_of(parity: ParityRecord | None) -> str | None:
    """The command of the first case that has one."""
    cases: tuple[CaseRecord, ...] = () if parity is None else parity.by_case
    return next((case.replay for case in cases if case.replay), None)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
