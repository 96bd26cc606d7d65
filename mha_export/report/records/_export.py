"""What ``inspect`` and ``export`` say of a model: its sites, and one variant per target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mha_export.report.records._cache import CacheRecord
from mha_export.report.records._codec import Record
from mha_export.report.records._version import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """The source model. ``opsets`` maps a domain (``""`` is ai.onnx) to its version."""

    name: str
    sha256: str
    opsets: Mapping[str, int] = field(default_factory=dict)
    producer: str | None = None
    nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class ReasonRecord(Record):
    """Why a softmax was refused, or a site may not be replaced; ``code`` is for scripts."""

    code: str
    message: str
    value: str | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteRecord(Record):
    """One softmax or fused attention node.

    Attributes:
        spec: as :meth:`mha_export.spec.AttentionSpec.to_json` states it; None unless an attention.
    """

    id: str
    verdict: Literal["attention", "not_attention", "rejected"]
    fused_as: str | None = None
    replaceable: bool = False
    spec: Mapping[str, Any] | None = None
    nodes: tuple[str, ...] = ()
    reason: ReasonRecord | None = None


@dataclass(frozen=True, kw_only=True)
class ProofCaseRecord(Record):
    """One input of a proof: error and bound in the unit of the output."""

    name: str
    status: Literal["pass", "imprecise", "fail"]
    max_err: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class ProofRecord(Record):
    """How a rewritten site was shown to compute the same thing.

    Attributes:
        engine: what ran the rewritten graph.
        against: ``oracle`` (float64 definition), ``original`` (the replaced nodes), or both.
        cases: how many inputs.
        max_err, bound: of the case whose error is the largest fraction of its bound.
        representative: id of the site that was run where this one is equal to it up to weights.
        weights: ``structural`` (bindings checked), ``sampled`` or ``full``.
        by_case: each input, where kept.
    """

    engine: str
    against: tuple[str, ...]
    cases: int
    max_err: float | None = None
    bound: float | None = None
    representative: str | None = None
    weights: Literal["structural", "sampled", "full"] = "full"
    by_case: tuple[ProofCaseRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteOutcomeRecord(Record):
    """What became of one site in one variant. ``reason`` says why it was kept or undone."""

    form: str | None
    params: Mapping[str, Any] = field(default_factory=dict)
    status: Literal["fused", "lowered", "kept", "proof_failed"] = "kept"
    reason: str | None = None
    proof: ProofRecord | None = None


@dataclass(frozen=True, kw_only=True)
class VariantRecord(Record):
    """One emitted graph.

    Attributes:
        file: relative to the folder of ``export.json``.
        refusal: why the target does not load it, where it does not load the original either.
    """

    target: str
    graph: Literal["main", "prefill", "decode"] = "main"
    file: str
    dtype: str
    opset: int
    sites: Mapping[str, SiteOutcomeRecord] = field(default_factory=dict)
    sha256: str | None = None
    nodes: int | None = None
    notes: tuple[str, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExportRecord(Record):
    """``export.json``, and with no variants what ``inspect --json`` prints."""

    schema_version: str = SCHEMA_VERSION
    model: ModelRecord
    sites: tuple[SiteRecord, ...] = ()
    variants: tuple[VariantRecord, ...] = ()
    notes: tuple[str, ...] = ()
    cache: CacheRecord | None = None


InspectRecord = ExportRecord
