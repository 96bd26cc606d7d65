"""Per-head arrays between an operand's own axis order and the oracle's."""

from __future__ import annotations

import numpy as np

from mha_export.operands import Heads, Layout


def to_bhsd(array: np.ndarray, heads: Heads) -> np.ndarray:
    """[b, heads, length, dim] from the operand's own axis order."""
    if heads.layout is Layout.BSM:
        b, s, _ = array.shape
        array = array.reshape(b, s, heads.heads, heads.dim)
    if heads.layout is not Layout.BHSD:
        array = array.swapaxes(1, 2)
    return array


def from_bhsd(array: np.ndarray, heads: Heads) -> np.ndarray:
    """The operand's own axis order from [b, heads, length, dim]."""
    if heads.layout is Layout.BHSD:
        return array
    array = array.swapaxes(1, 2)
    if heads.layout is Layout.BSM:
        b, s, h, d = array.shape
        array = array.reshape(b, s, h * d)
    return array
