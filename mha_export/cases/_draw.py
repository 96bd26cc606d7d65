"""Numbers that are the same bytes for the same seed under every numpy.

numpy promises a stable stream for ``PCG64.random_raw`` and ``SeedSequence`` but not for the
distributions of ``Generator``; so everything here is made from raw words by exact arithmetic.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from mha_export.oracle import Floats
from mha_export.spec import DType

LARGEST = {DType.FP16: 65504.0, DType.BF16: 3.3e38, DType.FP32: 3.4e38, DType.FP64: 1.7e308}


class Stream:
    """Draws of one case.

    Args:
        seed: the user's seed.
        name: of the case, so that adding a case leaves the others as they are.
    """

    def __init__(self, seed: int, name: str) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))

    def normal(self, *shape: int) -> Floats:
        """Near-Gaussian numbers of mean 0 and variance 1: sums of four 16-bit uniforms."""
        words = self._words(shape)
        total = np.zeros(shape, np.float64)
        for shift in (0, 16, 32, 48):
            total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64)
        spread: Floats = (total - 4 * 32767.5) * (1.7320508075688772 / 65536)
        return spread

    def uniform(self, *shape: int) -> Floats:
        """Numbers in [0, 1) with 32 bits."""
        result: Floats = (self._words(shape) >> np.uint64(32)).astype(np.float64) * 2.0**-32
        return result

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """Integers in [low, high)."""
        return low + np.floor(self.uniform(*shape) * (high - low)).astype(np.int64)

    def _words(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        count = int(np.prod(shape, dtype=np.int64))
        return np.asarray(self._bits.random_raw(count), np.uint64).reshape(shape)


def rounded(x: Floats, dtype: DType) -> Floats:
    """``x`` rounded to the nearest number of ``dtype`` (ties to even), as float64."""
    if dtype is DType.FP64:
        return x
    if dtype is DType.FP16:
        return x.astype(np.float16).astype(np.float64)
    single = x.astype(np.float32)
    if dtype is DType.FP32:
        return single.astype(np.float64)
    bits = single.view(np.uint32).astype(np.uint64)
    bits = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(
        0xFFFF0000
    )
    brain = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(single), brain, single).astype(np.float64)


def short_factor(x: float) -> float:
    """``x`` cut to four significant bits: a factor that the last bits of a product can't change."""
    mantissa, exponent = np.frexp(x)
    return float(np.ldexp(np.floor(mantissa * 16) / 16, exponent))
