"""What a target is: one kind of runtime on one kind of device.

A target is one file of this package that defines ``TARGET``; its runtime is imported inside its
methods, so that listing targets works with none installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Available:
    """It works here; ``detail`` says with what (``onnxruntime 1.32.0``)."""

    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"status": "available", "reason": self.detail or None, "fix": None}


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """It does not work here: why, and what would make it."""

    reason: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        return {"status": "unavailable", "reason": self.reason, "fix": self.fix}


State = Available | Unavailable


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Building and running are two questions: an engine built ahead of time may not run here."""

    build: State
    run: State
    runtime: str
    version: str | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an export makes of one model for one target.

    Attributes:
        graphs: role (``main``, or ``prefill`` and ``decode``) to ``.onnx`` file; external weights
            lie beside it in one flat folder.
    """

    graphs: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What steers a build.

    Attributes:
        precision: what the runtime computes in where it chooses (``f32``, ``f16``, ``bf16``).
        keep: False only asks whether it builds: a target may leave the artifact without files.
    """

    precision: str | None = None
    threads: int | None = None
    keep: bool = True
    workdir: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which provider or device ran each node that computes in floating point.

    Attributes:
        elsewhere: nodes (``name (op) -> provider``) that did not run on the target.
        other_nodes: nodes that make shapes, integers and truth values, or move tensors, which a
            target may leave to the CPU; other_on_target: those it did not. None: not told apart.
    """

    float_compute_nodes: int
    on_target: int
    elsewhere: tuple[str, ...] = ()
    evidence: str = ""
    other_nodes: int | None = None
    other_on_target: int | None = None

    @property
    def complete(self) -> bool:
        return self.on_target == self.float_compute_nodes

    def to_json(self) -> dict[str, Any]:
        return {
            "float_compute_nodes": self.float_compute_nodes,
            "on_target": self.on_target,
            "elsewhere": list(self.elsewhere),
            "evidence": self.evidence,
            "other_nodes": self.other_nodes,
            "other_on_target": self.other_on_target,
        }


@dataclass(frozen=True, kw_only=True)
class CannotRun:
    """The artifact was built but has no device to run on here.

    Attributes:
        placement: what the builder says of the graph's layers; None: it makes no report.
        unread: inputs of the graph that what was built ignores. Any here makes its results wrong.
    """

    reason: str
    fix: str
    placement: Placement | None = None
    unread: tuple[str, ...] = ()


@runtime_checkable
class Session(Protocol):
    """A loaded artifact, ready to run."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        """Milliseconds of each of ``repeats`` runs, device synchronised, after ``warmup`` runs."""
        ...

    def placement(self) -> Placement: ...


@runtime_checkable
class Artifact(Protocol):
    """A compiled program: files that load again without compiling."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def compile_ms(self) -> float: ...

    def load(self, graph: str = "main") -> Session | CannotRun: ...


@runtime_checkable
class Target(Protocol):
    """One runtime on one kind of device; targets inherit from it, for what is stated here once."""

    name: str
    summary: str
    default_forms: tuple[str, ...]
    """Forms to try at each site, best first; ``primitive`` is always the last resort."""
    max_opset: int
    form_options: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """What a form is told for it, by form: the way around what its kernels refuse or ignore."""
    precisions: tuple[str, ...] = ()
    """Precisions the runtime can be told to compute in, its default first; empty where the graph
    decides."""
    builds_slowly: bool = False
    """Exports do not load their files on it to see whether it takes them."""
    coarse_sines: bool = False
    """Its sines may be off by more than rotary keys bear: exports write them out."""
    contrib_gelu: bool = False
    """It has a kernel for com.microsoft's Gelu and none for ai.onnx's: exports take the former."""
    probe_seconds: float = 120.0
    """What one probe may take."""
    probe_settings: Mapping[str, str] = MappingProxyType({})
    """``CompileOptions.extra`` of probes."""

    def availability(self) -> Availability: ...

    def compile(self, program: Program, options: CompileOptions) -> Artifact:
        """Build the program for this target.

        Errors:
            mha_export.errors.TargetUnavailableError: the runtime is not here.
            RuntimeError: the runtime refused the graph; the message is its own. Where nothing is
                built, a refusal comes when the artifact is loaded.
        """
        ...
