"""From a source to one proven graph per target, in one folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams, form_named
from mha_export.frontends import LoadedModel, open_source
from mha_export.jobs._caching import Caching
from mha_export.jobs._defaults import faster_options, opset_for, preferred_forms
from mha_export.jobs._loading import LoadCheck, load_check
from mha_export.jobs._phases import (
    PREFERRED,
    Graph,
    check_split,
    forms_for,
    phases,
    plan_names,
    stem,
)
from mha_export.jobs._plan import ANY_SITE, Plan, read_plan
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import FAILED, OK, JobResult
from mha_export.jobs._settings import ExportSettings, SourceSettings
from mha_export.jobs._store import (
    MANIFEST,
    ORIGINAL,
    PORTABLE,
    check_folder,
    file_sha256,
    staged_folder,
    write_models,
)
from mha_export.jobs.inspect import count_nodes, model_record, site_records
from mha_export.measure.model_inputs import workload_sizes
from mha_export.recognise import NotAttention, Recognition, Site, recognise
from mha_export.report.records import (
    ExportRecord,
    ProofRecord,
    SiteOutcomeRecord,
    VariantRecord,
    validate,
    write_json,
)
from mha_export.rewrite import (
    Choice,
    Keep,
    RewriteSettings,
    Rewritten,
    SiteOutcome,
    choose_form,
    rewrite,
    with_contrib_gelus,
    with_dtype,
    with_opset,
    with_own_sines,
    with_quantised_weights,
)
from mha_export.spec import AttentionSpec, DType
from mha_export.targets import (
    Available,
    Target,
    TargetRequest,
    capabilities_for,
    evaluator_of,
    parse_target,
    parse_targets,
    target_named,
)


@dataclass(frozen=True, kw_only=True)
class _Destination:
    """One variant to make: its name, the forms to try and the opset ceiling.

    One file serves every precision that was asked of its target.
    """

    name: str
    forms: tuple[str, ...]
    max_opset: int
    target: Target | None
    precisions: tuple[str | None, ...] = (None,)
    graph: Graph = "main"

    @property
    def stem(self) -> str:
        return stem(self.name, self.graph)

    def loaders(self) -> list[tuple[Target, str | None]]:
        """The targets here, with precisions, that must load the file."""
        wanted = [self.target] if self.target else [target_named(n) for n in ("cpu", "reference")]
        return [
            (target, precision)
            for target in wanted
            for precision in self.precisions
            if not target.builds_slowly and isinstance(target.availability().run, Available)
        ]

    def veto(self, form: str, spec: AttentionSpec) -> str | None:
        """Why the target cannot be given ``form``: what it was seen to do, here or elsewhere."""
        if self.target is None:
            return None
        refusals = (
            capabilities_for(self.target, precision).refusal(form, spec)
            for precision in self.precisions
        )
        return next((refusal for refusal in refusals if refusal is not None), None)


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
            dimension that the model does not have.
    """
    source_settings = source_settings or SourceSettings()
    settings = settings or ExportSettings()
    destinations = _destinations(targets, settings)
    check_folder(Path(out))
    plan = read_plan(settings.plan)
    progress("reading the model")
    loaded = open_source(source, source_settings.for_frontend())
    model = loaded.model
    if source_settings.dtype not in (None, DType.FP32):
        progress(f"casting to {source_settings.dtype}")
        model = with_dtype(model, source_settings.dtype)
    cast = model
    if settings.weights != "keep":
        progress(f"quantising weights to {settings.weights}")
        model = with_quantised_weights(model, settings.weights)
    exporter = _Exporter(model, source_settings, settings, plan, progress)
    # Cast and quantised, not rewritten: variants are judged on the same inputs, of the same types.
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
            variants.append(_variant_record(destination, rewritten, _float_dtype(model), notes))
    refused = any(variant.refusal is not None for variant in variants)
    record = ExportRecord(
        model=model_record(loaded),
        sites=site_records(recognition),
        variants=tuple(variants),
        cache=caching.record,
        notes=(
            *loaded.notes,
            *_cast_notes(loaded.model, cast),
            *_weight_notes(settings.weights),
            *caching.notes,
            *_decided_by(destinations),
        ),
    )
    notices = [*record.notes, *_notices(record), *_unused(plan, record)]
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


