"""In which order heads go: all scored once, or scored again after each that went.

A head that looks useless can carry the model once its twin is gone, so the order matters:
*one-shot* removes by the scores of the whole model; *greedy* removes the head whose absence costs
least given those already gone, and scores again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mha_export.heads.gates import Head
from mha_export.heads.scoring import Scorer

Order = Literal["greedy", "one-shot"]
Unit = tuple[Head, ...]
"""Heads that go together: one, or the query heads of one key/value head."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """After one more unit went: how many heads are gone, the loss where it was searched, and the
    quality on samples the search did not see (None where it was not asked for).
    """

    unit: Unit
    removed: int
    loss: float
    quality: float | None = None


def one_shot(units: Sequence[Unit], scores: Sequence[float]) -> list[Unit]:
    """Units from the least to the most important by ``scores``."""
    order = sorted(range(len(units)), key=lambda index: (scores[index], units[index]))
    return [units[index] for index in order]


def greedy(
    scorer: Scorer,
    units: Sequence[Unit],
    *,
    count: int,
    shortlist: int | None = None,
    told: Callable[[str], None] = lambda step: None,
) -> list[Unit]:
    """The first ``count`` units to go, each the one that costs least after those before it.

    ``shortlist``: of those left only so many are tried each time, the ones that cost least when
    last tried; None: all.
    """
    left = list(units)
    gone: list[Head] = []
    order: list[Unit] = []
    cost = {unit: scorer.loss(unit) for unit in left}
    while left and len(order) < count:
        told(f"greedy: {len(order) + 1} of {count}")
        base = scorer.loss(gone)
        tried = sorted(left, key=lambda unit: (cost[unit], unit))[:shortlist]
        for unit in tried:
            cost[unit] = scorer.loss([*gone, *unit]) - base
        best = min(tried, key=lambda unit: (cost[unit], unit))
        order.append(best)
        gone += best
        left.remove(best)
    return order


def curve(
    scorer: Scorer, order: Sequence[Unit], *, judge: Scorer | None = None
) -> tuple[Step, ...]:
    """Loss (and quality, by ``judge``) after each unit of ``order``."""
    gone: list[Head] = []
    steps = []
    for unit in order:
        gone += unit
        steps.append(
            Step(
                unit=unit,
                removed=len(gone),
                loss=scorer.loss(gone),
                quality=None if judge is None else judge.quality(gone),
            )
        )
    return tuple(steps)
