"""What changed between two reports: parity, placement and latency, each by its own rule.

* status: a worse status is a regression (``pass`` before ``imprecise`` before the rest).
* parity: the error in units of its bound crossed 1, or rose fourfold to above a tenth.
* placement: fewer nodes on the target, as a fraction of those that compute.
* latency: the two intervals of the median do not overlap and the medians differ by over 2%;
  but where the ratio to the same baseline stayed, the machine changed and not the model: a note.
  Figures of different machines are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mha_export.report._figures import figure, milliseconds, subject
from mha_export.report.records import LatencyRecord, Record, ResultRecord

if TYPE_CHECKING:
    from mha_export.report._merge import Entry, Key, Report

Kind = Literal["parity", "placement", "latency", "status", "missing", "new"]
Severity = Literal["regression", "improvement", "note"]
LEAST_LATENCY_STEP = 0.02
"""A shift of the median below this is not reported, however narrow the intervals."""
PARITY_STEP, PARITY_FLOOR = 4.0, 0.1

_RANK = {
    "pass": 0,
    "built": 1,
    "imprecise": 2,
    "fallback": 3,
    "unsupported": 4,
    "unavailable": 4,
    "error": 5,
    "fail": 6,
}


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One difference from the earlier report."""

    kind: Kind
    severity: Severity
    subject: str
    message: str


def changes_between(new: Report, old: Report) -> tuple[Change, ...]:
    """Every change, regressions first. The same measurement is found by machine and workload."""
    before, after = _by_key(old), _by_key(new)
    found: list[Change] = []
    for key, entry in after.items():
        if key in before:
            found += _changes(before[key], entry)
        else:
            found.append(
                _change("new", "note", entry, f"not in the earlier report: {entry.result.status}")
            )
    found += [
        _change("missing", "regression", entry, "measured before, missing now")
        for key, entry in before.items()
        if key not in after and entry.machine.id in {m.id for m in new.machines}
    ]
    order = {"regression": 0, "improvement": 1, "note": 2}
    return tuple(sorted(found, key=lambda change: order[change.severity]))


def _by_key(report: Report) -> Mapping[Key, Entry]:
    from mha_export.report._merge import key_of

    # Hashes change with every export and every training: names are what is compared.
    keyed = {}
    for entry in report.entries:
        machine, model, _, *rest, _, workload = key_of(entry.machine, entry.result)
        keyed[(machine, model, *rest, workload)] = entry
    return keyed


def _changes(old: Entry, new: Entry) -> Iterator[Change]:
    a, b = old.result, new.result
    if _RANK[a.status] != _RANK[b.status]:
        worse = _RANK[b.status] > _RANK[a.status]
        severity: Severity = "regression" if worse else "improvement"
        why = f": {b.reason}" if b.reason and worse else ""
        yield _change("status", severity, new, f"{a.status} before, {b.status} now{why}")
    yield from _parity(a, b, new)
    yield from _placement(a, b, new)
    yield from _latency(a, b, new)


def _parity(a: ResultRecord, b: ResultRecord, entry: Entry) -> Iterator[Change]:
    if a.parity is None or b.parity is None:
        return
    before, now = a.parity.factor, b.parity.factor
    if before is None or now is None:
        return
    crossed = before <= 1.0 < now
    rose = now > PARITY_FLOOR and now > PARITY_STEP * before
    fell = before > PARITY_FLOOR and before > PARITY_STEP * now
    if crossed or rose or fell:
        message = f"error {figure(before)} of its bound before, {figure(now)} now"
        yield _change("parity", "improvement" if fell else "regression", entry, message)


def _placement(a: ResultRecord, b: ResultRecord, entry: Entry) -> Iterator[Change]:
    if a.placement is None or b.placement is None:
        return
    before = a.placement.on_target / max(a.placement.float_compute_nodes, 1)
    now = b.placement.on_target / max(b.placement.float_compute_nodes, 1)
    if before != now:
        message = (
            f"{a.placement.on_target} of {a.placement.float_compute_nodes} nodes on the target "
            f"before, {b.placement.on_target} of {b.placement.float_compute_nodes} now"
        )
        yield _change("placement", "regression" if now < before else "improvement", entry, message)


def _latency(old: ResultRecord, new: ResultRecord, entry: Entry) -> Iterator[Change]:
    a, b = old.latency_ms, new.latency_ms
    if a is None or b is None or not a.p50:
        return
    ratio = b.p50 / a.p50
    if not _apart(_interval(a), _interval(b)) or abs(ratio - 1.0) <= LEAST_LATENCY_STEP:
        return
    message = f"{milliseconds(a.p50)} before, {milliseconds(b.p50)} now ({ratio:.2f}x)"
    severity: Severity = "regression" if ratio > 1 else "improvement"
    if new.variant == "original" or _same_ratio(old, new):
        severity = "note"
        message += "; the unmodified model moved as well, so the machine or the runtime did"
    yield _change("latency", severity, entry, message)


def _same_ratio(old: ResultRecord, new: ResultRecord) -> bool:
    a, b = old.vs, new.vs
    return (
        a is not None
        and b is not None
        and a.baseline == b.baseline
        and not _apart((a.low, a.high), (b.low, b.high))
    )


def _apart(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return b[0] > a[1] or b[1] < a[0]


def _interval(latency: LatencyRecord) -> tuple[float, float]:
    """Of the median; the spread p10..p90 where no interval was recorded."""
    low = latency.p10 if latency.low is None else latency.low
    high = latency.p90 if latency.high is None else latency.high
    return low, high


def _change(kind: Kind, severity: Severity, entry: Entry, message: str) -> Change:
    return Change(
        kind=kind,
        severity=severity,
        subject=f"{subject(entry.result)} at {entry.machine.id}",
        message=message,
    )