class _Exporter:
    """Makes the variants of one model; recognises once per opset."""

    def __init__(
        self,
        model: ir.Model,
        source: SourceSettings,
        settings: ExportSettings,
        plan: Plan,
        progress: Progress,
    ) -> None:
        self._model = model
        self._source = source
        self._settings = settings
        self._plan = plan
        self._progress = progress
        self._recognitions: dict[int, Recognition] = {}
        self._notes: dict[str, str] = {}
        self.caching = Caching(settings.cache, seed=settings.seed, progress=progress)

    @property
    def _own_opset(self) -> int:
        return int(self._model.graph.opset_imports.get("", 1))

    def recognition_at(self, opset: int | None) -> Recognition:
        """The model at ``opset`` (None: its own), recognised."""
        wanted = self._own_opset if opset is None else opset
        if wanted not in self._recognitions:
            self._progress(f"recognising attention (opset {wanted})")
            model = self._model
            if wanted != self._own_opset:
                model = with_opset(model, wanted)
            self._recognitions[wanted] = self.caching.applied(
                recognise(model), _evaluators_for(None)[0]
            )
        return self._recognitions[wanted]

    def variant(self, destination: _Destination, check: LoadCheck) -> Rewritten:
        """The model rewritten; at its own opset where the target does not load it at a later one.

        A runtime may have a kernel for an operator of the model at the one and not at the other.
        """
        own, opset = self._own_opset, self._opset_for(destination)
        done = self._rewritten(destination, check, opset)
        if done.refusal is None or opset == own or self._source.opset is not None:
            return done
        lower = self._rewritten(destination, check, own)
        if lower.refusal is not None:
            return done
        self._notes[destination.stem] = f"left at opset {own}: at {opset}, {done.refusal}"
        return lower

    def notes(self, destination: _Destination) -> list[str]:
        """What is to be said of a variant that was made."""
        note = self._notes.get(destination.stem)
        return [] if note is None else [note]

    def _rewritten(self, destination: _Destination, check: LoadCheck, opset: int) -> Rewritten:
        recognition = self.recognition_at(opset)
        evaluator, *stand_ins = _evaluators_for(destination.target)
        self._progress(f"rewriting for {destination.stem}, proofs on {evaluator.name}")
        done = rewrite(
            recognition,
            lambda site: self._choose(destination, site, opset),
            evaluator=evaluator,
            stand_ins=stand_ins,
            loads=lambda model: check.refusal(model, destination.loaders()),
            settings=RewriteSettings(seed=self._settings.seed),
        )
        model, target = done.model, destination.target
        if target is not None and target.coarse_sines:
            model, _ = with_own_sines(model)
        if target is not None and target.contrib_gelu:
            model = with_contrib_gelus(model)
        return replace(done, model=model)

    def _opset_for(self, destination: _Destination) -> int:
        if self._source.opset is not None:
            return self._source.opset
        # The target's own first form decides, whatever one of two graphs would rather have.
        forms = [name for name in destination.forms if name not in PREFERRED[destination.graph]]
        return opset_for(
            destination.name,
            forms or destination.forms,
            [site.spec for site in self.recognition_at(None).sites],
            own=self._own_opset,
            most=destination.max_opset,
        )

    def _choose(self, destination: _Destination, site: Site, opset: int) -> Choice | Keep:
        rows = plan_names(destination.name, destination.graph)
        planned = next(filter(None, (self._plan.of(row, site.id) for row in rows)), None)
        own = preferred_forms(destination.name, site.spec, destination.forms)
        told = {} if destination.target is None else destination.target.form_options
        free = bool(own) and planned is None and self._settings.form is None
        faster = faster_options(destination.name, own[0], site.spec) if free else None
        if faster is not None:
            params = FormParams(opset=opset, options=faster)
            choice = choose_form(
                site, preferred=(), params=params, told=told, only=own[0], veto=destination.veto
            )
            if isinstance(choice, Choice):
                return choice
        return choose_form(
            site,
            preferred=own if planned is None else (planned.form,),
            params=FormParams(opset=opset, options={} if planned is None else planned.options),
            told=told,
            only=self._settings.form if planned is None else planned.form,
            veto=destination.veto,
        )


def _destinations(names: Sequence[str], settings: ExportSettings) -> list[_Destination]:
    form = settings.form
    if form is not None:
        form_named(form)
    wanted: dict[str, _Destination] = {}
    for name in names or ("all",):
        for destination in _named(name, form):
            earlier = wanted.get(destination.name)
            if earlier is not None:
                precisions = dict.fromkeys((*earlier.precisions, *destination.precisions))
                destination = replace(earlier, precisions=tuple(precisions))
            wanted[destination.name] = destination
    return [
        replace(each, graph=graph, forms=forms_for(graph, each.forms, only=form))
        for each in wanted.values()
        for graph in phases(settings.split)
    ]


def _named(name: str, form: str | None) -> list[_Destination]:
    if name == PORTABLE:
        forms = (PORTABLE,) if form is None else (form,)
        return [_Destination(name=PORTABLE, forms=forms, max_opset=26, target=None)]
    if name == "all":
        return [_of_target(request, form) for request in parse_targets(["all"])]
    return [_of_target(parse_target(name, besides=("all", PORTABLE)), form)]


