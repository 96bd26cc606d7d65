"""What ``run`` says: one result per model, target, precision, graph and workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mha_export.report.records._codec import Record
from mha_export.report.records._doctor import DoctorRecord
from mha_export.report.records._export import ExportRecord
from mha_export.report.records._heads import HeadsRecord, SurgeryRecord
from mha_export.report.records._latency import LatencyRecord, RatioRecord
from mha_export.report.records._machine import MachineRecord
from mha_export.report.records._plan import PlanRecord
from mha_export.report.records._version import SCHEMA_VERSION

ResultStatus = Literal[
    "pass", "fail", "imprecise", "built", "fallback", "unsupported", "unavailable", "error"
]
CaseStatus = Literal["pass", "imprecise", "fail", "error"]


@dataclass(frozen=True, kw_only=True)
class PlacementRecord(Record):
    """Which nodes that compute in floating point ran on the target, and where the others ran.

    Attributes:
        other_nodes: nodes that make shapes, integers and truth values; other_on_target: those of
            them that ran on the target. None where the runtime does not tell them apart.
    """

    float_compute_nodes: int
    on_target: int
    elsewhere: tuple[str, ...] = ()
    evidence: str = ""
    other_nodes: int | None = None
    other_on_target: int | None = None


@dataclass(frozen=True, kw_only=True)
class CaseRecord(Record):
    """Parity on one input.

    Attributes:
        max_abs: largest ``|actual - exact|``; max_rel: largest ``|actual - exact| / |exact|`` over
            elements whose exact value is not negligible.
        bound: the largest error that still passes in the worst row; factor: the largest error in
            units of its own row's bound (1 or less passes); err_over_ensemble: max_abs over the
            worst error of the plain same-precision implementations on this input.
        nan_mismatch: elements that are NaN or infinite on one side only.
        argmax_agreement: fraction of rows whose largest channel is the same.
        output: which graph output the figures are of (the worst one).
        inputs_file: the smallest input found on which it still fails, an ``.npz``; replay: the
            command that runs it.
    """

    name: str
    status: CaseStatus
    max_abs: float | None = None
    max_rel: float | None = None
    rmse: float | None = None
    bound: float | None = None
    factor: float | None = None
    err_over_ensemble: float | None = None
    cosine: float | None = None
    nan_mismatch: int = 0
    argmax_agreement: float | None = None
    output: str | None = None
    message: str | None = None
    inputs_file: str | None = None
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class DifferenceRecord(Record):
    """Where two runs first part.

    ``stage``: projection, rotary, scores, mask, softmax or output; ``outside`` when every site
    agrees and the rest of the graph does not.
    """

    site: str
    stage: str
    message: str
    max_abs: float | None = None
    bound: float | None = None
    case: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParityRecord(Record):
    """Parity over all inputs: each figure is that of the worst case for it.

    Attributes:
        against: what was taken as exact, e.g. ``original in float64 (reference)``.
        ensemble: the plain implementations the error was judged against.
        first_difference: where the models part, when a case failed.
    """

    against: str
    max_abs: float | None = None
    max_rel: float | None = None
    rmse: float | None = None
    err_over_ensemble: float | None = None
    cosine: float | None = None
    nan_mismatch: int = 0
    by_case: tuple[CaseRecord, ...] = ()
    factor: float | None = None
    argmax_agreement: float | None = None
    ensemble: tuple[str, ...] = ()
    first_difference: DifferenceRecord | None = None


@dataclass(frozen=True, kw_only=True)
class ResultRecord(Record):
    """One model on one target: what it is, whether it is right, and how fast."""

    model: str
    model_sha256: str
    target: str
    status: ResultStatus
    variant: str | None = None
    """Which file of the export ran: a target's name, ``portable`` or ``original``."""
    variant_sha256: str | None = None
    precision: str | None = None
    graph: Literal["main", "prefill", "decode"] = "main"
    forms: Mapping[str, int] = field(default_factory=dict)
    workload: Mapping[str, int] = field(default_factory=dict)
    runtime: str | None = None
    runtime_version: str | None = None
    device: str | None = None
    reason: str | None = None
    placement: PlacementRecord | None = None
    parity: ParityRecord | None = None
    latency_ms: LatencyRecord | None = None
    vs: RatioRecord | None = None
    load_ms: float | None = None
    compile_ms: float | None = None
    first_run_ms: float | None = None
    peak_rss_mb: float | None = None
    gflops: float | None = None
    gbytes_s: float | None = None
    roofline_fraction: float | None = None
    replay: str | None = None
    signal: str | None = None
    """What killed the target's process (``SIGSEGV``, ``access violation``)."""
    last_output: tuple[str, ...] = ()
    """The last lines that a process printed before it died, hung or ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedRecord(Record):
    """What a run that was ended, or goes on still, has not measured yet.

    Attributes:
        run: digest of what is measured and how; the same run goes on from here.
        targets: names of the targets, as ``-t`` takes them.
    """

    run: str
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ResultsRecord(Record):
    """``results.json``: one machine, its results, and (so that one file is a whole report) the
    exports they come from and what this machine's targets can do.

    ``unfinished``: the file is of a run that has not ended.
    """

    schema_version: str = SCHEMA_VERSION
    machine: MachineRecord
    results: tuple[ResultRecord, ...] = ()
    exports: tuple[ExportRecord, ...] = ()
    doctor: DoctorRecord | None = None
    heads: tuple[HeadsRecord, ...] = ()
    surgeries: tuple[SurgeryRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    unfinished: UnfinishedRecord | None = None
