"""Faults in what a graph states: the right emitter, told the wrong thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mha_export.errors import SpecError
from mha_export.measure.faults._bases import Base
from mha_export.measure.faults._change import Change, Fault
from mha_export.spec import CausalAlignment, EmptyRow, RotaryStyle


def _stating(base: Base, detail: str, **changes: Any) -> Iterator[Change]:
    """A change of the spec; nothing where the spec would contradict itself."""
    try:
        yield Change(detail=detail, spec=base.spec.replace(**changes))
    except SpecError:
        return


def _masking(base: Base, detail: str, **changes: Any) -> Iterator[Change]:
    try:
        mask = dataclasses.replace(base.spec.mask, **changes)
    except SpecError:
        return
    yield from _stating(base, detail, mask=mask)


def scale(times: float) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        yield from _stating(base, f"x {times:g}", scale=base.spec.effective_scale * times)

    return fault


def scale_dropped(base: Base) -> Iterator[Change]:
    if base.spec.effective_scale != 1.0:
        yield from _stating(base, "1", scale=1.0)


def scale_squared(base: Base) -> Iterator[Change]:
    if base.spec.effective_scale != 1.0:
        yield from _stating(base, "twice applied", scale=base.spec.effective_scale**2)


def softcap_dropped(base: Base) -> Iterator[Change]:
    if base.spec.softcap is not None:
        yield from _stating(base, "none", softcap=None)


def softcap_halved(base: Base) -> Iterator[Change]:
    if base.spec.softcap is not None:
        yield from _stating(base, "c / 2", softcap=base.spec.softcap / 2)


def window(side: str, by: int) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        width = getattr(base.spec.mask, side)
        if width is not None:
            yield from _masking(base, f"{width} -> {width + by}", **{side: width + by})

    return fault


def window_dropped(base: Base) -> Iterator[Change]:
    for side in ("left_window", "right_window"):
        if getattr(base.spec.mask, side) is not None:
            yield from _masking(base, side, **{side: None})


def window_mirrored(base: Base) -> Iterator[Change]:
    mask = base.spec.mask
    if mask.left_window is not None and mask.causal is None:
        width = mask.left_window
        yield from _masking(base, "left only", left_window=width, right_window=0)


def alignment_swapped(base: Base) -> Iterator[Change]:
    other = {
        CausalAlignment.TOP_LEFT: CausalAlignment.BOTTOM_RIGHT,
        CausalAlignment.BOTTOM_RIGHT: CausalAlignment.TOP_LEFT,
    }
    if base.spec.mask.causal is not None:
        swapped = other[base.spec.mask.causal]
        yield from _masking(base, swapped.value, causal=swapped)


def causal_dropped(base: Base) -> Iterator[Change]:
    if base.spec.mask.causal is not None:
        yield from _masking(base, "no diagonal", causal=None)


def causal_added(base: Base) -> Iterator[Change]:
    if base.spec.mask.causal is None:
        yield from _masking(base, "a diagonal", causal=CausalAlignment.BOTTOM_RIGHT)


def causal_late(base: Base) -> Iterator[Change]:
    """One key of the future is seen."""
    mask = base.spec.mask
    if mask.causal is CausalAlignment.BOTTOM_RIGHT and mask.right_window is None:
        yield from _masking(base, "t <= i + 1", causal=None, right_window=1)


def mask_ignored(base: Base) -> Iterator[Change]:
    for part in ("padding", "keep", "bias", "lengths"):
        if getattr(base.spec.mask, part):
            absent = None if part in ("keep", "bias") else False
            yield from _masking(base, part, **{part: absent})


def fill_finite(value: float) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        if base.spec.mask.hides_keys:
            empty = base.spec.mask.empty_row
            if empty is not EmptyRow.NOT_APPLICABLE:
                empty = EmptyRow.FINITE
            yield from _masking(base, f"{value:g}", fill=value, empty_row=empty)

    return fault


def empty_row(base: Base) -> Iterator[Change]:
    stated = base.spec.mask.empty_row
    for policy in (EmptyRow.ZERO, EmptyRow.NAN, EmptyRow.UNIFORM):
        if stated not in (policy, EmptyRow.NOT_APPLICABLE):
            yield from _masking(base, f"{stated.value} -> {policy.value}", empty_row=policy)


def prefix_ignored(base: Base) -> Iterator[Change]:
    if base.spec.mask.prefix:
        yield from _masking(base, "causal everywhere", prefix=False)


def block(by: int) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        size = base.spec.mask.block
        if size is not None:
            yield from _masking(base, f"{size} -> {size + by}", block=size + by)

    return fault


def block_dropped(base: Base) -> Iterator[Change]:
    if base.spec.mask.block is not None:
        yield from _masking(base, "one block", block=None)


def documents_ignored(base: Base) -> Iterator[Change]:
    if base.spec.mask.documents:
        yield from _masking(base, "one document", documents=False)


def alibi(base: Base) -> Iterator[Change]:
    slopes = base.spec.mask.alibi_slopes
    if slopes is not None:
        rolled = slopes[1:] + slopes[:1]
        yield from _masking(base, "slopes of the next head", alibi_slopes=rolled)
        negated = tuple(-slope for slope in slopes)
        yield from _masking(base, "sign turned", alibi_slopes=negated)


def alibi_dropped(base: Base) -> Iterator[Change]:
    if base.spec.mask.alibi_slopes is not None:
        yield from _masking(base, "no slope", alibi_slopes=None)


def sinks_dropped(base: Base) -> Iterator[Change]:
    if base.spec.sinks:
        yield from _stating(base, "none", sinks=False)


def _rotating(base: Base, detail: str, **changes: Any) -> Iterator[Change]:
    assert base.spec.rotary is not None
    yield from _stating(base, detail, rotary=dataclasses.replace(base.spec.rotary, **changes))


def rotary_style(base: Base) -> Iterator[Change]:
    other = {
        RotaryStyle.HALF: RotaryStyle.INTERLEAVED,
        RotaryStyle.INTERLEAVED: RotaryStyle.HALF,
    }
    if base.spec.rotary is not None:
        swapped = other[base.spec.rotary.style]
        yield from _rotating(base, swapped.value, style=swapped)


def rotary_theta(base: Base) -> Iterator[Change]:
    if base.spec.rotary is not None and base.spec.rotary.theta is not None:
        theta = base.spec.rotary.theta
        yield from _rotating(base, f"{theta:g} -> {2 * theta:g}", theta=2 * theta)


def rotary_dim(base: Base) -> Iterator[Change]:
    if base.spec.rotary is not None:
        dim = base.spec.rotary.dim
        for wrong in (dim // 2, dim * 2):
            if 2 <= wrong <= base.spec.head_dim:
                yield from _rotating(base, f"{dim} -> {wrong}", dim=wrong)


def rotary_key_only(base: Base) -> Iterator[Change]:
    if base.spec.rotary is not None:
        yield from _rotating(base, "queries only", key=False)


def rotary_dropped(base: Base) -> Iterator[Change]:
    if base.spec.rotary is not None:
        yield from _stating(base, "none", rotary=None)


def norm_epsilon(base: Base) -> Iterator[Change]:
    if base.spec.qk_norm is not None:
        wrong = base.spec.qk_norm.epsilon * 10
        norm = dataclasses.replace(base.spec.qk_norm, epsilon=wrong)
        yield from _stating(base, f"{base.spec.qk_norm.epsilon:g} -> {wrong:g}", qk_norm=norm)


def norm_kind(base: Base) -> Iterator[Change]:
    if base.spec.qk_norm is not None:
        for kind in ("layer", "l2"):
            norm = dataclasses.replace(base.spec.qk_norm, kind=kind)
            yield from _stating(base, f"{base.spec.qk_norm.kind} -> {kind}", qk_norm=norm)


def norm_dropped(base: Base) -> Iterator[Change]:
    if base.spec.qk_norm is not None:
        yield from _stating(base, "none", qk_norm=None)
        norm = dataclasses.replace(base.spec.qk_norm, weight=False)
        yield from _stating(base, "its weight", qk_norm=norm)
        norm = dataclasses.replace(base.spec.qk_norm, key=False)
        yield from _stating(base, "of the keys", qk_norm=norm)


STATED: dict[str, Fault] = {
    "scale dropped": scale_dropped,
    "scale doubled": scale(2.0),
    "scale squared": scale_squared,
    "scale off by 1%": scale(1.01),
    "softcap dropped": softcap_dropped,
    "softcap halved": softcap_halved,
    "left window one short": window("left_window", -1),
    "left window one long": window("left_window", 1),
    "right window one short": window("right_window", -1),
    "right window one long": window("right_window", 1),
    "window dropped": window_dropped,
    "window one-sided": window_mirrored,
    "causal alignment swapped": alignment_swapped,
    "causal dropped": causal_dropped,
    "causal added": causal_added,
    "causal one key late": causal_late,
    "mask ignored": mask_ignored,
    "fill a small number": fill_finite(-10.0),
    "fill finite": fill_finite(-1e4),
    "empty row": empty_row,
    "prefix ignored": prefix_ignored,
    "chunk off by one": block(1),
    "chunks dropped": block_dropped,
    "documents ignored": documents_ignored,
    "alibi wrong": alibi,
    "alibi dropped": alibi_dropped,
    "sinks dropped": sinks_dropped,
    "rotary pairs wrong": rotary_style,
    "rotary theta wrong": rotary_theta,
    "rotary width wrong": rotary_dim,
    "keys not rotated": rotary_key_only,
    "rotary dropped": rotary_dropped,
    "norm epsilon wrong": norm_epsilon,
    "norm kind wrong": norm_kind,
    "norm dropped": norm_dropped,
}
