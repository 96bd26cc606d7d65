"""Where a query stands among the keys: the offset every position rule counts from.

Query ``s`` is at position ``i = s + offset`` (the table in :mod:`mha_export.spec`).
"""

from __future__ import annotations

from enum import Enum, auto

from mha_export.spec import AttentionSpec, CausalAlignment


class Offset(Enum):
    """What the position of query 0 is."""

    ZERO = auto()
    PAST = auto()
    """The length of the past: a cache grown by concat."""
    LENGTHS = auto()
    """``kv_lengths[b] - q_len``: one number a batch row."""
    DIFFERENCE = auto()
    """``kv_len - q_len``: bottom-right without a past, lengths not known to be equal."""


def is_square(spec: AttentionSpec) -> bool:
    """Whether queries and keys are provably of one length (then the alignments coincide)."""
    if spec.cache is not None or spec.cross:
        return False
    if spec.q_len == spec.kv_len:
        return True
    one_input = spec.projections is not None and spec.kv_source == "own"
    return one_input and isinstance(spec.q_len, str) and isinstance(spec.kv_len, str)


def offset_of(spec: AttentionSpec) -> Offset:
    """The offset of a spec's queries."""
    if spec.mask.causal is CausalAlignment.TOP_LEFT:
        return Offset.ZERO
    if spec.uses_lengths:
        return Offset.LENGTHS
    if spec.cache is not None:
        return Offset.PAST
    if spec.mask.causal is CausalAlignment.BOTTOM_RIGHT and not is_square(spec):
        return Offset.DIFFERENCE
    return Offset.ZERO
