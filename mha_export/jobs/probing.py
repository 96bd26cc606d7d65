"""The targets of this machine, and what each was seen to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import CANNOT_RUN, OK, JobResult
from mha_export.jobs._store import check_file
from mha_export.measure.machine import machine_record
from mha_export.report.records import (
    CapabilityRecord,
    DoctorRecord,
    StateRecord,
    TargetRecord,
    write_json,
)
from mha_export.targets import (
    Availability,
    Available,
    Capabilities,
    TargetRequest,
    all_targets,
    capabilities_for,
    parse_targets,
    probe,
)

PROBED_HERE = "probed here"


def doctor(
    *,
    targets: Sequence[str] = (),
    output: str | Path | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> JobResult:
    """List targets with the reason and fix of each that is missing, and probe those that are here.

    What a probe found is remembered by runtime version and device, so a second call is fast.

    Args:
        targets: as ``-t``; none: every known target.
        output: capability file to write.
        quick: probe the commonest features only.
        progress: told of every step.

    Returns:
        A document valid under the ``doctor`` schema. ``exit_code`` 3: a target that was asked for
        by name can neither build nor run here.

    Errors:
        InputError: an unknown target.
    """
    if output is not None:
        check_file(Path(output))
    requests = parse_targets(targets) if targets else _everything()
    rows = tuple(_row(request, quick=quick, progress=progress) for request in requests)
    record = DoctorRecord(machine=machine_record(), targets=rows)
    if output is not None:
        write_json(output, record)
    absent = [row for row in rows if row.build.status == row.run.status == "unavailable"]
    asked = bool(targets) and tuple(targets) != ("all",)
    return JobResult(
        document=record.to_json(),
        exit_code=CANNOT_RUN if asked and absent else OK,
        files=() if output is None else (Path(output),),
    )


def _everything() -> tuple[TargetRequest, ...]:
    return tuple(TargetRequest(target=target) for target in all_targets().values())


def _row(request: TargetRequest, *, quick: bool, progress: Progress) -> TargetRecord:
    target = request.target
    availability = target.availability()
    if isinstance(availability.build, Available):
        found = probe(
            target,
            request.precision,
            quick=quick,
            progress=lambda cell, done, count: progress(
                f"probing {request.name}: {done} of {count}: {cell}"
            ),
        )
    else:
        found = capabilities_for(target, request.precision)
    return _record(request, availability, found)


def remembered(requests: Iterable[TargetRequest]) -> DoctorRecord | None:
    """What probes on this machine found earlier of these targets; None where there were none.

    Nothing is probed. What was measured elsewhere is not of this machine, and is left out.
    """
    rows = [
        _record(request, request.target.availability(), found)
        for request in requests
        if (found := capabilities_for(request.target, request.precision)).source == PROBED_HERE
    ]
    return DoctorRecord(machine=machine_record(), targets=tuple(rows)) if rows else None


def _record(
    request: TargetRequest, availability: Availability, found: Capabilities
) -> TargetRecord:
    return TargetRecord(
        target=request.name,
        build=StateRecord.from_json(availability.build.to_json()),
        run=StateRecord.from_json(availability.run.to_json()),
        runtime=availability.runtime,
        version=availability.version,
        device=availability.device,
        capabilities=tuple(CapabilityRecord.from_json(row.to_json()) for row in found.rows),
    )
