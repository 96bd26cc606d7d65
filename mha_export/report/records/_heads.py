"""What is known of a model's heads, and what became of a model with other heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mha_export.report.records._codec import Record
from mha_export.report.records._export import ModelRecord
from mha_export.report.records._machine import MachineRecord
from mha_export.report.records._version import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class HeadRecord(Record):
    """One query head. Figures are None where the data could not tell them."""

    head: int
    importance: float | None = None
    entropy: float | None = None
    entropy_spread: float | None = None
    entropy_share: float | None = None
    confidence: float | None = None
    previous: float | None = None
    next: float | None = None
    same: float | None = None
    first: float | None = None
    separator: float | None = None
    offset: int | None = None
    offset_weight: float | None = None
    profile: tuple[float, ...] = ()
    """Weight by relative position, -8 to 8."""
    rare: float | None = None
    induction: float | None = None
    norm: float | None = None
    qk_rank: int | None = None
    qk_effective_rank: float | None = None
    qk_spectrum: tuple[float, ...] = ()
    vo_rank: int | None = None
    vo_effective_rank: float | None = None
    vo_spectrum: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerHeadsRecord(Record):
    """One attention. ``similarity``: CKA of the heads' contributions, [h][h]."""

    layer: int
    site: str
    q_heads: int
    kv_heads: int
    heads: tuple[HeadRecord, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionMapRecord(Record):
    """The weights of one head on one sample: rows are queries, columns keys."""

    layer: int
    head: int
    words: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class HeadsRecord(Record):
    """What ``heads`` found. ``importance_by``: how, e.g. ``central differences of 0.03125``."""

    schema_version: str = SCHEMA_VERSION
    machine: MachineRecord
    model: ModelRecord
    data: str
    samples: int
    tokens: int
    loss: str | None = None
    importance_method: str | None = None
    importance_by: str | None = None
    layers: tuple[LayerHeadsRecord, ...] = ()
    maps: tuple[AttentionMapRecord, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CurvePointRecord(Record):
    """After one more unit: heads gone so far, the searched loss, and the held-out quality."""

    removed: int
    heads: tuple[str, ...]
    loss: float
    quality: float | None = None


@dataclass(frozen=True, kw_only=True)
class SurgeryLayerRecord(Record):
    """A layer before and after. ``groups``: old key/value heads by new one, when regrouped."""

    layer: int
    site: str
    q_heads_before: int
    kv_heads_before: int
    q_heads: int
    kv_heads: int
    removed: tuple[int, ...] = ()
    padded: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    spread: float | None = None


@dataclass(frozen=True, kw_only=True)
class SurgeryRecord(Record):
    """What ``prune`` or ``regroup`` did to a model.

    Attributes:
        quality: of the written model, on samples the search did not see where there are enough.
        quality_other: of the other order of removing, or of both groupings, at the same size.
        check_max_abs: largest difference of the written model from the gated one (prune) or from
            the original (exact regrouping); None where there is nothing to be equal to.
        latency_ms: median of the original and of the written model where a goal was set.
    """

    schema_version: str = SCHEMA_VERSION
    machine: MachineRecord
    kind: Literal["prune", "regroup"]
    model: ModelRecord
    file: str
    sha256: str
    how: str
    layers: tuple[SurgeryLayerRecord, ...]
    heads_before: int
    heads_after: int
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    cache_bytes_before: int
    cache_bytes_after: int
    data: str | None = None
    samples: int = 0
    loss: str | None = None
    quality_name: str | None = None
    quality: float | None = None
    quality_other: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, tuple[CurvePointRecord, ...]] = field(default_factory=dict)
    check: str | None = None
    check_max_abs: float | None = None
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
