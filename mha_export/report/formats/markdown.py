"""Markdown for a pull request: the verdict, what is wrong, and a table that stays narrow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from mha_export.report._figures import figure, milliseconds, percent, ratio, workload
from mha_export.report._merge import Entry, Report
from mha_export.report._plans import plan_views
from mha_export.report._verdict import bad_entries, verdict_of

SIGNS = {
    "pass": "✅",
    "built": "🔨",
    "imprecise": "🟡",
    "fallback": "🟠",
    "fail": "❌",
    "error": "❌",
    "unsupported": "➖",
    "unavailable": "➖",
}


class MarkdownFormat:
    """GitHub-flavoured Markdown."""

    name = "markdown"
    suffixes = (".md", ".markdown")

    def render(self, report: Report) -> str:
        verdict = verdict_of(report)
        lines = ["# mha-export", "", f"**{_text(verdict.line)}**", ""]
        lines += _problems(report)
        lines += _changes(report)
        lines += _results(report)
        lines += _plans(report)
        lines += _refused(report)
        lines += _machines(report)
        return "\n".join(lines).rstrip() + "\n"


def _problems(report: Report) -> Iterator[str]:
    bad = bad_entries(report)
    if not bad:
        return
    yield "## What is wrong"
    yield ""
    for entry in bad:
        result = entry.result
        size = workload(result.workload)
        yield (
            f"- {SIGNS[result.status]} **{_text(result.model)}** on {_code(entry.target)}"
            f"{f' ({_text(size)})' if size else ''}: {_text(result.reason or result.status)}"
        )
        first = result.parity.first_difference if result.parity else None
        if first is not None:
            yield f"  - parts first at {_code(first.site)}, {first.stage}: {_text(first.message)}"
        if result.replay:
            yield f"  - replay: {_code(result.replay)}"
    yield ""


def _changes(report: Report) -> Iterator[str]:
    if report.changes is None:
        return
    yield "## Against the earlier report"
    yield ""
    if not report.changes:
        yield "Nothing changed."
    for change in report.changes:
        sign = {"regression": "❌", "improvement": "✅", "note": "➖"}[change.severity]
        yield f"- {sign} {change.kind}: {_text(change.subject)}: {_text(change.message)}"
    yield ""


def _results(report: Report) -> Iterator[str]:
    if not report.entries:
        return
    several = len(report.machines) > 1
    heads = ["", "model", "target", "workload", "forms", "on target", "error / bound", "p50", "vs"]
    if several:
        heads.insert(3, "machine")
    yield "## Results"
    yield ""
    yield from _table(heads, (_row(entry, several=several) for entry in report.entries), numeric=4)
    yield ""


def _row(entry: Entry, *, several: bool) -> list[str]:
    result = entry.result
    latency, placement, parity = result.latency_ms, result.placement, result.parity
    row = [
        f"{SIGNS[result.status]} {result.status}",
        _text(result.model) + ("" if result.graph == "main" else f" ({result.graph})"),
        _code(entry.target),
        _text(workload(result.workload)),
        ", ".join(f"{form} {count}" for form, count in sorted(result.forms.items())),
        ""
        if placement is None
        else percent(placement.on_target / max(placement.float_compute_nodes, 1)),
        "" if parity is None else figure(parity.factor),
        "" if latency is None else milliseconds(latency.p50),
        ""
        if result.vs is None
        else f"{ratio(result.vs.ratio)} ({result.vs.low:.2f} to {result.vs.high:.2f})",
    ]
    if several:
        row.insert(3, _text(entry.machine.id))
    return row


def _plans(report: Report) -> Iterator[str]:
    for view in plan_views(report):
        yield f"## Plan: {_text(view.title)}"
        yield ""
        yield _text(view.facts)
        yield ""
        heads = ["site", "lengths", "way", "chosen for", "problem", "p50", "interval, ms"]
        heads += ["of the best", "of primitive"]
        rows = [
            [
                *(_text(own) for own in (line.site, line.lengths, line.way, line.chosen)),
                *(_text(line.problem), line.p50, line.interval, line.of_best, line.of_primitive),
            ]
            for line in view.lines
        ]
        yield from _table(heads, rows, numeric=4)
        yield ""


def _refused(report: Report) -> Iterator[str]:
    lines = []
    for _, export in sorted(report.exports.items()):
        for site in export.sites:
            if site.verdict == "rejected" and site.reason:
                lines.append(
                    f"- {_text(export.model.name)} {_code(site.id)}: {_text(site.reason.message)} "
                    f"({_code(site.reason.code)})"
                )
        for variant in export.variants:
            for site_id, outcome in variant.sites.items():
                if outcome.status in ("kept", "proof_failed"):
                    where = (
                        f"{_text(export.model.name)} {_code(site_id)} for {_code(variant.target)}"
                    )
                    why = f"{outcome.status.replace('_', ' ')}: {_text(outcome.reason or '')}"
                    lines.append(f"- {where}: {why}")
    lines += [f"- file left out: {_text(damaged.reason)}" for damaged in report.damaged]
    if lines:
        yield from ("## Refused, and why", "", *lines, "")


def _machines(report: Report) -> Iterator[str]:
    yield "<details><summary>Environment</summary>"
    yield ""
    for machine in report.machines:
        accelerators = ", ".join(machine.accelerators) or "no accelerator"
        load = "" if machine.load is None else f", load {figure(machine.load)}"
        yield (
            f"- {_code(machine.id)}: {_text(machine.cpu)}, {figure(machine.memory_gb)} GB, "
            f"{_text(machine.os)}, {_text(accelerators)}{load}"
        )
        if machine.packages:
            yield "  - " + ", ".join(f"{k} {v}" for k, v in sorted(machine.packages.items()))
    yield ""
    yield "</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: int) -> Iterator[str]:
    """A table whose last ``numeric`` columns align right; columns empty throughout are left out."""
    listed = [list(row) for row in rows]
    used = [i for i in range(len(heads)) if any(row[i] for row in listed)]
    yield "| " + " | ".join(heads[i] for i in used) + " |"
    yield "| " + " | ".join("---:" if i >= len(heads) - numeric else "---" for i in used) + " |"
    for row in listed:
        yield "| " + " | ".join(row[i] for i in used) + " |"


def _text(text: str) -> str:
    """Text that can neither break a table nor become markup."""
    one_line = " ".join(text.split())
    for sign in "\\`*_|<>[]":
        one_line = one_line.replace(sign, f"\\{sign}")
    return one_line


def _code(text: str) -> str:
    """A code span around any text: its fence is longer than every run of backticks in it."""
    one_line = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", one_line)), default=0))
    pad = " " if "`" in one_line else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


FORMAT = MarkdownFormat()
