"""Where a variant that failed departs from the original: the site and the stage in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mha_export.frontends import SourceOptions, open_source
from mha_export.jobs._subject import Candidate, Subject
from mha_export.measure.compare import Side, first_parting
from mha_export.measure.reference_run import Expected
from mha_export.recognise import recognise
from mha_export.report.records import ParityRecord
from mha_export.targets import evaluator_of


def located(
    parity: ParityRecord, subject: Subject, candidate: Candidate, expected: Sequence[Expected]
) -> ParityRecord:
    """``parity`` of a ``fail``, with the first difference on its first failing case."""
    failing = {case.name for case in parity.by_case if case.status == "fail"}
    case = next(item.case for item in expected if item.case.name in failing)
    evaluator = evaluator_of(candidate.request.target, candidate.request.precision)
    original = Side(
        name=subject.name,
        sha256=subject.sha256,
        model=subject.original,
        recognition=recognise(subject.original),
        evaluator=evaluator,
    )
    variant = original
    assert candidate.file is not None
    if candidate.file != subject.original_file:
        loaded = open_source(candidate.file, SourceOptions())
        variant = dataclasses.replace(
            original,
            sha256=loaded.sha256,
            model=loaded.model,
            recognition=recognise(loaded.model),
        )
    first, _ = first_parting(original, variant, variant, case, "another node or the runtime is")
    return dataclasses.replace(parity, first_difference=first)


def in_words(parity: ParityRecord) -> str:
    """One clause: where it parts from the original, and why."""
    first = parity.first_difference
    assert first is not None
    if not first.site:
        return "every attention agrees, the fault lies outside of them"
    return f"it parts from the original at {first.site}, {first.stage}: {first.message}"
