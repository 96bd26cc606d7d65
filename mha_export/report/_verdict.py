"""The one line and the exit code of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mha_export.report._figures import plural, some
from mha_export.report._merge import Entry, Report
from mha_export.report.records import ResultStatus

BAD = ("fail", "error", "fallback")
"""Statuses that fail a check, the worst first."""
STATUSES: tuple[str, ...] = get_args(ResultStatus)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``line`` begins with PASS or FAIL; ``exit_code`` is 0 or 1."""

    line: str
    exit_code: int
    counts: Mapping[str, int]

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


def verdict_of(report: Report) -> Verdict:
    """FAIL where any result is ``fail``, ``fallback`` or ``error``, or anything regressed."""
    seen: Counter[str] = Counter(entry.result.status for entry in report.entries)
    counts = {status: seen[status] for status in STATUSES if seen[status]}
    bad = bad_entries(report)
    regressions = [c for c in report.changes or () if c.severity == "regression"]
    machines = len({entry.machine.id for entry in report.entries}) or len(report.runs)
    run = f"{plural(len(report.entries), 'result')} on {plural(machines, 'machine')}"
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    other = _beside_results(report)
    if not report.entries and other:
        run, listed = other, "nothing was run on a target"
    line = f"{'FAIL' if bad or regressions else 'PASS'} {run}: {listed or 'nothing was run'}"
    if bad:
        names = dict.fromkeys(f"{entry.result.model} on {entry.target}" for entry in bad)
        line += f"; see {some(list(names))}"
    if regressions:
        line += f"; {plural(len(regressions), 'regression')}"
    waiting = [name for own in report.runs if own.unfinished for name in own.unfinished.targets]
    if waiting:
        line += f"; not run yet: {some(waiting)}"
    if report.damaged:
        line += f"; {plural(len(report.damaged), 'damaged file')} left out"
    return Verdict(line=line, exit_code=1 if bad or regressions else 0, counts=counts)


def _beside_results(report: Report) -> str:
    """What a report holds that no target ran."""
    heads = {
        record.model.sha256: sum(len(layer.heads) for layer in record.layers)
        for record in report.heads
    }
    parts = []
    if heads:
        parts.append(
            f"{plural(sum(heads.values()), 'head')} of {plural(len(heads), 'model')} analysed"
        )
    if report.surgeries:
        parts.append(f"{plural(len(report.surgeries), 'model')} with other heads")
    if report.plans:
        parts.append(plural(len(report.plans), "plan"))
    return ", ".join(parts)


def bad_entries(report: Report) -> list[Entry]:
    """What fails the check, the worst kind first."""
    bad = [entry for entry in report.entries if entry.result.status in BAD]
    return sorted(bad, key=lambda entry: BAD.index(entry.result.status))
