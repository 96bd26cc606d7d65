"""What each target of each machine was seen to do, as a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from mha_export.report._figures import figure
from mha_export.report._merge import Report
from mha_export.report.records import CapabilityRecord

SHORT = {
    "ok": ("ok", "right, and on the target"),
    "imprecise": ("coarse", "right, but coarser than its precision allows"),
    "wrong": ("wrong", "runs, and computes something else"),
    "fallback": ("fell back", "did not run on the target"),
    "unsupported-at-load": ("no: load", "refused when loaded"),
    "unsupported-at-run": ("no: run", "loaded, then refused at run"),
    "crash": ("crash", "the process died"),
    "not-probed": ("?", "not probed"),
}


@dataclass(frozen=True, kw_only=True)
class CapabilityCell:
    state: str
    text: str
    title: str


@dataclass(frozen=True, kw_only=True)
class CapabilityRow:
    """One form and feature."""

    form: str
    feature: str
    cells: tuple[CapabilityCell | None, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    target: str
    machine: str
    dtype: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """``rows`` by form; ``tally`` counts what was right."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[CapabilityRow, ...]], ...]
    legend: tuple[tuple[str, str, str], ...]
    tally: str


@dataclass(frozen=True, kw_only=True)
class AbsentTarget:
    target: str
    machine: str
    what: str
    reason: str
    fix: str


def matrix(report: Report) -> Matrix | None:
    """Every probe of every machine; None where nothing was probed."""
    columns: list[Column] = []
    probes: list[dict[tuple[str, str], CapabilityRecord]] = []
    for machine_id, doctor in sorted(report.doctors.items()):
        for target in doctor.targets:
            for dtype in dict.fromkeys(c.dtype for c in target.capabilities):
                version = " ".join(filter(None, (target.runtime, target.version)))
                columns.append(
                    Column(target=target.target, machine=machine_id, dtype=dtype, version=version)
                )
                probes.append(
                    {(c.form, c.feature): c for c in target.capabilities if c.dtype == dtype}
                )
    if not columns:
        return None
    keys = list(dict.fromkeys(key for probe in probes for key in probe))
    groups: dict[str, list[CapabilityRow]] = {}
    for form, feature in sorted(keys, key=lambda key: (key[0] != "primitive", key[0])):
        cells = tuple(_cell(probe.get((form, feature))) for probe in probes)
        groups.setdefault(form, []).append(CapabilityRow(form=form, feature=feature, cells=cells))
    states = [c.state for probe in probes for c in probe.values() if c.state != "not-probed"]
    seen = set(states)
    return Matrix(
        columns=tuple(columns),
        groups=tuple((form, tuple(rows)) for form, rows in groups.items()),
        legend=tuple((state, *SHORT[state]) for state in SHORT if state in seen),
        tally=f"{states.count('ok')} of {len(states)} probes right and on the target",
    )


def _cell(capability: CapabilityRecord | None) -> CapabilityCell | None:
    if capability is None:
        return None
    text, meaning = SHORT[capability.state]
    details = [meaning]
    if capability.max_err is not None:
        details.append(f"error {figure(capability.max_err)}")
    if capability.placement:
        details.append(f"ran on {capability.placement}")
    if capability.message:
        details.append(capability.message)
    return CapabilityCell(state=capability.state, text=text, title="; ".join(details))


def absent_targets(report: Report) -> tuple[AbsentTarget, ...]:
    """Targets that cannot build or run on a machine, with what would change that."""
    found = []
    for machine_id, doctor in sorted(report.doctors.items()):
        for target in doctor.targets:
            states = {"build": target.build, "run": target.run}
            missing = [what for what, state in states.items() if state.status == "unavailable"]
            if missing:
                state = states[missing[0]]
                found.append(
                    AbsentTarget(
                        target=target.target,
                        machine=machine_id,
                        what=" and ".join(missing),
                        reason=state.reason or "",
                        fix=state.fix or "",
                    )
                )
    return tuple(found)
