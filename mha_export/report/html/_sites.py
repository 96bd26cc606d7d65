"""Sites of a model, those alike put together, each to be opened down to its nodes and its proof."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mha_export.report._figures import figure, plural
from mha_export.report._merge import Report
from mha_export.report.html._heat import Heat, proof_heat
from mha_export.report.records import ExportRecord, SiteOutcomeRecord, SiteRecord


@dataclass(frozen=True, kw_only=True)
class OutcomeView:
    """What became of a group of sites for one target."""

    target: str
    form: str
    status: str
    reason: str
    params: str
    proof: str
    engine: str


@dataclass(frozen=True, kw_only=True)
class SiteView:
    """One site: its nodes, where they ran, and its own proof by target."""

    id: str
    nodes: tuple[str, ...]
    proofs: tuple[str, ...]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """Sites of one model with the same spec and the same fate."""

    title: str
    count: int
    verdict: str
    summary: str
    spec: tuple[tuple[str, str], ...]
    reason: str
    reason_code: str
    reason_nodes: tuple[str, ...]
    outcomes: tuple[OutcomeView, ...]
    heat: Heat | None
    sites: tuple[SiteView, ...]


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """One exported model."""

    name: str
    sha256: str
    facts: str
    tally: str
    targets: tuple[str, ...]
    groups: tuple[GroupView, ...]


def models(report: Report) -> tuple[ModelView, ...]:
    """Every export of the report, by name."""
    exports = sorted(
        report.exports.values(), key=lambda export: (export.model.name, export.model.sha256)
    )
    return tuple(_model(export, report) for export in exports)


def _model(export: ExportRecord, report: Report) -> ModelView:
    model = export.model
    opsets = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in sorted(model.opsets.items()))
    facts = [plural(model.nodes, "node"), f"opset {opsets}" if opsets else "", model.producer or ""]
    verdicts = [site.verdict for site in export.sites]
    tally = [plural(verdicts.count("attention"), "attention")]
    if count := verdicts.count("rejected"):
        tally.append(f"{count} refused")
    if count := verdicts.count("not_attention"):
        tally.append(f"{count} not an attention")
    return ModelView(
        name=model.name,
        sha256=model.sha256,
        facts=" · ".join(filter(None, facts)),
        tally=", ".join(tally),
        targets=tuple(_variant_name(v.target, v.graph) for v in export.variants),
        groups=tuple(_group(sites, export, report) for sites in _alike(export)),
    )


def _variant_name(target: str, graph: str) -> str:
    return target if graph == "main" else f"{target} {graph}"


def _alike(export: ExportRecord) -> Iterable[list[SiteRecord]]:
    groups: dict[str, list[SiteRecord]] = {}
    for site in export.sites:
        fates = [
            (variant.target, outcome.form, outcome.status, outcome.reason)
            for variant in export.variants
            if (outcome := variant.sites.get(site.id)) is not None
        ]
        reason = None if site.reason is None else site.reason.code
        alike = [site.verdict, site.fused_as, site.replaceable, reason, _spec_key(site.spec), fates]
        groups.setdefault(json.dumps(alike, sort_keys=True, default=str), []).append(site)
    return groups.values()


def _spec_key(spec: Any) -> Any:
    # Which site shares its keys is part of the site, not of the kind of attention.
    return None if spec is None else {k: v for k, v in spec.items() if k != "kv_source"}


def _group(sites: Sequence[SiteRecord], export: ExportRecord, report: Report) -> GroupView:
    first = sites[0]
    outcomes = [
        (_variant_name(v.target, v.graph), [v.sites[s.id] for s in sites if s.id in v.sites])
        for v in export.variants
    ]
    outcomes = [(target, own) for target, own in outcomes if own]
    heat = proof_heat(
        (target, max((o.proof.by_case for o in own if o.proof), key=len, default=()))
        for target, own in outcomes
    )
    title = first.id if len(sites) == 1 else f"{first.id} … {sites[-1].id}"
    reason = first.reason
    return GroupView(
        title=title,
        count=len(sites),
        verdict=first.verdict,
        summary=_summary(first),
        spec=tuple(_spec_rows(first.spec or {})),
        reason=reason.message if reason else "",
        reason_code=reason.code if reason else "",
        reason_nodes=reason.nodes if reason else (),
        outcomes=tuple(_outcome(target, own) for target, own in outcomes),
        heat=heat,
        sites=tuple(_site(site, export, report) for site in sites),
    )


def _summary(site: SiteRecord) -> str:
    spec = site.spec
    if spec is None:
        return "" if site.reason is None else site.reason.message
    heads = f"{spec['q_heads']} heads"
    if spec["kv_heads"] != spec["q_heads"]:
        heads = f"{spec['q_heads']}/{spec['kv_heads']} heads"
    parts = [f"{heads} of {spec['head_dim']}"]
    if spec.get("causal"):
        parts.append("causal")
    if spec.get("left_window") is not None:
        parts.append(f"window {spec['left_window'] + 1}")
    parts += list(spec.get("mask", ()))
    if spec.get("rotary"):
        parts.append("rotary")
    if spec.get("qk_norm"):
        parts.append(f"{spec['qk_norm']} norm")
    if spec.get("softcap") is not None:
        parts.append(f"softcap {figure(spec['softcap'])}")
    parts += [name for name in ("sinks", "cross") if spec.get(name)]
    if spec.get("cache"):
        parts.append(f"{spec['cache']} cache")
    if site.fused_as:
        parts.append(f"already {site.fused_as}")
    return ", ".join(parts)


def _spec_rows(spec: Any) -> Iterable[tuple[str, str]]:
    for name, value in spec.items():
        if value in (None, False, [], "n/a"):
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        elif isinstance(value, float):
            text = f"{value:.6g}"
        else:
            text = "yes" if value is True else str(value)
        yield name.replace("_", " "), text


def _outcome(target: str, own: Sequence[SiteOutcomeRecord]) -> OutcomeView:
    first = own[0]
    proven = [o.proof for o in own if o.proof is not None]
    params = ", ".join(f"{name} {value}" for name, value in sorted(first.params.items()))
    full = [proof for proof in proven if proof.representative is None]
    worst = max(full or proven, key=lambda p: (p.max_err or 0) / (p.bound or 1), default=None)
    text = ""
    if worst is not None:
        text = f"error {figure(worst.max_err)} of {figure(worst.bound)} allowed"
        text += f", {plural(worst.cases, 'case')}"
        text += f", against {' and '.join(worst.against)}"
    return OutcomeView(
        target=target,
        form=first.form or "–",
        status=first.status,
        reason=first.reason or "",
        params=params,
        proof=text,
        engine=worst.engine if worst else "",
    )


def _site(site: SiteRecord, export: ExportRecord, report: Report) -> SiteView:
    proofs = []
    for variant in export.variants:
        outcome = variant.sites.get(site.id)
        if outcome is None or outcome.proof is None:
            continue
        proof = outcome.proof
        how = "run" if proof.representative is None else f"as {proof.representative}"
        weights = {
            "structural": "weights bound",
            "sampled": "weights sampled",
            "full": "own weights",
        }
        proofs.append(
            f"{_variant_name(variant.target, variant.graph)}: {how}, {weights[proof.weights]}"
        )
    return SiteView(
        id=site.id,
        nodes=site.nodes,
        proofs=tuple(proofs),
        elsewhere=_elsewhere(site, export, report),
    )


def _elsewhere(site: SiteRecord, export: ExportRecord, report: Report) -> tuple[str, ...]:
    """Nodes of this site that did not run on their target, with the target."""
    names = set(site.nodes)
    found = []
    for entry in report.entries:
        result = entry.result
        if result.model_sha256 != export.model.sha256 or result.placement is None:
            continue
        for line in result.placement.elsewhere:
            name = line.split(" ", 1)[0]
            if name in names or name.startswith(f"{site.id}."):
                found.append(f"{entry.target}: {line}")
    return tuple(dict.fromkeys(found))
