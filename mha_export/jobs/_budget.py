"""How long a run may take, shared out among the targets that are still to be measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Budget:
    """A span of time that began when this was made.

    What one target leaves goes to those after it.

    Args:
        seconds: how long; None: no limit.
        clock: seconds from any point on.
    """

    def __init__(
        self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._clock = clock
        self._ends = clock() + self.seconds
        self._turn_ends = self._ends

    @property
    def words(self) -> str:
        """Why something was left out."""
        return f"the time was up (--budget {self.seconds:g})"

    @property
    def used_up(self) -> bool:
        return self._clock() >= self._ends

    def next_of(self, left: int) -> None:
        """The first of ``left`` targets begins: its share is counted from now."""
        now = self._clock()
        self._turn_ends = now + max(self._ends - now, 0.0) / left

    @property
    def turn_is_over(self) -> bool:
        """Whether the target at hand has had its share."""
        return self._clock() >= self._turn_ends

    def for_timing(self, left: int) -> float:
        """Seconds for the next of ``left`` timings of the target at hand."""
        return max(self._turn_ends - self._clock(), 0.0) / left
