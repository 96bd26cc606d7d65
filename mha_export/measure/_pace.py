"""How fast the machine is just now, told by a small piece of work that never changes.

A shared server slows by a tenth or two for seconds at a time, when a neighbour uses the other half
of its cores or its caches; nothing in the system's own counters shows it. The same exponentials on
every core, timed before each turn, do: they slowed by 20% where a BERT slowed by 10%.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mha_export.targets._platform import usable_cpus

ELEMENTS = 1 << 18
REPEATS = 12
SMOOTHED = 5
TOLERANCE = 0.05


class Pace:
    """Time ``exp`` over 2**18 float32 on every core, in cache; the threads wait without spinning.

    As a context manager it ends its threads. A call returns milliseconds, the better of two.
    """

    def __init__(self) -> None:
        cores = usable_cpus()
        self._pool = ThreadPoolExecutor(cores)
        self._arrays = [
            (np.ones(ELEMENTS, np.float32), np.empty(ELEMENTS, np.float32)) for _ in range(cores)
        ]

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown()

    def __call__(self) -> float:
        self._once()
        return min(self._once() for _ in range(2))

    def _once(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(_exponentials, self._arrays))
        return 1e3 * (time.perf_counter() - start)


def _exponentials(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    for _ in range(REPEATS):
        np.exp(arrays[0], out=arrays[1])


def calm_rounds(paces: Sequence[float]) -> np.ndarray:
    """Which rounds ran at the machine's own pace: [rounds] of bool.

    Those whose pace (the median of five neighbours) is within 5% of the run's best tenth.
    """
    padded = np.pad(np.asarray(paces, dtype=np.float64), SMOOTHED // 2, mode="reflect")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED), axis=1)
    calm: np.ndarray = smooth <= (1 + TOLERANCE) * np.percentile(smooth, 10)
    return calm
