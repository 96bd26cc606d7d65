"""What became of a decoder's cache in an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mha_export.report.records._codec import Record


@dataclass(frozen=True, kw_only=True)
class StepProofRecord(Record):
    """How the cached decoder, stepped over sequences, compared with the source on the whole.

    Attributes:
        engine: what ran the steps. against: what is taken as right.
        tokens: length of the sequences. cases: their kinds. steps: how many were run in all.
        max_err, bound: of the output whose error is the largest fraction of its bound.
    """

    engine: str
    against: str
    status: Literal["pass", "imprecise", "fail"]
    tokens: int
    cases: tuple[str, ...]
    steps: int
    max_err: float | None = None
    bound: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class CacheRecord(Record):
    """The cache of every graph of an export.

    Attributes:
        asked: the ``--cache`` option.
        state: ``kept`` as it was, ``added``, or ``converted`` from concat to static.
        layout: inputs and outputs that hold it (docs/caches.md), where they can be stated.
        proof: of a cache that was added or converted.
    """

    asked: Literal["keep", "concat", "static"]
    state: Literal["kept", "added", "converted"]
    layout: Mapping[str, Any] | None = None
    proof: StepProofRecord | None = None
