"""Rotary embedding, read by feeding random channels and tables and comparing with its law."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_export.operands import RotaryTables
from mha_export.recognise._evaluate import Context
from mha_export.spec import RotarySpec


@dataclass(frozen=True, kw_only=True, eq=False)
class PeeledRotary:
    """A rotation taken off: ``rotated = rotary(before)``.

    Attributes:
        before: the value before rotation, of the same shape and axis order as the rotated one.
        tables: with only ``cos``, ``sin`` and ``position_ids`` set (of this tensor alone).
        nodes: the nodes between ``before`` and the rotated value.
    """

    spec: RotarySpec
    tables: RotaryTables
    before: ir.Value
    nodes: tuple[ir.Node, ...]


def peel_rotary(rotated: ir.Value, *, context: Context) -> PeeledRotary | None:
    """Take the rotation off a query or key in any axis order, or None when there is none."""
    raise NotImplementedError
