"""Which charts the page holds: latency by model, graph and workload; scaling by model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mha_export.report._figures import workload
from mha_export.report._merge import Entry, Report
from mha_export.report._verdict import BAD
from mha_export.report.charts import Chart, latency_chart, scaling_chart
from mha_export.report.charts._latency import Bar
from mha_export.report.charts._svg import SERIES
from mha_export.report.html._results import constant_dims
from mha_export.report.records import LatencyRecord


@dataclass(frozen=True, kw_only=True)
class ChartView:
    """A chart of one model; ``note`` says what had to be left out."""

    model: str
    chart: Chart
    note: str = ""


def latency_charts(report: Report) -> tuple[ChartView, ...]:
    """Bars of everything measured on the same model, graph and workload."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in report.entries:
        if entry.result.latency_ms is not None:
            size = workload(entry.result.workload)
            groups.setdefault((entry.result.model, entry.result.graph, size), []).append(entry)
    return tuple(
        ChartView(
            model=model,
            chart=latency_chart(
                " · ".join(filter(None, (model, "" if graph == "main" else graph, size))),
                [_bar(entry, several=len(report.machines) > 1) for entry in entries],
            ),
        )
        for (model, graph, size), entries in groups.items()
    )


_DOUBT = {"fail": "wrong result", "error": "failed", "fallback": "not on the target"}


def _bar(entry: Entry, *, several: bool) -> Bar:
    result = entry.result
    assert result.latency_ms is not None
    label = _target_name(entry)
    return Bar(
        label=f"{label} · {entry.machine.id}" if several else label,
        latency=result.latency_ms,
        vs=result.vs,
        baseline=result.variant == "original",
        doubt=_DOUBT.get(result.status),
    )


def scaling_charts(report: Report) -> tuple[ChartView, ...]:
    """Curves where one dimension took three or more sizes with all else alike."""
    found = []
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in report.entries:
        if entry.result.latency_ms is not None and entry.result.status not in BAD:
            groups.setdefault((entry.result.model, entry.result.graph), []).append(entry)
    for (model, graph), entries in groups.items():
        dimension = _varied(entries)
        if dimension is None:
            continue
        series = _series(entries, dimension)
        if not series:
            continue
        name = (
            f"{model if graph == 'main' else f'{model} {graph}'} by {dimension.replace('_', ' ')}"
        )
        left_out = list(series)[len(SERIES) :]
        found.append(
            ChartView(
                model=model,
                chart=scaling_chart(name, dimension.replace("_", " "), series),
                note=f"not drawn: {', '.join(left_out)}" if left_out else "",
            )
        )
    return tuple(found)


def _varied(entries: list[Entry]) -> str | None:
    """The dimension that took the most sizes, of those that took three or more."""
    sizes: dict[str, set[int]] = {}
    for entry in entries:
        for name, size in entry.result.workload.items():
            sizes.setdefault(name, set()).add(size)
    best = max(sorted(sizes), key=lambda name: len(sizes[name]), default=None)
    return best if best is not None and len(sizes[best]) >= 3 else None


def _series(entries: list[Entry], dimension: str) -> Mapping[str, list[tuple[int, LatencyRecord]]]:
    """Lines by target, machine and the other sizes, each named only where it varies."""
    several = len({entry.machine.id for entry in entries}) > 1
    constant = constant_dims(entries)
    series: dict[str, list[tuple[int, LatencyRecord]]] = {}
    for entry in entries:
        result = entry.result
        size = result.workload.get(dimension)
        if size is None or result.latency_ms is None:
            continue
        rest = {k: v for k, v in result.workload.items() if k != dimension and k not in constant}
        name = _target_name(entry)
        label = " · ".join(
            filter(None, (name, entry.machine.id if several else "", workload(rest)))
        )
        series.setdefault(label, []).append((size, result.latency_ms))
    return {
        label: sorted(points, key=lambda point: point[0])
        for label, points in series.items()
        if len(points) >= 3
    }


def _target_name(entry: Entry) -> str:
    result = entry.result
    if result.variant != "original":
        return entry.target
    return result.target + (f":{result.precision}" if result.precision else "") + ", unmodified"
