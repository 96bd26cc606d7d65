"""Plans of ``tune`` as lines that every format can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mha_export.report._figures import milliseconds, ratio
from mha_export.report._merge import Report
from mha_export.report.records import PlanRecord


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """One way at one workload. ``chosen``: the graphs of a target that it was chosen for."""

    site: str
    lengths: str
    way: str
    p50: str
    interval: str
    of_best: str
    of_primitive: str
    chosen: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """One plan: what it is of, and its lines, the fastest of each site and workload first."""

    title: str
    facts: str
    lines: tuple[PlanLine, ...]


def plan_views(report: Report) -> tuple[PlanView, ...]:
    """Every plan of the report."""
    return tuple(_view(plan) for plan in report.plans)


def _view(plan: PlanRecord) -> PlanView:
    asked = plan.question
    facts = [
        f"{asked.get('runtime') or ''} {asked.get('runtime_version') or ''}".strip(),
        f"opset {asked['opset']}" if "opset" in asked else "",
        plan.machine.cpu,
    ]
    return PlanView(
        title=f"{plan.model or plan.model_sha256[:12]} on {', '.join(plan.targets)}",
        facts=" · ".join(filter(None, facts)),
        lines=tuple(_lines(plan)),
    )


def _lines(plan: PlanRecord) -> Iterator[PlanLine]:
    def order(row: Any) -> tuple[str, str, float]:
        p50 = float("inf") if row.latency_ms is None else row.latency_ms.p50
        return (row.site, _words(row.lengths), p50)

    for row in sorted(plan.measured, key=order):
        latency, best = row.latency_ms, plan.best(row)
        low_high = latency is not None and latency.low is not None and latency.high is not None
        yield PlanLine(
            site=row.site,
            lengths=_words(row.lengths),
            way=" ".join([row.form or "-", _words(row.params)]).strip(),
            p50="" if latency is None else milliseconds(latency.p50),
            interval=f"{latency.low:.4g} to {latency.high:.4g}" if latency and low_high else "",
            of_best="" if latency is None or not best else ratio(latency.p50 / best),
            of_primitive="" if row.vs is None else ratio(row.vs.ratio),
            chosen=", ".join(
                name
                for name, sites in plan.targets.items()
                if (own := sites.get(row.site)) is not None
                and (own.form, dict(own.params)) == (row.form, dict(row.params))
            ),
            problem=row.problem or "",
        )


def _words(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())
