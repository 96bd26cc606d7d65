"""At which sizes a mask is looked at.

The sizes are chosen for the symbols of the graph's inputs so that all of them differ, so that
queries and keys differ where they can, with one query, and large enough to show every width that
stands as a constant in the mask's own computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._evaluate import Context, SizedView

Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreShape:
    """The shape of scores that no value holds, because a fused node computes them inside.

    Attributes:
        query, key: the node's inputs; ``query_axis`` and ``key_axis`` are their lengths.
        past: a cache prepended to the keys, whose length is its axis ``past_axis``.
        element: type of the scores, where ``query`` only stands for their size.
    """

    query: ir.Value
    key: ir.Value
    heads: int
    query_axis: int
    key_axis: int
    past: ir.Value | None = None
    past_axis: int = 2
    element: ir.DataType | None = None

    @property
    def dtype(self) -> ir.DataType | None:
        return self.element or self.query.dtype

    def at(self, view: SizedView) -> tuple[int, ...] | None:
        """[b, h, s, t], or None where a length is unknown."""
        query, key = view.shape(self.query), view.shape(self.key)
        if query is None or key is None:
            return None
        keys = key[self.key_axis]
        if self.past is not None:
            past = view.shape(self.past)
            if past is None:
                return None
            keys += past[self.past_axis]
        return (query[0], self.heads, query[self.query_axis], keys)

    def past_length(self, context: Context, sizes: Sizes) -> int | None:
        """Of the cache at these sizes; None without one."""
        shape = None if self.past is None else context.sized(sizes).shape(self.past)
        return None if shape is None else shape[self.past_axis]


Scores = ir.Value | ScoreShape
"""The unmasked scores: a value of the graph, or what a fused node makes of its inputs."""


def shape_of(context: Context, sizes: Mapping[str, int], scores: Scores) -> tuple[int, ...] | None:
    """The shape of the scores at these sizes."""
    view = context.sized(sizes)
    return scores.at(view) if isinstance(scores, ScoreShape) else view.shape(scores)


_ROUNDS: tuple[tuple[int, ...], ...] = (
    (5, 3, 8, 11, 9, 12, 13, 14),
    (4, 7, 10, 6, 15, 17, 16, 18),
    (1, 6, 9, 2, 19, 21, 20, 22),
)
"""Numbers for the first, second, ... symbol after the batch, one row a plan."""

_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """Symbolic dimensions of the graph inputs: those of axis 0 of any input, and the others."""

    batch: tuple[str, ...]
    lengths: tuple[str, ...]


def symbols_of(graph: ir.Graph) -> Symbols:
    """Symbols in order of appearance; a nameless dimension is called ``<input>.<axis>``."""
    batch: dict[str, None] = {}
    lengths: dict[str, None] = {}
    for value in graph.inputs:
        if value.const_value is not None or value.shape is None:
            continue
        for axis, dim in enumerate(value.shape):
            if not isinstance(dim, int):
                name = dim.value if dim.value is not None else f"{value.name}.{axis}"
                (batch if axis == 0 and len(value.shape) > 1 else lengths)[name] = None
    return Symbols(batch=tuple(batch), lengths=tuple(n for n in lengths if n not in batch))


def plans(context: Context, *, scores: Scores, inputs: Sequence[ir.Value]) -> list[Sizes]:
    """Sizes at which ``scores`` has a shape, the dimensions of ``inputs`` made to fit it.

    ``inputs`` are those whose content the mask reads: where a dimension of theirs does not bear on
    the scores (``total`` beside ``past`` and ``seq``), it is the number of keys.
    """
    symbols = symbols_of(context.model.graph)
    for strategy in (_distinct, _same_by_position, _baked_in):
        found = [
            fitted
            for sizes in strategy(context, symbols)
            if (fitted := _fitted(context, sizes, scores, inputs)) is not None
        ]
        unique = list({tuple(sorted(sizes.items())): sizes for sizes in found}.values())
        if unique:
            return unique
    return []


def enlarged(
    context: Context, sizes: Sizes, *, scores: Scores, inputs: Sequence[ir.Value], keys: int
) -> Sizes | None:
    """Sizes with at least ``keys`` keys and as few queries as the symbols allow, batch 1."""
    symbols = symbols_of(context.model.graph)
    base = {**sizes, **dict.fromkeys(symbols.batch, 1)}
    best: tuple[int, Sizes] | None = None
    for name in symbols.lengths:
        fitted = _fitted(context, {**base, name: keys}, scores, inputs)
        shape = None if fitted is None else shape_of(context, fitted, scores)
        if fitted is None or shape is None or shape[-1] < keys:
            continue
        cost = shape[-1] * shape[-2]
        if best is None or cost < best[0]:
            best = (cost, fitted)
    return None if best is None else best[1]


def squared(
    context: Context, sizes: Sizes, *, scores: Scores, inputs: Sequence[ir.Value]
) -> Sizes | None:
    """``sizes`` with as many queries as keys, where queries have a symbol of their own; else None.

    Positions of queries that are counted from the first key are then large too.
    """
    shape = shape_of(context, sizes, scores)
    if shape is None or shape[-2] >= shape[-1]:
        return None
    wanted = (*shape[:-2], shape[-1], shape[-1])
    for name in symbols_of(context.model.graph).lengths:
        fitted = _fitted(context, {**sizes, name: shape[-1]}, scores, inputs)
        if fitted is not None and shape_of(context, fitted, scores) == wanted:
            return fitted
    return None


def _distinct(context: Context, symbols: Symbols) -> Iterator[dict[str, int]]:
    for numbers in _ROUNDS:
        cycle = [*numbers, *range(31, 31 + len(symbols.lengths))]
        chosen = dict(zip(symbols.lengths, cycle, strict=False))
        yield {**chosen, **dict.fromkeys(symbols.batch, _BATCH)}
    if len(symbols.lengths) > 1:
        for name in symbols.lengths[1:3]:
            chosen = dict(zip(symbols.lengths, (5, 3, 8, 11, 9, 12, 13, 14), strict=False))
            yield {**chosen, name: 1, **dict.fromkeys(symbols.batch, _BATCH)}


def _same_by_position(context: Context, symbols: Symbols) -> Iterator[dict[str, int]]:
    """Inputs that are as long as each other but whose exporter named every dimension apart."""
    for length in (5, 8, 1):
        yield {
            **dict.fromkeys(symbols.lengths, length),
            **dict.fromkeys(symbols.batch, _BATCH),
        }


def _baked_in(context: Context, symbols: Symbols) -> Iterator[dict[str, int]]:
    """A length the exporter wrote into the graph as a number: try those that stand there."""
    numbers: set[int] = set()
    for node in context.model.graph:
        if node.op_type in ("Reshape", "Expand") and len(node.inputs) > 1:
            target = context.constant(node.inputs[1])
            if target is not None:
                numbers |= {int(n) for n in np.ravel(target) if 1 < n <= 4096}
    for batch in (_BATCH, 1):
        for length in sorted(numbers)[:24]:
            yield {
                **dict.fromkeys(symbols.lengths, length),
                **dict.fromkeys(symbols.batch, batch),
            }
    for batch in sorted(numbers)[:8]:
        for length in sorted(numbers)[:8]:
            yield {
                **dict.fromkeys(symbols.lengths, length),
                **dict.fromkeys(symbols.batch, batch),
            }


def _fitted(
    context: Context, sizes: Mapping[str, int], scores: Scores, inputs: Sequence[ir.Value]
) -> Sizes | None:
    shape = shape_of(context, sizes, scores)
    if shape is None or len(shape) < 2:
        return None
    fitted = dict(sizes)
    for value in inputs:
        if value.shape is None or len(value.shape) < 2:
            continue
        last = value.shape[-1]
        if isinstance(last, int):
            continue
        name = last.value if last.value is not None else f"{value.name}.{len(value.shape) - 1}"
        trial = {**fitted, name: shape[-1]}
        if name in fitted and shape_of(context, trial, scores) == shape:
            fitted = trial
    return fitted
