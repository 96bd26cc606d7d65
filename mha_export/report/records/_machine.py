"""The machine a figure was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mha_export.report.records._codec import Record


@dataclass(frozen=True, kw_only=True)
class MachineRecord(Record):
    """Attributes:
    id: stable name of the machine: a short hash of os, cpu, memory and accelerators.
    load: 1-minute load average when the measurement began; None where the system has none.
    cores: logical cores this process may use.
    packages: version of each runtime that took part.
    ceilings: what the machine itself reaches, measured in the same run: ``gemm_gflops``,
        ``copy_gbytes_s``.
    """

    id: str
    os: str
    cpu: str
    memory_gb: float
    accelerators: tuple[str, ...] = ()
    load: float | None = None
    cores: int | None = None
    python: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
