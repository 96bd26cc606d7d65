"""What a head looks at, averaged over real queries: how sharply, where, and at which words.

For each head and each query that is not padding, from its weights P over the keys it may see:

* ``entropy`` ``-sum P ln P`` in nats, its standard deviation over queries, and its mean as a share
  of ``ln n`` for n visible keys; ``confidence`` ``max P`` (Voita et al. 2019);
* ``previous``, ``next``, ``same``, ``first``, ``separator``: weight on those keys;
* ``offset`` the relative position with the most weight, and its weight; ``profile``, the weight by
  relative position from -8 to 8;
* ``rare``: weight on the rarest word of the sample (by its count in the data; separators and
  padding left out) over what uniform weights would put there;
* ``induction``: on a random sequence said twice, the weight of a token of the second half on the
  one after its first occurrence (Olsson et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mha_export.heads.data import Batch
from mha_export.heads.probing import Seen

Floats = NDArray[np.float64]
REACH = 8
"""Relative positions of the offset profile, to either side."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Means over queries of one head; names as in the module's docstring."""

    entropy: float
    entropy_spread: float
    entropy_share: float
    confidence: float
    previous: float
    next: float
    same: float
    first: float
    separator: float | None
    offset: int
    offset_weight: float
    profile: tuple[float, ...]
    rare: float | None
    induction: float | None = None


@dataclass(kw_only=True)
class PatternSum:
    """The pattern of one layer's heads, batch after batch."""

    heads: int
    queries: float = 0.0
    sums: dict[str, Floats] = field(default_factory=dict)
    rare_chance: float = 0.0
    has_separator: bool = False
    has_ids: bool = False

    def add(self, seen: Seen, *, counts: NDArray[np.int64] | None, separator: int | None) -> None:
        """Take in one batch. ``counts``: how often each token id occurs in the data."""
        weights, keep = seen.weights, seen.batch.keep
        b, _, s, t = weights.shape
        usable = np.zeros((b, s), bool)
        usable[:, : min(s, keep.shape[1])] = keep[:, :s]
        self.queries += float(usable.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(weights > 0, np.log(weights), 0.0)
        entropy = -(weights * logs).sum(-1)
        most = np.log(np.maximum(seen.visible, 2.0))
        self._sum("entropy", entropy, usable)
        self._sum("entropy_squared", entropy**2, usable)
        self._sum("entropy_share", entropy / most, usable)
        self._sum("confidence", weights.max(-1), usable)
        self._sum("first", _at_first(weights, keep), usable)
        positions = np.arange(s)[:, None] + (t - s)
        distance = np.arange(t)[None, :] - positions
        for offset in range(-REACH, REACH + 1):
            self._sum(f"offset {offset}", (weights * (distance == offset)).sum(-1), usable)
        if seen.batch.ids is not None and seen.batch.ids.shape[1] == t:
            self._words(weights, seen.batch, usable, counts, separator)

    def _words(
        self,
        weights: Floats,
        batch: Batch,
        usable: NDArray[np.bool_],
        counts: NDArray[np.int64] | None,
        separator: int | None,
    ) -> None:
        ids = batch.ids
        assert ids is not None
        if separator is not None:
            self.has_separator = True
            marks = (ids == separator) & batch.keep
            self._sum("separator", (weights * marks[:, None, None, :]).sum(-1), usable)
        if counts is None:
            return
        self.has_ids = True
        ordinary = batch.keep.copy()
        ordinary[:, 0] = False
        if separator is not None:
            ordinary &= ids != separator
        rank = np.where(ordinary, counts[ids], np.iinfo(np.int64).max)
        rarest = (rank == rank.min(-1, keepdims=True)) & ordinary
        chance = rarest.sum(-1) / np.maximum(batch.keep.sum(-1), 1)
        self.rare_chance += float((chance[:, None] * usable).sum())
        self._sum("rare", (weights * rarest[:, None, None, :]).sum(-1), usable)

    def _sum(self, name: str, values: Floats, usable: NDArray[np.bool_]) -> None:
        total = (values * usable[:, None, :]).sum((0, 2))
        self.sums[name] = self.sums.get(name, np.zeros(self.heads)) + total

    def patterns(self) -> tuple[Pattern, ...]:
        """One pattern a head."""
        count = max(self.queries, 1.0)
        mean = {name: total / count for name, total in self.sums.items()}
        spread = np.sqrt(np.maximum(mean["entropy_squared"] - mean["entropy"] ** 2, 0.0))
        offsets = list(range(-REACH, REACH + 1))
        profile = np.stack([mean[f"offset {offset}"] for offset in offsets])
        best = profile.argmax(0)
        return tuple(
            Pattern(
                entropy=float(mean["entropy"][h]),
                entropy_spread=float(spread[h]),
                entropy_share=float(mean["entropy_share"][h]),
                confidence=float(mean["confidence"][h]),
                previous=float(mean["offset -1"][h]),
                next=float(mean["offset 1"][h]),
                same=float(mean["offset 0"][h]),
                first=float(mean["first"][h]),
                separator=float(mean["separator"][h]) if self.has_separator else None,
                offset=offsets[best[h]],
                offset_weight=float(profile[best[h], h]),
                profile=tuple(float(x) for x in profile[:, h]),
                rare=float(self.sums["rare"][h] / self.rare_chance)
                if self.has_ids and self.rare_chance
                else None,
            )
            for h in range(self.heads)
        )


def _at_first(weights: Floats, keep: NDArray[np.bool_]) -> Floats:
    """Weight on the first token that is not padding."""
    first = keep.argmax(-1)
    picked: Floats = np.take_along_axis(
        weights, np.broadcast_to(first[:, None, None, None], (*weights.shape[:3], 1)), axis=-1
    )[..., 0]
    return picked


def token_counts(batches: Sequence[Batch]) -> NDArray[np.int64] | None:
    """How often each token id occurs, padding left out; None without token ids."""
    found = [batch.ids[batch.keep] for batch in batches if batch.ids is not None]
    return np.bincount(np.concatenate(found)) if found else None


def repeated_rows(vocabulary: int, *, length: int = 12, rows: int = 8, seed: int = 0) -> np.ndarray:
    """Random token ids [rows, 2 * length], the second half the first again."""
    half = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    return np.concatenate([half, half], axis=1)


def induction(seen: Seen) -> Floats:
    """[h]: on ``repeated_rows``, the weight on the token after the first occurrence."""
    weights = seen.weights
    length = weights.shape[-1] // 2
    queries = np.arange(length, 2 * length)
    picked: Floats = weights[:, :, queries, queries - length + 1].mean((0, 2))
    return picked
