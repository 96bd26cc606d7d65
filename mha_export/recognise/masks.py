"""What a mask says: its parts, read by evaluating it and comparing with the canonical masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from mha_export.recognise._evaluate import Context
from mha_export.spec import CausalAlignment, EmptyRow, Fill


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskTerm:
    """One step from raw to masked scores, in the order the graph takes them.

    ``additive``: float, added. ``keep``: bool, scores become ``fill`` where it is False.
    ``hide``: bool, scores become ``fill`` where it is True.
    """

    value: ir.Value
    kind: Literal["additive", "keep", "hide"]
    fill: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskReading:
    """The parts all terms together state; with no part at all the mask hides nothing.

    Attributes:
        fill: what a hidden score becomes; None when nothing is hidden.
        empty_row: what a row with no key gets from softmax alone (a guard after it is not seen).
        key_padding: [b, t], nonzero: the key takes part.
    """

    causal: CausalAlignment | None = None
    left_window: int | None = None
    right_window: int | None = None
    block: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    fill: Fill | None = None
    empty_row: EmptyRow = EmptyRow.NOT_APPLICABLE
    key_padding: ir.Value | None = None
    kv_lengths: ir.Value | None = None
    prefix_lengths: ir.Value | None = None
    document_ids: ir.Value | None = None


def read_mask(
    terms: Sequence[MaskTerm], *, scores: ir.Value, context: Context
) -> MaskReading | None:
    """The parts that ``terms`` state exactly, or None where no name fits (bind them raw then).

    Args:
        terms: every mask step of one attention; all of them, since two steps may overlap.
        scores: the unmasked scores [b, h, s, t] (any value of that shape): its sizes decide.
    """
    raise NotImplementedError
