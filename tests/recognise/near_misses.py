"""Graphs that differ from a recognised attention by one edit.

Each :class:`Edit` changes one choice of a positive; :func:`near_misses` applies every edit to every
positive it makes sense for. What must come of it is stated: refused, recognised but not
replaceable, or recognised as what it truly is (then the oracle decides, and ``told_by`` names what
in the spec must differ from the positive's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spellings import PLAIN, POSITIVES, SHARED, Choices

Outcome = Literal["refused", "kept", "true"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change.

    Attributes:
        changes: what becomes of the choices.
        outcome: ``refused``: no site; ``kept``: a site that may not be replaced; ``true``: a site
            that the oracle confirms, or a refusal.
        fits: to which positives it applies.
        told_by: fields of the spec's JSON that show the edit, with the values they must have
            (a callable gets the choices).
        drops: parts of the positive that the edit replaces, left out of ``told_by`` checks.
    """

    changes: Mapping[str, Any]
    outcome: Outcome
    fits: Callable[[Choices], bool]
    told_by: Mapping[str, Any] | None = None


def _plain_heads(c: Choices) -> bool:
    return (
        c.projection in ("separate", "split", "slice")
        and c.split == "plain"
        and c.merge == "plain"
        and c.cache == "none"
        and c.dim == c.value_dim
    )


def _separate(c: Choices) -> bool:
    return _plain_heads(c) and c.projection == "separate"


def _plain_merge(c: Choices) -> bool:
    return c.merge == "plain" and c.split == "plain" and c.weighted == "matmul"


def _matmul(c: Choices) -> bool:
    return c.product == "matmul" and c.split == "plain" and c.share in ("none", "expand", "gather")


def _square(c: Choices) -> bool:
    return _matmul(c) and not c.cross and c.cache == "none" and "late" not in c.softmax


