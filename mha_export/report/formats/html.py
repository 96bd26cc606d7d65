"""One HTML file that needs nothing else: no network, no other file, readable without script."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

from mha_export.errors import InputError
from mha_export.report._figures import figure, plural, ratio, workload
from mha_export.report._merge import Report
from mha_export.report._plans import plan_views
from mha_export.report._verdict import STATUSES, bad_entries, verdict_of

SIGNS = {
    "pass": "✓",
    "built": "⚒",
    "imprecise": "≈",
    "fallback": "↩",
    "fail": "✗",
    "error": "!",
    "unsupported": "–",
    "unavailable": "–",
}
"""A sign beside the word, so that colour is never the only carrier."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    note: str = ""


class HtmlFormat:
    """The page. Needs the ``report`` extra (Jinja2, matplotlib)."""

    name = "html"
    suffixes = (".html", ".htm")

    def render(self, report: Report) -> str:
        environment = _environment()
        page: str = environment.get_template("report.html.j2").render(**_context(report))
        return page.rstrip() + "\n"


def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise InputError(
            "an HTML report is written with Jinja2, which is not installed",
            fix="pip install 'mha-export[report]', or write a .md, .json or .xml report",
        ) from error
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> str:
    return (resources.files("mha_export.report") / "templates" / name).read_text(encoding="utf-8")


def _context(report: Report) -> dict[str, Any]:
    from mha_export.report.html import _capabilities, _charts, _heads, _results, _sites

    rows = _results.views(report.entries)
    return {
        "report": report,
        "verdict": verdict_of(report),
        "title": _title(report),
        "tiles": _tiles(report),
        "statuses": STATUSES,
        "signs": SIGNS,
        "rows": rows,
        "constant": workload(_results.constant_dims(report.entries)),
        "bad": [rows[entry.number - 1] for entry in bad_entries(report)],
        "columns": _results.used_columns(rows),
        "facets": _results.facets(rows),
        "latency_charts": _charts.latency_charts(report),
        "scaling_charts": _charts.scaling_charts(report),
        "models": _sites.models(report),
        "matrix": _capabilities.matrix(report),
        "absent": _capabilities.absent_targets(report),
        "plans": plan_views(report),
        "heads_views": _heads.heads_views(report),
        "surgery_views": _heads.surgery_views(report),
        "figure": figure,
        "plural": plural,
        "style": _template("style.css"),
        "script": _template("script.js"),
    }


def _title(report: Report) -> str:
    names = list(dict.fromkeys(entry.result.model for entry in report.entries))
    if not names:
        names = list(
            dict.fromkeys(
                [
                    *(record.model.name for record in report.heads),
                    *(record.model.name for record in report.surgeries),
                ]
            )
        )
    if not names:
        names = list(dict.fromkeys(plan.model or plan.model_sha256[:12] for plan in report.plans))
    if not names:
        return "Capabilities" if report.doctors else "Nothing was run"
    return (
        " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more models"
    )


def _tiles(report: Report) -> list[Tile]:
    """The few figures worth a glance; each only where there is something to say."""
    tiles = []
    sites = [site for export in report.exports.values() for site in export.sites]
    attentions = sum(site.verdict == "attention" for site in sites)
    if sites:
        refused = sum(site.verdict == "rejected" for site in sites)
        note = f"{refused} refused, with reasons" if refused else "none refused"
        tiles.append(Tile(label="attentions found", value=str(attentions), note=note))
    proofs = [
        outcome.proof
        for export in report.exports.values()
        for variant in export.variants
        for outcome in variant.sites.values()
        if outcome.proof is not None and outcome.status != "proof_failed"
    ]
    if proofs:
        undone = sum(
            outcome.status == "proof_failed"
            for export in report.exports.values()
            for variant in export.variants
            for outcome in variant.sites.values()
        )
        note = f"{undone} undone: proof failed" if undone else "on adversarial inputs"
        tiles.append(Tile(label="rewrites proven", value=str(len(proofs)), note=note))
    factors = [
        entry.result.parity.factor
        for entry in report.entries
        if entry.result.status == "pass"
        and entry.result.parity is not None
        and entry.result.parity.factor is not None
    ]
    if factors:
        worst = f"{max(factors):.2g}"
        tiles.append(Tile(label="of its bound: largest error", value=worst, note="of what passed"))
    tiles += _fastest(report)
    return tiles


def _fastest(report: Report) -> list[Tile]:
    """The best ratio to the baseline of anything right, with its interval."""
    found = [
        (entry.result.vs, entry.target)
        for entry in report.entries
        if entry.result.vs is not None and entry.result.status in ("pass", "imprecise")
    ]
    if not found:
        return []
    vs, target = min(found, key=lambda pair: pair[0].ratio)
    note = f"{vs.low:.2f} to {vs.high:.2f}; best: {target}"
    return [Tile(label=f"of the time of {vs.baseline}", value=ratio(vs.ratio), note=note)]


FORMAT = HtmlFormat()
