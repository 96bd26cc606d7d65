"""What ``export.json`` says of the variants, and what a person should read of it."""

from __future__ import annotations

from collections.abc import Sequence

from mha_export.jobs._destinations import Destination
from mha_export.jobs._plan import ANY_SITE, Plan
from mha_export.jobs.inspect import count_nodes
from mha_export.report.records import ExportRecord, ProofRecord, SiteOutcomeRecord, VariantRecord
from mha_export.rewrite import Rewritten, SiteOutcome
from mha_export.spec import DType
from mha_export.targets import Available, capabilities_for


def variant_record(
    destination: Destination, rewritten: Rewritten, dtype: DType, notes: Sequence[str]
) -> VariantRecord:
    """One file: what became of each site, and what is to be said of it."""
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


def _outcome(outcome: SiteOutcome) -> SiteOutcomeRecord:
    return SiteOutcomeRecord(
        form=outcome.form,
        params={} if outcome.params is None else outcome.params.to_json(),
        status=outcome.status,
        reason=outcome.reason,
        proof=None if outcome.proof is None else ProofRecord.from_json(outcome.proof.to_json()),
    )


def decided_by(destinations: Sequence[Destination]) -> list[str]:
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


def notices_of(record: ExportRecord) -> list[str]:
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


def unused_choices(plan: Plan, record: ExportRecord) -> list[str]:
    """What of a plan came to nothing, a typing error most likely: sites that the model does not
    have, a line for each target; and a plan that is of other targets than these.
    """
    targets = dict.fromkeys(variant.target for variant in record.variants)
    planned = {name.partition(".")[0] for name in plan.choices}
    if planned and not planned & set(targets):
        of, others = ", ".join(sorted(planned)), ", ".join(targets)
        return [f"--plan: it is of {of}, and says nothing of {others}"]
    known = {ANY_SITE, *(site.id for site in record.sites)}
    return [
        f"--plan: {variant.target}: the model has no site {', '.join(unknown)}"
        for variant in record.variants
        if (unknown := sorted(set(plan.choices.get(variant.target, {})) - known))
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} .. {names[-1]} ({len(names)})"
