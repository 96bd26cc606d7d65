"""From a source to one proven graph per target, in one folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends import LoadedModel, open_source
from mha_export.jobs._casting import cast_model
from mha_export.jobs._destinations import destinations_of
from mha_export.jobs._export_record import (
    decided_by,
    notices_of,
    unused_choices,
    variant_record,
)
from mha_export.jobs._exporter import Exporter
from mha_export.jobs._loading import load_check
from mha_export.jobs._phases import check_split
from mha_export.jobs._plan import read_plan
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import FAILED, OK, JobResult
from mha_export.jobs._settings import ExportSettings, SourceSettings
from mha_export.jobs._store import (
    MANIFEST,
    ORIGINAL,
    check_folder,
    check_folder_keeps,
    file_sha256,
    files_of_source,
    staged_folder,
    write_models,
)
from mha_export.jobs.inspect import model_record, site_records
from mha_export.measure.model_inputs import workload_sizes
from mha_export.measure.reference_run import model_dtype
from mha_export.recognise import NotAttention, Recognition
from mha_export.report.records import ExportRecord, VariantRecord, validate, write_json
from mha_export.rewrite import with_quantised_weights


def export_model(
    source: Any,
    *,
    targets: Sequence[str],
    out: str | Path,
    source_settings: SourceSettings | None = None,
    settings: ExportSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Recognise, rewrite and prove ``source`` for each target, and write the folder ``out``.

    ``out`` gets ``<target>.onnx`` files, ``original.onnx`` (cast and quantised, where asked), one
    ``weights.bin`` and ``export.json``; it is complete or untouched.

    A target that is here is asked whether it loads what was made for it; the sites at fault are
    undone.

    Returns:
        ``export.json`` as a document. ``exit_code`` 1: a proof failed under ``strict``, or an
        attention was not rewritten under ``require_fused``; then nothing is written. Or a target
        does not load the model, rewritten or not; then ``refusal`` of its variant says why.

    Errors:
        InputError: bad source, target, form or plan; a model without attention; a size of a
            dimension that the model does not have; an ``out`` where the export would replace
            files of the source.
    """
    source_settings = source_settings or SourceSettings()
    settings = settings or ExportSettings()
    destinations = destinations_of(targets, settings)
    check_folder(Path(out))
    plan = read_plan(settings.plan)
    progress("reading the model")
    loaded = open_source(source, source_settings.for_frontend())
    stems = [ORIGINAL, *(destination.stem for destination in destinations)]
    check_folder_keeps(Path(out), stems, files_of_source(source, loaded.model))
    model, changes = _as_asked(loaded.model, source_settings, settings, progress)
    exporter = Exporter(model, source_settings, settings, plan, progress)
    models: dict[str, ir.Model] = {}
    variants: list[VariantRecord] = []
    recognition = exporter.recognition_at(None)
    _require_attention(recognition, loaded, source)
    _check_sizes(recognition.model, loaded, source_settings)
    caching = exporter.caching
    check_split(settings.split, caching.record)
    models[ORIGINAL] = recognition.model if caching.changes_model else model
    with load_check() as check:
        for destination in destinations:
            rewritten = exporter.variant(destination, check)
            models[destination.stem] = caching.describe(rewritten.model)
            notes = (*check.notes(destination.loaders()), *exporter.notes(destination))
            variants.append(variant_record(destination, rewritten, model_dtype(model), notes))
    refused = any(variant.refusal is not None for variant in variants)
    record = ExportRecord(
        model=model_record(loaded),
        sites=site_records(recognition),
        variants=tuple(variants),
        cache=caching.record,
        notes=(
            *loaded.notes,
            *changes,
            *caching.notes,
            *decided_by(destinations),
        ),
    )
    notices = [*record.notes, *notices_of(record), *unused_choices(plan, record)]
    exit_code = _verdict(record, recognition, settings, notices)
    if exit_code == OK:
        progress("writing")
        record = _write(Path(out), models, record, standalone=settings.standalone)
    document = record.to_json()
    return JobResult(
        document=document,
        exit_code=exit_code or (FAILED if refused else OK),
        notices=tuple(notices),
        files=() if exit_code else tuple(Path(out) / v.file for v in record.variants),
    )


def _as_asked(
    model: ir.Model, source: SourceSettings, settings: ExportSettings, progress: Progress
) -> tuple[ir.Model, list[str]]:
    """The model cast and quantised, and each change in words.

    Not rewritten yet: variants are judged against it, on the same inputs, of the same types.
    """
    changes = []
    cast = cast_model(model, source.dtype, progress)
    if cast is not model:
        model = cast
        changes.append(f"is the model cast to {source.dtype}")
    if settings.weights != "keep":
        progress(f"quantising weights to {settings.weights}")
        model = with_quantised_weights(model, settings.weights)
        changes.append(f"has weights of {settings.weights}")
    return model, [
        f"original.onnx {each}: what the rewriting is judged against" for each in changes
    ]


def _require_attention(recognition: Recognition, loaded: LoadedModel, source: Any) -> None:
    if any(not isinstance(verdict, NotAttention) for verdict in recognition.verdicts):
        return
    seen = len(recognition.verdicts)
    where = shlex.quote(str(source)) if isinstance(source, (str, Path)) else "MODEL"
    found = f"its {seen} softmax nodes are something else" if seen else "it has no softmax"
    raise InputError(
        f"{loaded.name} has no attention: {found}",
        fix=f"mha-export inspect {where} lists every softmax with its verdict",
    )


def _check_sizes(model: ir.Model, loaded: LoadedModel, source: SourceSettings) -> None:
    """Refuse sizes of dimensions and inputs that the model does not have: a typing error."""
    sampled = loaded.sample_inputs or {}
    for workload in source.workloads:
        shapes = {name: shape for name, shape in workload.shapes.items() if name not in sampled}
        workload_sizes(model, dims=workload.dims, shapes=shapes)


def _verdict(
    record: ExportRecord,
    recognition: Recognition,
    settings: ExportSettings,
    notices: list[str],
) -> int:
    outcomes = [outcome for variant in record.variants for outcome in variant.sites.values()]
    failed = sum(outcome.status == "proof_failed" for outcome in outcomes)
    if settings.strict and failed:
        notices.append(f"--strict: {failed} proofs failed; nothing was written")
        return FAILED
    missing = sum(outcome.status in ("kept", "proof_failed") for outcome in outcomes)
    missing += len(recognition.rejections)
    if settings.require_fused and missing:
        notices.append(f"--require-fused: {missing} attentions not rewritten; nothing was written")
        return FAILED
    return OK


def _write(
    out: Path, models: Mapping[str, ir.Model], record: ExportRecord, *, standalone: bool
) -> ExportRecord:
    with staged_folder(out) as stage:
        write_models(stage, models, standalone=standalone)
        hashed = tuple(
            VariantRecord.from_json(
                {**variant.to_json(), "sha256": file_sha256(stage / variant.file)}
            )
            for variant in record.variants
        )
        record = ExportRecord.from_json(
            {**record.to_json(), "variants": [v.to_json() for v in hashed]}
        )
        validate("export", record.to_json())
        write_json(stage / MANIFEST, record)
    return record