EDITS: Mapping[str, Edit] = {
    "heads-split-transposed": Edit(
        changes={"split": "transposed"}, outcome="true", fits=_plain_heads
    ),
    "key-heads-split-transposed": Edit(
        changes={"key_split": "transposed"}, outcome="true", fits=_separate
    ),
    "key-heads-reversed": Edit(changes={"key_split": "reversed"}, outcome="true", fits=_separate),
    "heads-split-without-transpose": Edit(
        changes={"split": "untransposed"}, outcome="true", fits=_plain_heads
    ),
    "key-split-without-transpose": Edit(
        changes={"key_split": "untransposed"}, outcome="true", fits=_separate
    ),
    "batch-taken-for-length": Edit(
        changes={"split": "swapped-batch"}, outcome="true",
        fits=lambda c: _plain_heads(c) and c.mask == "none" and not c.cross,
    ),
    "heads-merged-without-transpose": Edit(
        changes={"merge": "untransposed"}, outcome="true", fits=_plain_merge
    ),
    "channels-merged-first": Edit(
        changes={"merge": "channels-first"}, outcome="true", fits=_plain_merge
    ),
    "heads-tiled": Edit(
        changes={"share": "tile"}, outcome="true",
        fits=lambda c: c.share in ("expand", "tile-inner") and c.kv_heads == 2,
        told_by={"kv_heads": 4},
    ),
    "heads-gathered-tiled": Edit(
        changes={"share": "gather-tiled"}, outcome="true",
        fits=lambda c: c.share == "gather", told_by={"kv_heads": 4},
    ),
    "heads-joined-tiled": Edit(
        changes={"share": "concat-tiled"}, outcome="true",
        fits=lambda c: c.share.startswith("concat"), told_by={"kv_heads": 4},
    ),
    "causal-sees-one-more": Edit(
        changes={"mask": "causal:1"}, outcome="true", fits=lambda c: c.mask == "causal",
        told_by={"causal": None},
    ),
    "causal-sees-one-less": Edit(
        changes={"mask": "causal:-1"}, outcome="true", fits=lambda c: c.mask == "causal",
        told_by={"causal": None},
    ),
    "window-one-longer": Edit(
        changes={"mask": "window:3"}, outcome="true", fits=lambda c: c.mask == "window:2",
        told_by={"left_window": 3},
    ),
    "window-one-shorter": Edit(
        changes={"mask": "window:1"}, outcome="true", fits=lambda c: c.mask == "window:2",
        told_by={"left_window": 1},
    ),
    "padding-of-queries": Edit(
        changes={"mask": "query-padding"}, outcome="true",
        fits=lambda c: c.mask == "padding" and not c.cross,
        told_by={"mask": ["keep"]},
    ),
    "fill-that-does-not-hide": Edit(
        changes={"mask": "weak:-1"}, outcome="refused",
        fits=lambda c: c.mask == "padding" and not c.cross,
    ),
    "mask-before-softcap": Edit(
        changes={"mask": "inside:causal"}, outcome="refused",
        fits=lambda c: c.softcap is not None and c.mask == "causal",
    ),
    "bias-before-softcap": Edit(
        changes={"mask": "inside:bias"}, outcome="refused",
        fits=lambda c: c.softcap is not None and c.mask == "none",
    ),
    "uncapped-by-another-number": Edit(
        changes={"uncapped": 3.0}, outcome="true", fits=lambda c: c.softcap is not None,
        told_by={"softcap": 3.0, "scale": 1.5 * 8**-0.5},
    ),
    "window-open-to-the-future": Edit(
        changes={"mask": "open-window:2"}, outcome="true", fits=lambda c: c.mask == "window:2",
        told_by={"causal": None, "left_window": 2},
    ),
    "scores-times-flags": Edit(
        changes={"mask": "multiplied"}, outcome="refused", fits=lambda c: c.mask == "padding"
    ),
    "flags-added": Edit(
        changes={"mask": "added"}, outcome="true", fits=lambda c: c.mask == "padding",
        told_by={"mask": ["bias"]},
    ),
    "softmax-over-queries": Edit(
        changes={"axis": -2}, outcome="refused",
        fits=lambda c: c.softmax in ("op", "max", "exp") and c.sink == "none" and _matmul(c),
    ),
    "softmax-over-heads": Edit(
        changes={"axis": 1}, outcome="refused",
        fits=lambda c: c.softmax == "op" and c.sink == "none" and _matmul(c),
    ),
    "softmax-of-old-default-axis": Edit(
        changes={"opset": 12, "softmax": "default"}, outcome="refused",
        fits=lambda c: c == PLAIN.but(softmax="default"),
    ),
    "sum-over-another-axis": Edit(
        changes={"softmax": "sum-other-axis"}, outcome="refused", fits=lambda c: c.softmax == "exp"
    ),
    "maximum-of-the-queries": Edit(
        changes={"softmax": "max-of-queries"}, outcome="true", fits=lambda c: c.softmax == "max"
    ),
    "minimum-for-maximum": Edit(
        changes={"softmax": "max-is-min"}, outcome="true", fits=lambda c: c.softmax == "max"
    ),
    "logarithm-over-queries": Edit(
        changes={"axis": -2}, outcome="refused",
        fits=lambda c: c.softmax in ("log-softmax", "logsumexp"),
    ),
    "one-added-to-the-sum": Edit(
        changes={"softmax": "exp-plus-one"}, outcome="true", fits=lambda c: c.softmax == "exp",
        told_by={"sinks": True},
    ),
    "one-added-to-the-late-sum": Edit(
        changes={"softmax": "exp-late-plus-one"}, outcome="true",
        fits=lambda c: c.softmax == "exp-late", told_by={"sinks": True},
    ),
    "blended-by-the-same-flags": Edit(
        changes={"mask": "blend:inverted"}, outcome="refused", fits=lambda c: c.mask == "blend"
    ),
    "blended-by-two-flags": Edit(
        changes={"mask": "blend:other"}, outcome="refused", fits=lambda c: c.mask == "blend"
    ),
    "scale-on-one-of-two": Edit(
        changes={"scale": "one-of-two"}, outcome="true", fits=lambda c: c.scale == "both",
        told_by={"scale": 8**-0.25},
    ),
    "scale-dropped": Edit(
        changes={"scale": "none"}, outcome="true",
        fits=lambda c: c.scale in ("after", "query", "divide"),
        told_by={"scale": 1.0},
    ),
    "scale-twice": Edit(
        changes={"key_factor": 8**-0.5}, outcome="true",
        fits=lambda c: c.scale == "query" and c.dim == 8, told_by={"scale": 1 / 8},
    ),
    "scale-after-the-bias": Edit(
        changes={"scale": "last"}, outcome="true", fits=lambda c: c.mask == "bias",
    ),
    "scores-weighted-by-key": Edit(
        changes={"extra": "key-weight"}, outcome="refused",
        fits=lambda c: c.extra == "none" and _matmul(c) and c.share == "none",
    ),
    "weights-are-an-output": Edit(
        changes={"extra": "weights-output"}, outcome="true", fits=lambda c: c.extra == "none"
    ),
    "mean-weights-are-an-output": Edit(
        changes={"extra": "weights-mean"}, outcome="true",
        fits=lambda c: c.extra == "none" and c.split == "plain" and c.share != "broadcast",
    ),
    "scores-are-an-output": Edit(
        changes={"extra": "scores-output"}, outcome="true", fits=lambda c: c.extra == "none"
    ),
    "key-for-value": Edit(
        changes={"value_from": "key"}, outcome="true", fits=lambda c: c.dim == c.value_dim
    ),
    "value-scaled": Edit(
        changes={"value_from": "scaled"}, outcome="true", fits=lambda c: c.value_from == "value"
    ),
    "query-for-key": Edit(
        changes={"product": "query-twice"}, outcome="true",
        fits=lambda c: _matmul(c) and c.kv_heads == 4 and not c.cross and c.cache == "none",
    ),
    "weights-transposed": Edit(
        changes={"weighted": "transposed-weights"}, outcome="refused",
        fits=lambda c: _square(c) and c.sink == "none",
    ),
    "weights-applied-twice": Edit(
        changes={"weighted": "twice"}, outcome="true",
        fits=lambda c: _square(c) and c.sink == "none",
    ),
    "scores-negated": Edit(
        changes={"extra": "negated"}, outcome="true",
        fits=lambda c: c.extra == "none" and c.scale == "after" and c.dim == 8,
        told_by={"scale": -(8**-0.5)},
    ),
    "scores-clamped": Edit(
        changes={"extra": "clamped"}, outcome="refused", fits=lambda c: c.extra == "none"
    ),
    "scores-of-all-key-heads": Edit(
        changes={"product": "einsum-all-heads"}, outcome="true",
        fits=lambda c: c.product == "einsum",
    ),
    "weights-dropped": Edit(
        changes={"guard": "masked"}, outcome="refused", fits=lambda c: c.guard == "none"
        and c.cache == "none" and "late" not in c.softmax and _matmul(c),
    ),
    "weights-biased": Edit(
        changes={"guard": "biased"}, outcome="refused",
        fits=lambda c: c.guard == "none" and "late" not in c.softmax and _matmul(c),
    ),
    "not-a-number-is-one": Edit(
        changes={"guard": "nan-is-one"}, outcome="refused", fits=lambda c: c.guard == "nan"
    ),
    "values-tiled": Edit(
        changes={"value_share": "tile"}, outcome="true",
        fits=lambda c: c.share in ("expand", "tile-inner") and c.kv_heads == 2,
    ),
    "heads-summed": Edit(
        changes={"merge": "sum"}, outcome="true", fits=lambda c: c.merge == "mean"
    ),
    "weights-halved": Edit(
        changes={"guard": "halved"}, outcome="refused", fits=lambda c: c.guard == "none"
    ),
    "sink-kept-key-dropped": Edit(
        changes={"sink": "cut-first"}, outcome="refused", fits=lambda c: c.sink == "last"
    ),
    "sink-of-the-scores": Edit(
        changes={"sink": "of-scores"}, outcome="refused", fits=lambda c: c.sink == "last"
    ),
    "sink-comes-first": Edit(
        changes={"sink": "first"}, outcome="true", fits=lambda c: c.sink == "last",
    ),
    "past-scaled": Edit(
        changes={"cache": "scaled-past"}, outcome="true", fits=lambda c: c.cache == "concat",
        told_by={"cache": None},
    ),
    "past-after-new": Edit(
        changes={"cache": "reversed"}, outcome="true", fits=lambda c: c.cache == "concat",
        told_by={"cache": None},
    ),
    "value-cache-is-computed": Edit(
        changes={"cache": "only-key"}, outcome="true", fits=lambda c: c.cache == "concat",
        told_by={"cache": None},
    ),
}  # fmt: skip


def near_misses() -> Iterator[tuple[str, str, Edit, Choices]]:
    """(edit name, positive name, edit, edited choices) for every pair that fits."""
    for name, edit in EDITS.items():
        for positive, choices in POSITIVES.items():
            if edit.fits(choices):
                edited = choices.but(**edit.changes)
                if edited != choices:
                    yield name, positive, edit, edited


__all__ = ["EDITS", "SHARED", "Edit", "near_misses"]
