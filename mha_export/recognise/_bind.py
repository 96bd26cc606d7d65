"""Which value of the graph holds a tensor's heads, and in which layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._axes import Axis, View, axis_size, coalesced


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A tensor's roles as factors of its source: what a layout has to spell."""

    batch: Axis
    length: Axis
    heads: Axis
    channels: Axis
    offset: int = 0

    @classmethod
    def of(cls, view: View, layout: Layout) -> Pattern | None:
        """The roles of a per-head ``view`` of four axes; ``layout`` says which is which."""
        if len(view.axes) != 4:
            return None
        batch, second, third, channels = view.axes
        by_head = layout is Layout.BHSD
        return cls(
            batch=batch,
            heads=second if by_head else third,
            length=third if by_head else second,
            channels=channels,
            offset=view.offset,
        )

    @property
    def head_count(self) -> int:
        return axis_size(self.heads)

    @property
    def width(self) -> int:
        return axis_size(self.channels)

    def layout(self, view: View) -> Layout | None:
        """The layout in which ``view`` holds exactly these roles, or None."""
        if view.offset != self.offset:
            return None
        if len(view.axes) == 3:
            wanted = (self.batch, self.length, coalesced([*self.heads, *self.channels]))
            return Layout.BSM if view.axes == wanted else None
        if len(view.axes) != 4:
            return None
        if view.axes == (self.batch, self.heads, self.length, self.channels):
            return Layout.BHSD
        if view.axes == (self.batch, self.length, self.heads, self.channels):
            return Layout.BSHD
        return None


def bound(pattern: Pattern, places: Iterable[tuple[ir.Value, View]]) -> Heads | None:
    """The first of ``places`` that holds the pattern."""
    for value, view in places:
        layout = pattern.layout(view)
        if layout is not None:
            return Heads(value=value, layout=layout, heads=pattern.head_count, dim=pattern.width)
    return None
