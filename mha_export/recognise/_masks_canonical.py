"""The canonical masks over positions, and the search for the one a keep-pattern equals.

A pattern is [s, t] bool at one pair of sizes. A structure is only named when it equals the pattern
at *every* pair of sizes, entry for entry: a mask that is off by one somewhere has no name here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mha_export.spec import CausalAlignment

Pattern = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Which keys positions alone allow; fields as in :class:`mha_export.spec.MaskSpec`."""

    causal: CausalAlignment | None = None
    left_window: int | None = None
    right_window: int | None = None
    block: int | None = None

    def pattern(self, queries: int, keys: int, offset: int) -> Pattern:
        """[s, t]: True where query ``s`` at position ``s + offset`` may see key ``t``."""
        position = np.arange(queries)[:, None] + offset
        key = np.arange(keys)[None, :]
        keep = np.ones((queries, keys), np.bool_)
        if self.causal is not None:
            keep &= key <= position
        if self.left_window is not None:
            keep &= key >= position - self.left_window
        if self.right_window is not None:
            keep &= key <= position + self.right_window
        if self.block is not None:
            keep &= key // self.block == position // self.block
        return keep


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """What a mask keeps at one pair of sizes; ``past``: the length of a cache, None without one."""

    keep: Pattern
    past: int | None = None

    @property
    def queries(self) -> int:
        return int(self.keep.shape[0])

    @property
    def keys(self) -> int:
        return int(self.keep.shape[1])

    def offset(self, causal: CausalAlignment | None) -> int:
        """The position of query 0 (the table in :mod:`mha_export.spec`)."""
        if causal is CausalAlignment.TOP_LEFT:
            return 0
        if self.past is not None:
            return self.past
        return 0 if causal is None else self.keys - self.queries

    def equals(self, structure: Structure) -> bool:
        canonical = structure.pattern(self.queries, self.keys, self.offset(structure.causal))
        return bool(np.array_equal(canonical, self.keep))


def find_structure(observed: Sequence[Observed]) -> Structure | None:
    """The one structure that equals every observed pattern, or None.

    Where queries and keys always have the same number the two alignments are the same mask; it is
    then named TOP_LEFT: query ``s`` sees keys ``t <= s``, no past is spoken of.
    """
    for candidate in _candidates(observed):
        if all(one.equals(candidate) for one in observed):
            return candidate
    return None


def _candidates(observed: Sequence[Observed]) -> Iterator[Structure]:
    """Nothing hidden first, then causal, then windows alone: ``right_window=0`` is causal."""
    yield Structure()
    for causal in (CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT, None):
        bare = Structure(causal=causal)
        yield bare
        left = _widest(observed, causal, side=1)
        right = None if causal is not None else _widest(observed, causal, side=-1)
        if left is not None:
            yield replace(bare, left_window=left)
        if right is not None:
            yield replace(bare, right_window=right)
        if left is not None and right is not None:
            yield replace(bare, left_window=left, right_window=right)
        for block in _blocks(observed):
            yield replace(bare, block=block)


def _widest(
    observed: Sequence[Observed], causal: CausalAlignment | None, *, side: int
) -> int | None:
    """How far back (side 1) or ahead (-1) the most generous query sees, at the largest sizes.

    None where that is as far as the sizes allow anywhere: then no window shows.
    """
    reach, possible = -1, -1
    for one in observed:
        if not one.keep.any():
            continue
        offset = one.offset(causal)
        query, key = np.nonzero(one.keep)
        reach = max(reach, int(np.max(side * (query + offset - key))))
        far = one.queries - 1 + offset if side == 1 else one.keys - 1 - offset
        possible = max(possible, far)
    return reach if 0 <= reach < possible else None


def _blocks(observed: Sequence[Observed]) -> Iterator[int]:
    """Chunk sizes that could explain where a row's first visible key jumps."""
    sizes: set[int] = set()
    for one in observed:
        if one.queries == 0 or one.keys == 0:
            continue
        seen = one.keep.any(axis=1)
        first = np.argmax(one.keep, axis=1)[seen]
        sizes |= {int(n) for n in first[first > 0][:1]}
    yield from sorted(sizes)
