"""What must change in a graph that reads the new tokens alone: data, carried out later.

Found on the graph as it is (:mod:`._walk`), carried out on a copy (:mod:`._apply`).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A value that holds the new tokens alone, along ``axis``.

    ``inner``: entries of that axis to one token, where other axes were merged into it behind the
    tokens ([b, s * h, d]); what was merged before them ([b * s, m]) needs no number.
    """

    axis: int
    inner: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TakeRows:
    """An input that speaks of all tokens where the node's other inputs hold the new ones."""

    node: ir.Node
    index: int
    axis: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SetEntry:
    """Entry ``entry`` of a shape that is input ``index``; ``number`` None: per new token."""

    node: ir.Node
    index: int
    entry: int
    number: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeShape:
    """A Shape of new tokens alone whose readers want the length of all of them."""

    node: ir.Node
    entry: int
    whole: bool
    """Whether the entry is the number of tokens, not a multiple of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FromEnd:
    """An index of the last token, counted from the start: counted from the end instead."""

    node: ir.Node
    index: int
    entry: int | None
    """Which entry of a one-dimensional index; None: all of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstRows:
    """Places counted from the first of all tokens: counted from the first of the new ones."""

    node: ir.Node
    index: int
    axis: int


Edit = TakeRows | SetEntry | WholeShape | FromEnd | FirstRows
