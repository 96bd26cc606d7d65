"""What ``compare`` says of two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mha_export.report.records._codec import Record
from mha_export.report.records._results import CaseRecord, CaseStatus, DifferenceRecord
from mha_export.report.records._version import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class SideRecord(Record):
    """One of the two: a model and what ran it."""

    model: str
    sha256: str
    engine: str


@dataclass(frozen=True, kw_only=True)
class SitePairRecord(Record):
    """Two sites that stand for each other; ``stage`` is where they part, None when they agree.

    ``unmatched``: the other model has no such site (``a`` or ``b`` is None).
    """

    a: str | None
    b: str | None
    status: Literal["equal", "different", "not_compared", "unmatched"]
    stage: str | None = None
    max_abs: float | None = None
    bound: float | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(Record):
    """Whether two models are equal on adversarial inputs, and where they first part.

    Attributes:
        equal: every case of every output lies within its bound.
        outputs: each input case, its worst output's figures.
    """

    schema_version: str = SCHEMA_VERSION
    a: SideRecord
    b: SideRecord
    equal: bool
    status: CaseStatus = "pass"
    first_difference: DifferenceRecord | None = None
    outputs: tuple[CaseRecord, ...] = ()
    sites: tuple[SitePairRecord, ...] = ()
    against: str = ""
    ensemble: tuple[str, ...] = ()
    seed: int = 0
    replay: str | None = None
    notes: tuple[str, ...] = ()