def _of_target(request: TargetRequest, form: str | None) -> _Destination:
    target = request.target
    return _Destination(
        name=target.name,
        forms=target.default_forms if form is None else (form,),
        max_opset=target.max_opset,
        target=target,
        precisions=(request.precision,),
    )


def _evaluators_for(target: Target | None) -> list[Evaluator]:
    """The target itself where it runs here, and what stands in for it: ONNX Runtime CPU, onnx."""
    candidates = [target, target_named("cpu"), target_named("reference")]
    names = dict.fromkeys(
        candidate.name
        for candidate in candidates
        if candidate is not None and isinstance(candidate.availability().run, Available)
    )
    if not names:
        raise InputError(
            "no engine here can prove a rewrite", fix="pip install 'mha-export[cpu]', or onnx"
        )
    return [evaluator_of(name) for name in names]


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


def _variant_record(
    destination: _Destination, rewritten: Rewritten, dtype: DType, notes: Sequence[str]
) -> VariantRecord:
    return VariantRecord(
        target=destination.name,
        graph=destination.graph,
        file=f"{destination.stem}.onnx",
        dtype=dtype.value,
        opset=int(rewritten.model.graph.opset_imports.get("", 1)),
        sites={site_id: _outcome(outcome) for site_id, outcome in rewritten.outcomes.items()},
        nodes=count_nodes(rewritten.model),
        notes=(
            *(
                f"{name} = {length} is written into the graph: its length is fixed, as in the "
                "original"
                for name, length in rewritten.fixed_lengths.items()
            ),
            *notes,
        ),
        refusal=rewritten.refusal,
    )


def _float_dtype(model: ir.Model) -> DType:
    """The coarsest floating-point type among inputs, outputs and weights."""
    graph = model.graph
    values = (*graph.inputs, *graph.outputs, *graph.initializers.values())
    found = {value.dtype for value in values}
    if ir.DataType.BFLOAT16 in found:
        return DType.BF16
    return DType.FP16 if ir.DataType.FLOAT16 in found else DType.FP32


def _outcome(outcome: SiteOutcome) -> SiteOutcomeRecord:
    return SiteOutcomeRecord(
        form=outcome.form,
        params={} if outcome.params is None else outcome.params.to_json(),
        status=outcome.status,
        reason=outcome.reason,
        proof=None if outcome.proof is None else ProofRecord.from_json(outcome.proof.to_json()),
    )


def _cast_notes(given: ir.Model, model: ir.Model) -> list[str]:
    if model is given:
        return []
    dtype = _float_dtype(model).value
    return [f"original.onnx is the model cast to {dtype}: what the rewriting is judged against"]


def _weight_notes(weights: str) -> list[str]:
    if weights == "keep":
        return []
    return [f"original.onnx has weights of {weights}: what the rewriting is judged against"]


def _decided_by(destinations: Sequence[_Destination]) -> list[str]:
    """What the choice of forms rests on, for each target that is not here."""
    notes = []
    for destination in destinations:
        target = destination.target
        if target is None or isinstance(target.availability().build, Available):
            continue
        known = capabilities_for(target, destination.precisions[0])
        words = {
            "none": "nothing is known of what it can do",
            "shipped": f"decided by capabilities measured elsewhere on {known.measured}",
            "given": "decided by the capability file that was given",
            "probed here": "decided by capabilities that were probed here",
        }[known.source]
        of = f" ({known.runtime} {known.version}, {known.device})" if known.rows else ""
        notes.append(f"{destination.name} is not on this machine: {words}{of}")
    return notes


def _notices(record: ExportRecord) -> list[str]:
    """What a person should read: each rejected softmax, each undone or refused rewrite."""
    lines = [
        f"{site.id}: rejected: {site.reason.code}: {site.reason.message}"
        for site in record.sites
        if site.verdict == "rejected" and site.reason is not None
    ]
    for variant in record.variants:
        lines += [f"{variant.target}: {note}" for note in variant.notes]
        reasons: dict[tuple[str, str], list[str]] = {}
        for site_id, outcome in variant.sites.items():
            if outcome.status in ("proof_failed", "kept"):
                reasons.setdefault((outcome.status, outcome.reason or ""), []).append(site_id)
        if variant.refusal is not None:
            lines.append(f"{variant.file} does not load, nor does the original: {variant.refusal}")
        for (status, reason), sites in reasons.items():
            lines.append(f"{variant.target}: {_some(sites)}: {status}: {reason}")
    return lines


def _unused(plan: Plan, record: ExportRecord) -> list[str]:
    """Sites that the plan names and the model does not have: a typing error, most likely."""
    known = {ANY_SITE, *(site.id for site in record.sites)}
    return [
        f"--plan: {variant.target}: the model has no site {', '.join(unknown)}"
        for variant in record.variants
        if (unknown := sorted(set(plan.choices.get(variant.target, {})) - known))
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} .. {names[-1]} ({len(names)})"


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
