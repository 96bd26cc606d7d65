"""What goes into the reading of a mask, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from mha_export.spec import CausalAlignment, EmptyRow, Fill


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskTerm:
    """One step from raw to masked scores, in the order the graph takes them.

    ``additive``: float, added. ``keep``: bool, scores become ``fill`` where it is False.
    ``hide``: bool, scores become ``fill`` where it is True. ``floor``: scores below ``fill`` become
    ``fill`` (the value is that number).
    """

    value: ir.Value
    kind: Literal["additive", "keep", "hide", "floor"]
    fill: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskReading:
    """The parts all terms together state; with no part at all the mask hides nothing.

    Attributes:
        fill: what a hidden score becomes; None when nothing is hidden.
        replaces: a finite ``fill`` replaces the scores (spec.fill adds it): the same probabilities
            unless the scores come near the fill.
        empty_row: what a row with no key gets from softmax alone (a guard after it is not seen).
        key_padding: [b, t], nonzero: the key takes part.
        rest: additions that are no mask (a learned or relative bias), to be bound as ``bias``; they
            lie below the hiding parts, as in the equation of :mod:`mha_export.spec`.
    """

    causal: CausalAlignment | None = None
    left_window: int | None = None
    right_window: int | None = None
    block: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    fill: Fill | None = None
    replaces: bool = False
    empty_row: EmptyRow = EmptyRow.NOT_APPLICABLE
    key_padding: ir.Value | None = None
    kv_lengths: ir.Value | None = None
    prefix_lengths: ir.Value | None = None
    document_ids: ir.Value | None = None
    rest: tuple[MaskTerm, ...] = ()

    @property
    def hides(self) -> bool:
        """Whether any key can be hidden."""
        return self.fill is not None
