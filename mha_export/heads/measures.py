"""How far a model with other heads is from the model as it was, or from what its labels say.

A measure gives a loss a sample, which importance and pruning work with, and one quality, higher
is better, which people read. The formulas use what numpy and torch share, so that the gradient is
of the very loss that differences are taken of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mha_export.errors import InputError
from mha_export.heads.data import Batch

Floats = NDArray[np.float64]
TEMPERATURE = 0.1
"""Of the softmax over cosines to class means."""


class Measure(Protocol):
    """Compares outputs with those of the whole model, or with labels."""

    @property
    def name(self) -> str: ...

    @property
    def quality_name(self) -> str: ...

    @property
    def agreement(self) -> bool:
        """Whether the loss is least, and its gradient zero, at the model as it was."""
        ...

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        """[n]: one loss a sample; ``xp`` is numpy or torch, ``outputs`` an array of it."""
        ...

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        """Of all batches together, at most 1."""
        ...


def pooled(xp: Any, hidden: Any, batch: Batch) -> Any:
    """Unit sentence embeddings [n, m]: the mean over tokens, or the output itself at rank 2."""
    if hidden.ndim == 3:
        weights = batch.keep.astype(np.float64)
        weights = xp.asarray(weights / np.maximum(weights.sum(-1, keepdims=True), 1.0))
        hidden = (hidden * weights[:, :, None]).sum(1)
    return hidden / xp.sqrt((hidden**2).sum(-1, keepdims=True))


def _log_softmax(xp: Any, logits: Any) -> Any:
    shifted = logits - xp.amax(logits, -1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))


def _token_mean(xp: Any, values: Any, keep: np.ndarray) -> Any:
    weights = keep.astype(np.float64)
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1.0)
    return (values * xp.asarray(weights)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """1 - cosine to the whole model's sentence embedding.

    Quality: Spearman's rank correlation of the similarities of all pairs of sentences.
    """

    name: str = "embedding"
    quality_name: str = "ranking of similarities"
    agreement: bool = True

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        mine = pooled(xp, outputs, batch)
        theirs = xp.asarray(pooled(np, reference, batch))
        return 1.0 - (mine * theirs).sum(-1)

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        mine, theirs = (
            np.concatenate([pooled(np, a, b) for a, b in zip(arrays, batches, strict=True)])
            for arrays in (outputs, references)
        )
        rows, columns = np.triu_indices(len(mine), 1)
        if len(rows) < 2:
            return float((mine * theirs).sum(-1).mean())
        return rank_correlation((mine @ mine.T)[rows, columns], (theirs @ theirs.T)[rows, columns])


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """KL of the next-token (or class) distribution from the whole model's, mean over tokens.

    Quality: how often the likeliest token is the same.
    """

    name: str = "kl"
    quality_name: str = "same first choice"
    agreement: bool = True

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        theirs = xp.asarray(_log_softmax(np, reference))
        apart = (xp.exp(theirs) * (theirs - _log_softmax(xp, outputs))).sum(-1)
        return _token_mean(xp, apart, batch.keep) if apart.ndim == 2 else apart

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        same, count = 0.0, 0.0
        for mine, theirs, batch in zip(outputs, references, batches, strict=True):
            equal = mine.argmax(-1) == theirs.argmax(-1)
            kept = batch.keep if equal.ndim == 2 else np.ones(equal.shape, bool)
            same, count = same + float((equal & kept).sum()), count + float(kept.sum())
        return same / count


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """Cross-entropy of each token given those before it. Quality: exp(loss as it was - loss)."""

    name: str = "next-token"
    quality_name: str = "likelihood a token, relative"
    agreement: bool = False

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        if batch.ids is None or outputs.ndim != 3:
            raise InputError(
                "a next-token loss needs token ids and an output of logits [batch, seq, words]",
                fix="choose another --loss, or the model's logits with --output",
            )
        wanted = np.eye(outputs.shape[-1])[batch.ids[:, 1:]]
        likely = (_log_softmax(xp, outputs[:, :-1]) * xp.asarray(wanted)).sum(-1)
        return -_token_mean(xp, likely, batch.keep[:, 1:])

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        mine, theirs = (
            np.concatenate(
                [self.losses(np, a, a, b) for a, b in zip(arrays, batches, strict=True)]
            ).mean()
            for arrays in (outputs, references)
        )
        return float(np.exp(theirs - mine))


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Cross-entropy of the labels: class numbers [n] on logits [n, c], or token labels [n, s].

    A label below zero doesn't count. Quality: accuracy.
    """

    name: str = "labels"
    quality_name: str = "accuracy"
    agreement: bool = False

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        labels = _labels(batch)
        if labels.shape != tuple(outputs.shape[:-1]):
            raise InputError(
                f"labels of shape {list(labels.shape)} don't fit logits of shape "
                f"{list(outputs.shape)}",
                fix="give a class a sample for [batch, classes], a class a token for "
                "[batch, seq, classes]; for embeddings use --loss prototypes",
            )
        wanted = np.eye(outputs.shape[-1])[np.maximum(labels, 0)]
        likely = (_log_softmax(xp, outputs) * xp.asarray(wanted)).sum(-1)
        if likely.ndim == 2:
            return -_token_mean(xp, likely, (labels >= 0) & batch.keep)
        return -likely

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        right = [
            (a.argmax(-1) == _labels(b))[_labels(b) >= 0]
            for a, b in zip(outputs, batches, strict=True)
        ]
        return float(np.concatenate(right).mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Prototypes:
    """Cross-entropy of class labels, the logits being cosines to class means over 0.1.

    For models that give embeddings. ``centres`` [c, m] are the unit mean embeddings of each class
    under the whole model. Quality: accuracy.
    """

    centres: Floats
    name: str = "prototypes"
    quality_name: str = "accuracy"
    agreement: bool = False

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        logits = pooled(xp, outputs, batch) @ xp.asarray(self.centres.T) / TEMPERATURE
        wanted = np.eye(len(self.centres))[_labels(batch)]
        return -(_log_softmax(xp, logits) * xp.asarray(wanted)).sum(-1)

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        right = [
            (pooled(np, a, b) @ self.centres.T).argmax(-1) == _labels(b)
            for a, b in zip(outputs, batches, strict=True)
        ]
        return float(np.concatenate(right).mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """A loss of the user's: ``function(outputs, batch)`` gives [n]. Quality: minus the mean."""

    function: Callable[[Any, Batch], Any]
    name: str = "given"
    quality_name: str = "minus the loss"
    agreement: bool = False

    def losses(self, xp: Any, outputs: Any, reference: Floats, batch: Batch) -> Any:
        return self.function(outputs, batch)

    def quality(
        self, outputs: Sequence[Floats], references: Sequence[Floats], batches: Sequence[Batch]
    ) -> float:
        pairs = zip(outputs, batches, strict=True)
        return -float(np.concatenate([self.function(a, b) for a, b in pairs]).mean())


def _labels(batch: Batch) -> np.ndarray:
    if batch.labels is None:
        raise InputError(
            "this loss needs labels, and the data hold none for every sample",
            fix='add a "labels" array to the .npz, or a "label" to every line of the .jsonl',
        )
    return batch.labels


def prototypes(references: Sequence[Floats], batches: Sequence[Batch]) -> Prototypes:
    """The measure with the class means of these embeddings."""
    vectors = np.concatenate([pooled(np, a, b) for a, b in zip(references, batches, strict=True)])
    labels = np.concatenate([_labels(batch) for batch in batches])
    classes = np.eye(int(labels.max()) + 1)[labels]
    sums = classes.T @ vectors  # of the direction of the means; zero for a class without samples
    lengths = np.linalg.norm(sums, axis=-1, keepdims=True)
    return Prototypes(centres=sums / np.maximum(lengths, 1e-30))


PLAIN: Mapping[str, Callable[[], Measure]] = {
    "embedding": Embedding,
    "kl": Divergence,
    "next-token": NextToken,
    "labels": Labelled,
}


def measure_named(
    name: str,
    references: Sequence[Floats],
    batches: Sequence[Batch],
    *,
    output: str = "",
) -> Measure:
    """A measure by name; ``auto``: ``kl`` for an output of that name or width, else ``embedding``.

    Errors:
        InputError: no such measure.
    """
    if name == "auto":
        name = "kl" if "logit" in output.lower() else "embedding"
    if name == "prototypes":
        return prototypes(references, batches)
    if name not in PLAIN:
        raise InputError(
            f"there is no loss {name!r}", fix=f"choose one of {', '.join((*PLAIN, 'prototypes'))}"
        )
    return PLAIN[name]()


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's: the correlation of the ranks; ties share their mean rank."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum() / scale) if scale else 1.0


def _ranks(values: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    _, inverse, counts = np.unique(values[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = np.empty(len(values))
    ranks[order] = ((2 * ends - counts - 1) / 2.0)[inverse]
    return ranks
