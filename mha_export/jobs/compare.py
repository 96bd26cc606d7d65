"""Are two models, or one model on two targets, equal, and where do they first part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_export.errors import InputError, TargetUnavailableError
from mha_export.evaluator import Evaluator
from mha_export.frontends import LoadedModel, SourceOptions, open_source
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._reach import LONGEST, every_row_has_keys, unseen, widest
from mha_export.jobs._result import FAILED, OK, JobResult
from mha_export.jobs._settings import RunSettings, parse_workloads
from mha_export.measure.compare import Side
from mha_export.measure.compare import compare_models as compare_sides
from mha_export.measure.model_inputs import ModelCase, model_cases
from mha_export.measure.reference_run import ModelReference
from mha_export.recognise import recognise
from mha_export.report.records import validate
from mha_export.targets import TargetRequest, Unavailable, evaluator_of, parse_targets


def compare_models(
    model_a: str | Path,
    model_b: str | Path | None = None,
    *,
    targets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Run both sides on adversarial inputs and judge them against the first in float64.

    ``A B`` runs both models on one target (``cpu`` unless another is named); ``A -t X -t Y`` runs
    one model on two targets; ``A B -t X -t Y`` the first on X and the second on Y.

    Args:
        model_a: what is taken as right.
        model_b: what is compared with it; None: the same model.
        targets: as ``-t``, at most two.
        options: ``dims``, ``shapes``, ``inputs`` and ``seed``, as of ``run``.
        progress: told of every step.

    Returns:
        A document valid under the ``compare`` schema; ``exit_code`` 1 when they differ.

    Errors:
        InputError: a model that cannot be read, different interfaces, nothing to compare.
        TargetUnavailableError: a target that was asked for cannot run here.
    """
    requests = _two(targets, same_model=model_b is None)
    settings = _settings(options or {})
    progress("reading the models")
    loaded_a = open_source(model_a, SourceOptions())
    loaded_b = loaded_a if model_b is None else open_source(model_b, SourceOptions())
    _require_runnable(requests)
    progress("recognising attention")
    engines = _engines(requests)
    side_a = _side(loaded_a, engines[0])
    side_b = (
        _side(loaded_b, engines[1])
        if model_b is not None
        else dataclasses.replace(side_a, evaluator=engines[1])
    )
    reach = max(widest(side.recognition) for side in (side_a, side_b))
    many = all(every_row_has_keys(side.recognition) for side in (side_a, side_b))
    cases = _cases(loaded_a, settings, reach=min(reach, LONGEST), many_queries=many)
    progress(f"comparing on {len(cases)} inputs")
    record = compare_sides(
        side_a, side_b, cases, seed=settings.seed, precision=requests[1].precision
    )
    record = dataclasses.replace(record, notes=(*record.notes, *unseen(reach, cases)))
    document = record.to_json()
    validate("compare", document)
    return JobResult(
        document=document, exit_code=OK if record.equal else FAILED, notices=tuple(record.notes)
    )


def _two(targets: Sequence[str], *, same_model: bool) -> tuple[TargetRequest, TargetRequest]:
    requests = parse_targets(targets or ["cpu"])
    if len(requests) > 2:
        raise InputError(
            f"compare takes at most two targets, got {len(requests)}", fix="name one or two with -t"
        )
    if same_model and len(requests) < 2:
        raise InputError(
            "there is nothing to compare: one model and one target",
            fix="give a second model, or two targets: compare A.onnx -t cpu -t openvino",
        )
    return requests[0], requests[-1]


def _require_runnable(requests: Sequence[TargetRequest]) -> None:
    for request in requests:
        state = request.target.availability().run
        if isinstance(state, Unavailable):
            raise TargetUnavailableError(
                f"target {request.name} cannot run here: {state.reason}", fix=state.fix
            )


def _settings(options: Mapping[str, Any]) -> RunSettings:
    workloads = parse_workloads(options.get("dims", ()), options.get("shapes", ()))
    if len(workloads) > 1:
        raise InputError("compare takes one size for each --dim", fix="run it once for each size")
    return RunSettings(
        workloads=workloads, inputs=options.get("inputs"), seed=options.get("seed", 0)
    )


def _cases(
    loaded: LoadedModel, settings: RunSettings, *, reach: int, many_queries: bool
) -> tuple[ModelCase, ...]:
    if settings.inputs is not None:
        return (ModelReference(loaded.model).own_case(settings.inputs),)
    (workload,) = settings.workloads
    return model_cases(
        loaded.model,
        seed=settings.seed,
        dims=workload.dims,
        shapes=workload.shapes,
        reach=reach,
        many_queries=many_queries,
    )


def _engines(requests: tuple[TargetRequest, TargetRequest]) -> tuple[Evaluator, Evaluator]:
    first = evaluator_of(requests[0].target, requests[0].precision)
    if requests[0] == requests[1]:
        return first, first
    return first, evaluator_of(requests[1].target, requests[1].precision)


def _side(loaded: LoadedModel, evaluator: Evaluator) -> Side:
    return Side(
        name=loaded.name,
        sha256=loaded.sha256,
        model=loaded.model,
        recognition=recognise(loaded.model),
        evaluator=evaluator,
    )
