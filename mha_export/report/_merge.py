"""Any number of results files as one report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mha_export.report._against import Change
from mha_export.report._figures import target_of
from mha_export.report.records import (
    Damaged,
    DoctorRecord,
    ExportRecord,
    HeadsRecord,
    Loaded,
    MachineRecord,
    PlanRecord,
    ResultRecord,
    ResultsRecord,
    SurgeryRecord,
    UnfinishedRecord,
)

Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One result and the machine it was measured on. ``number`` counts from 1 in report order."""

    number: int
    machine: MachineRecord
    result: ResultRecord

    @property
    def target(self) -> str:
        """``openvino:bf16``, or ``openvino:bf16 (portable)`` where it ran another's variant."""
        return target_of(self.result)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What every format renders.

    Attributes:
        runs: one results record a machine, each result once, in a stable order.
        entries: every result of every run, numbered.
        exports: by hash of the model, every variant made of it.
        doctors: by machine id.
        damaged: files that were left out.
        changes: against an earlier report; None where none was given.
    """

    runs: tuple[ResultsRecord, ...]
    entries: tuple[Entry, ...]
    exports: Mapping[str, ExportRecord]
    doctors: Mapping[str, DoctorRecord]
    damaged: tuple[Damaged, ...] = ()
    changes: tuple[Change, ...] | None = None

    @property
    def heads(self) -> tuple[HeadsRecord, ...]:
        """What is known of models' heads."""
        return tuple(record for run in self.runs for record in run.heads)

    @property
    def surgeries(self) -> tuple[SurgeryRecord, ...]:
        """Models that were given other heads."""
        return tuple(record for run in self.runs for record in run.surgeries)

    @property
    def plans(self) -> tuple[PlanRecord, ...]:
        """What ``tune`` measured and chose."""
        return tuple(record for run in self.runs for record in run.plans)

    @property
    def machines(self) -> tuple[MachineRecord, ...]:
        return tuple(run.machine for run in self.runs)


def key_of(machine: MachineRecord, result: ResultRecord) -> Key:
    """What makes two results the same measurement: machine, model, variant, target and workload."""
    workload = ",".join(f"{name}={size}" for name, size in sorted(result.workload.items()))
    return (machine.id, *subject_key(result), result.variant_sha256 or "", workload)


def subject_key(result: ResultRecord) -> Key:
    """Model, hash of the model, target, precision, variant and graph."""
    return (
        result.model,
        result.model_sha256,
        result.target,
        result.precision or "",
        result.variant or "",
        result.graph,
    )


def merge(loaded: Loaded) -> Report:
    """Join results by machine. Of two results of the same measurement, the later file's stays."""
    machines: dict[str, MachineRecord] = {}
    results: dict[Key, ResultRecord] = {}
    exports: dict[str, ExportRecord] = {}
    doctors: dict[str, DoctorRecord] = {}
    heads: dict[Key, HeadsRecord] = {}
    surgeries: dict[Key, SurgeryRecord] = {}
    plans: dict[Key, PlanRecord] = {}
    unfinished: dict[str, UnfinishedRecord] = {}
    for _, run in loaded.results:
        machine = run.machine
        machines[machine.id] = machine
        results.update((key_of(machine, result), result) for result in run.results)
        heads.update(((machine.id, own.model.sha256, own.data), own) for own in run.heads)
        surgeries.update(((machine.id, own.sha256), own) for own in run.surgeries)
        plans.update(((machine.id, own.model_sha256, *own.targets), own) for own in run.plans)
        for export in run.exports:
            sha256 = export.model.sha256
            exports[sha256] = _joined_exports(exports.get(sha256), export)
        if run.unfinished is not None:
            unfinished[machine.id] = run.unfinished
        if run.doctor is not None:
            own_id = run.doctor.machine.id
            doctors[own_id] = _joined_doctors(doctors.get(own_id), run.doctor)
            machines.setdefault(run.doctor.machine.id, run.doctor.machine)
    report = _report(machines, results, exports, doctors, loaded.damaged)
    runs = [
        dataclasses.replace(
            _with_heads(run, heads, surgeries),
            plans=tuple(plans[key] for key in sorted(plans) if key[0] == run.machine.id),
            unfinished=unfinished.get(run.machine.id),
        )
        for run in report.runs
    ]
    return dataclasses.replace(report, runs=tuple(runs))


def _joined_exports(earlier: ExportRecord | None, later: ExportRecord) -> ExportRecord:
    """The variants of both: one model is exported for one target here, for another there."""
    listed = (*(earlier.variants if earlier else ()), *later.variants)
    found = {(each.target, each.graph, each.dtype): each for each in listed}
    return dataclasses.replace(later, variants=tuple(found[key] for key in sorted(found)))


def _joined_doctors(earlier: DoctorRecord | None, later: DoctorRecord) -> DoctorRecord:
    """The targets of both: a run looks at those that it is asked for."""
    listed = (*(earlier.targets if earlier else ()), *later.targets)
    found = {each.target: each for each in listed}
    return dataclasses.replace(later, targets=tuple(found[key] for key in sorted(found)))


def _with_heads(
    run: ResultsRecord, heads: Mapping[Key, HeadsRecord], surgeries: Mapping[Key, SurgeryRecord]
) -> ResultsRecord:
    own = tuple(heads[key] for key in sorted(heads) if key[0] == run.machine.id)
    done = tuple(surgeries[key] for key in sorted(surgeries) if key[0] == run.machine.id)
    return dataclasses.replace(run, heads=own, surgeries=done)


def _report(
    machines: Mapping[str, MachineRecord],
    results: Mapping[Key, ResultRecord],
    exports: Mapping[str, ExportRecord],
    doctors: Mapping[str, DoctorRecord],
    damaged: Iterable[Damaged],
) -> Report:
    runs, entries = [], []
    for machine_id in sorted(machines):
        own = tuple(results[key] for key in sorted(results, key=_order) if key[0] == machine_id)
        machine = machines[machine_id]
        models = {result.model_sha256 for result in own}
        runs.append(
            ResultsRecord(
                machine=machine,
                results=own,
                exports=tuple(exports[sha] for sha in sorted(exports) if sha in models),
                doctor=doctors.get(machine_id),
            )
        )
        entries += [(machine, result) for result in own]
    entries.sort(key=lambda pair: _order(key_of(*pair))[1:])
    return Report(
        runs=tuple(runs),
        entries=tuple(
            Entry(number=number, machine=machine, result=result)
            for number, (machine, result) in enumerate(entries, start=1)
        ),
        exports=exports,
        doctors=doctors,
        damaged=tuple(damaged),
    )


def _order(key: Key) -> tuple[object, ...]:
    """Sort keys with numbers in the workload by size: ``seq=64`` before ``seq=128``."""
    sizes = tuple(
        (name, int(size) if size.lstrip("-").isdigit() else 0)
        for name, _, size in (part.partition("=") for part in key[-1].split(","))
    )
    return (*key[:-2], sizes, key[-2])


def with_changes(report: Report, changes: Iterable[Change]) -> Report:
    """The report, with what changed since an earlier one."""
    return dataclasses.replace(report, changes=tuple(changes))
