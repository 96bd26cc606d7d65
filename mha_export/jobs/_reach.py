"""Which lengths a model has to be judged at, by what its attentions are."""

from __future__ import annotations

from collections.abc import Sequence

from mha_export.measure.model_inputs import ModelCase
from mha_export.recognise import Recognition
from mha_export.spec import CausalAlignment

_BEYOND = 4
"""Tokens beyond a window, so that one that is off by one shows in more than one row."""

LONGEST = 1100
"""Most tokens that models are judged on where no length is asked for."""


def widest(recognition: Recognition) -> int:
    """Tokens from which on every window and block hides something; 0 without any."""
    widths = [
        width
        for site in recognition.sites
        for mask in (site.spec.mask,)
        for width in (mask.left_window, mask.right_window, mask.block)
        if width is not None
    ]
    return max(widths, default=-_BEYOND) + _BEYOND


def every_row_has_keys(recognition: Recognition) -> bool:
    """Whether positions leave no row without a key, however many more queries than keys."""
    masks = [site.spec.mask for site in recognition.sites]
    return not recognition.rejections and not any(
        mask.causal is CausalAlignment.BOTTOM_RIGHT
        or mask.left_window is not None
        or mask.right_window is not None
        or mask.block is not None
        for mask in masks
    )


def unseen(reach: int, cases: Sequence[ModelCase]) -> tuple[str, ...]:
    """What is to be said where no case has ``reach`` tokens."""
    lengths = [size for case in cases for size in case.dims.values()]
    if not lengths or reach <= max(lengths):
        return ()
    return (
        f"a window or block hides nothing before {reach} tokens, more than were compared: it may "
        "differ; give that length with --dim",
    )
