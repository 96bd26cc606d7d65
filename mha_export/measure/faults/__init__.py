"""How much the parity check sees: faults planted in right graphs, and who tells them apart.

A fault is one small function: it takes a right layer and yields the ways to get it wrong. A wrong
graph counts only where its float64 outputs differ from the right ones on some input.
"""

from __future__ import annotations

from mha_export.measure.faults._bases import Base, bases
from mha_export.measure.faults._bench import FAULTS, Bench, Found, Planted, Right
from mha_export.measure.faults._change import Change, Fault
from mha_export.measure.faults._table import document, markdown

__all__ = [
    "FAULTS",
    "Base",
    "Bench",
    "Change",
    "Fault",
    "Found",
    "Planted",
    "Right",
    "bases",
    "document",
    "markdown",
]
