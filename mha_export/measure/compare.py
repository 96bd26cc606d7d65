"""Are two models (or one model on two engines) equal, and where do they first part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.measure.bisect import first_difference
from mha_export.measure.model_inputs import ModelCase
from mha_export.measure.parity import check_parity, reason_of, status_of
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.measure.site_check import first_failing_site
from mha_export.recognise import Recognition
from mha_export.report.records import (
    ComparisonRecord,
    DifferenceRecord,
    ParityRecord,
    SideRecord,
    SitePairRecord,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One of the two: the model as given, recognised, and what runs it."""

    name: str
    sha256: str
    model: ir.Model
    recognition: Recognition
    evaluator: Evaluator

    def record(self) -> SideRecord:
        return SideRecord(model=self.name, sha256=self.sha256, engine=self.evaluator.name)


def compare_models(
    a: Side, b: Side, cases: Sequence[ModelCase], *, seed: int = 0, precision: str | None = None
) -> ComparisonRecord:
    """Run both on every case and judge each against the first in float64.

    ``equal`` means: ``b`` is right (or right but coarse) wherever ``a`` is a model that runs. When
    one engine gets its own model wrong, the record names that side.

    Args:
        a: what is taken as right.
        b: what is compared with it.
        cases: inputs, e.g. of :func:`mha_export.measure.model_inputs.model_cases`.
        seed: recorded.
        precision: what ``b`` computes in, where it was told to.

    Errors:
        InputError: the models do not have the same inputs, or no case can be judged.
    """
    _require_same_inputs(a.model, b.model)
    reference = ModelReference(a.model, precision=precision)
    expected = reference.expected_battery(cases)
    parity = check_parity(reference, expected, lambda inputs: b.evaluator.run(b.model, inputs))
    own = None
    if a.evaluator is not b.evaluator:
        own = check_parity(reference, expected, lambda inputs: a.evaluator.run(a.model, inputs))
    status = status_of(parity)
    equal = status in ("pass", "imprecise") and (
        own is None or status_of(own) in ("pass", "imprecise")
    )
    record = ComparisonRecord(
        a=a.record(),
        b=b.record(),
        equal=equal,
        status=status if own is None or equal else max(status, status_of(own), key=_severity),
        outputs=parity.by_case,
        against=reference.against,
        ensemble=reference.members,
        seed=seed,
        notes=_notes(a, own, expected),
    )
    if equal:
        return record
    return _with_difference(record, a, b, expected, parity, own)


def _with_difference(
    record: ComparisonRecord,
    a: Side,
    b: Side,
    expected: Sequence[Expected],
    parity: ParityRecord,
    own: ParityRecord | None,
) -> ComparisonRecord:
    guilty, wrong = (b, parity) if status_of(parity) in ("fail", "error") else (a, own or parity)
    bad = {case.name for case in wrong.by_case if case.status in ("fail", "error")}
    case = next(item.case for item in expected if item.case.name in bad)
    first, pairs = first_parting(a, b, guilty, case, reason_of(wrong) or "the outputs differ")
    return dataclasses.replace(record, first_difference=first, sites=pairs)


def first_parting(
    a: Side, b: Side, guilty: Side, case: ModelCase, reason: str
) -> tuple[DifferenceRecord, tuple[SitePairRecord, ...]]:
    """The first site and stage where ``b`` departs from ``a`` on a case that failed.

    The graphs are asked first. Where they agree, each attention of ``guilty`` is run by itself on
    its engine; where these are right too, the stage is ``outside``, with ``reason``.
    """
    first: DifferenceRecord | None = None
    pairs: tuple[SitePairRecord, ...] = ()
    if a.model is not b.model:
        first, pairs = first_difference(a.recognition, b.recognition, case)
    if first is None:
        first = first_failing_site(guilty.recognition, guilty.evaluator, case)
    if first is None:
        first = DifferenceRecord(
            site="",
            stage="outside",
            message=f"every attention agrees; {reason}",
            case=case.name,
        )
    return first, pairs


def _severity(status: str) -> int:
    return ("pass", "imprecise", "error", "fail").index(status)


def _notes(a: Side, own: ParityRecord | None, expected: Sequence[Expected]) -> tuple[str, ...]:
    notes = [f"not judged on '{e.case.name}': {e.problem}" for e in expected if e.problem]
    if own is not None and status_of(own) != "pass":
        notes.append(f"{a.evaluator.name} itself: {reason_of(own)}")
    return tuple(notes)


def _require_same_inputs(a: ir.Model, b: ir.Model) -> None:
    ours, theirs = _inputs(a), _inputs(b)
    if ours.keys() != theirs.keys():
        raise InputError(
            f"the models have different inputs: {sorted(ours)} and {sorted(theirs)}",
            fix="compare models of the same interface; export with --cache keep",
        )
    for name, dtype in ours.items():
        if dtype != theirs[name]:
            raise InputError(
                f"input '{name}' is {dtype} in one model and {theirs[name]} in the other"
            )


def _inputs(model: ir.Model) -> Mapping[str, str]:
    defaults = model.graph.initializers
    return {
        v.name or "": str(v.dtype).lower() for v in model.graph.inputs if v.name not in defaults
    }
