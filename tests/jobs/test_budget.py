"""A run's time is shared out among its targets; what one leaves goes on."""

from __future__ import annotations

import math

from mha_export.jobs._budget import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_one_leaves_goes_to_those_after_it() -> None:
    clock = Clock()
    budget = Budget(90.0, clock=clock)
    budget.next_of(3)
    assert budget.for_timing(1) == 30.0
    assert budget.for_timing(2) == 15.0
    clock.now += 10.0
    assert budget.for_timing(1) == 20.0
    budget.next_of(2)
    assert budget.for_timing(1) == 40.0


def test_one_that_took_too_long_leaves_the_others_less() -> None:
    clock = Clock()
    budget = Budget(90.0, clock=clock)
    budget.next_of(3)
    clock.now += 60.0
    assert budget.for_timing(1) == 0.0
    assert not budget.used_up
    budget.next_of(2)
    assert budget.for_timing(1) == 15.0
    clock.now += 30.0
    assert budget.used_up


def test_without_a_limit_there_is_always_time() -> None:
    budget = Budget(None)
    budget.next_of(5)
    assert budget.for_timing(7) == math.inf
    assert not budget.used_up
