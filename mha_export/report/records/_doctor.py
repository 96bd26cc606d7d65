"""What ``doctor`` says: the targets of this machine and what each was seen to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mha_export.report.records._codec import Record
from mha_export.report.records._machine import MachineRecord
from mha_export.report.records._version import SCHEMA_VERSION
from mha_export.states import CapabilityState


@dataclass(frozen=True, kw_only=True)
class StateRecord(Record):
    """Whether a target can build, or run, here; ``fix`` says how to make it."""

    status: Literal["available", "unavailable"]
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, kw_only=True)
class CapabilityRecord(Record):
    """One known-answer probe: a form with a feature in a dtype. ``placement`` is where it ran."""

    form: str
    feature: str
    dtype: str
    state: CapabilityState
    max_err: float | None = None
    placement: str | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class TargetRecord(Record):
    """One target on this machine."""

    target: str
    build: StateRecord
    run: StateRecord
    runtime: str | None = None
    version: str | None = None
    device: str | None = None
    capabilities: tuple[CapabilityRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DoctorRecord(Record):
    """The capability file."""

    schema_version: str = SCHEMA_VERSION
    machine: MachineRecord
    targets: tuple[TargetRecord, ...] = ()
