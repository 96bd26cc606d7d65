"""Records of ``tune``: which form each attention gets on a target, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mha_export.report.records._codec import Record
from mha_export.report.records._latency import LatencyRecord, RatioRecord
from mha_export.report.records._machine import MachineRecord
from mha_export.report.records._version import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class PlannedRecord(Record):
    """The form chosen for a site, and what steers it."""

    form: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MeasuredRecord(Record):
    """One way to state a site, timed at the lengths of one workload; or why it was not."""

    site: str
    lengths: Mapping[str, int]
    problem: str | None = None
    form: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    latency_ms: LatencyRecord | None = None
    vs: RatioRecord | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRecord(Record):
    """A plan.

    Attributes:
        question: what a second run compares before it goes on: target, opset, runtime, machine.
        targets: by target (and graph, ``cpu.decode``) the choice of each site.
    """

    schema_version: str = SCHEMA_VERSION
    model: str = ""
    model_sha256: str
    machine: MachineRecord
    question: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Mapping[str, PlannedRecord]]
    measured: tuple[MeasuredRecord, ...] = ()

    def best(self, row: MeasuredRecord) -> float | None:
        """The least median of the row's site at its lengths."""
        times = [
            other.latency_ms.p50
            for other in self.measured
            if other.latency_ms and (other.site, other.lengths) == (row.site, row.lengths)
        ]
        return min(times, default=None)
