"""Which numbers stand for the symbolic dimensions of a graph.

Two assignments of distinct small primes: two dimensions are equal when they are equal under both.
Relations that the graph itself shows are respected: where a chosen size cannot broadcast with what
it meets (a mask of ``total`` keys beside ``past + seq`` scores), the symbol gets the size it meets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from mha_export.recognise._shapes import Shapes, symbol_of
from mha_export.recognise._sliding import SLIDING

_PRIMES = ((2, 5, 3, 7, 11, 13, 17, 19, 23, 29), (3, 7, 5, 11, 13, 17, 19, 23, 29, 31))
_REPAIRS = 6
_WRITERS = frozenset({"ScatterElements", "ScatterND", "TensorScatter"})
_SPATIAL = (1, 8, 32, 64, 256)
"""Multiples tried for image sides and sound: a patch or a stride must divide them."""


def assignments(graph: ir.Graph) -> tuple[Shapes, ...]:
    """The graph's shapes at two choices of sizes (one where nothing is symbolic)."""
    symbols, spatial = _symbols(graph)
    if not symbols:
        return (Shapes(graph, {}),)
    first, second = (_fitting(graph, symbols, spatial, primes) for primes in _PRIMES)
    if _faults(second) and not _faults(first):
        second = Shapes(graph, first.sizes)  # more than one size is written into the graph
    return first, second


def _symbols(graph: ir.Graph) -> tuple[list[str], set[str]]:
    """Names of symbolic dimensions, leading axes first, and those that convolutions slide along."""
    lead: dict[str, None] = {}
    rest: dict[str, None] = {}
    spatial: set[str] = set()
    sliding = any(node.op_type in SLIDING for node in graph)
    for value in graph.inputs:
        if value.shape is None:
            continue
        rank = len(value.shape)
        real = value.dtype is not None and value.dtype.is_floating_point()
        slid = real and (rank == 4 or (rank in (2, 3) and sliding))
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int):
                continue
            symbol = symbol_of(value, axis)
            (lead if axis == 0 and len(value.shape) > 1 else rest).setdefault(symbol)
            if slid and axis >= (2 if rank == 4 else 1):
                spatial.add(symbol)
    return [*lead, *(name for name in rest if name not in lead)], spatial


def _fitting(
    graph: ir.Graph, symbols: list[str], spatial: set[str], primes: tuple[int, ...]
) -> Shapes:
    """The best assignment from one family of primes: fewest conflicts, no negative dimension."""
    best: Shapes | None = None
    for alike in _alike(graph):
        for multiple in _SPATIAL if spatial else (1,):
            sizes = _choose(graph, symbols, primes, alike)
            for name in spatial:
                sizes[name] *= multiple
            found = _repaired(graph, sizes)
            if best is None or _unfit(found, spatial) < _unfit(best, spatial):
                best = found
            if not any(_unfit(best, spatial)):
                return best
    assert best is not None
    return best


def _alike(graph: ir.Graph) -> list[Mapping[str, str]]:
    """Symbols that may mean one size, with the one that they are then: nothing, and three guesses.

    An exporter that was not told gives each input symbols of its own: a batch each, a past for
    every key and value.
    """
    batches: dict[str, str] = {}
    pasts: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for value in graph.inputs:
        if value.shape is None or len(value.shape) < 2:
            continue
        batch = symbol_of(value, 0)
        if not isinstance(value.shape[0], int):
            batches[batch] = next(iter(batches), batch)
        fixed = tuple(dim if isinstance(dim, int) else None for dim in value.shape)
        for axis in range(1, len(fixed)) if len(fixed) == 4 else ():
            if fixed[axis] is None:
                name = symbol_of(value, axis)
                pasts[name] = first.setdefault((axis, *fixed), name)
    found: list[Mapping[str, str]] = [{}]
    for guess in (batches, pasts, {**pasts, **batches}):
        joined = {name: other for name, other in guess.items() if other != name}
        if joined and joined not in found:
            found.append(joined)
    return found


def _faults(shapes: Shapes) -> int:
    return len(shapes.conflicts) + len(shapes.flaws)


def _unfit(shapes: Shapes, spatial: set[str]) -> tuple[int, int]:
    """What speaks against the sizes, the worse first; a length of one only shows less."""
    return _faults(shapes), len(shapes.narrow) if spatial else 0


def _choose(
    graph: ir.Graph, symbols: list[str], primes: tuple[int, ...], alike: Mapping[str, str]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for index, name in enumerate(symbols):
        sizes[name] = primes[index] if index < len(primes) else primes[-1] + 2 * index
    for place, name in enumerate(_buffers(graph, symbols)):
        sizes[name] = primes[-1] + 2 * (len(symbols) + place)
    for name, other in alike.items():
        sizes[name] = sizes[other]
    total = _total(graph, symbols)
    if total is not None:
        name, past, new = total
        sizes[name] = sizes[past] + sizes[new]
    return sizes


def _buffers(graph: ir.Graph, symbols: list[str]) -> list[str]:
    """Lengths that tokens are written into: longer than any number of tokens."""
    found: dict[str, None] = {}
    for node in graph.all_nodes():
        buffer = node.inputs[0] if node.op_type in _WRITERS else None
        if buffer is None or buffer.shape is None or not buffer.is_graph_input():
            continue
        for axis in range(1, len(buffer.shape)):
            if not isinstance(buffer.shape[axis], int):
                found.setdefault(symbol_of(buffer, axis))
    return [name for name in symbols if name in found]


def _total(graph: ir.Graph, symbols: list[str]) -> tuple[str, str, str] | None:
    """(total, past, new): the length of a mask over past and new tokens, told by where it stands.

    total is the last axis of an integer or boolean [batch, total] input and of nothing else; past
    is the length axis of at least two cache inputs; new the last axis of another such input.
    """
    places: dict[str, list[tuple[ir.Value, int]]] = {}
    for value in graph.inputs:
        for axis in range(0 if value.shape is None else len(value.shape)):
            places.setdefault(symbol_of(value, axis), []).append((value, axis))
    caches = {
        name
        for name in symbols
        if sum(v.shape is not None and len(v.shape) == 4 and a > 0 for v, a in places[name]) >= 2
    }
    tokens = [
        value
        for value in graph.inputs
        if value.shape is not None and len(value.shape) >= 2 and value not in _caches(graph)
    ]
    masks = [v for v in tokens if "mask" in (v.name or "").lower() and len(v.shape or ()) == 2]
    for mask in masks:
        name = symbol_of(mask, 1)
        if name not in symbols or len(places[name]) != 1:
            continue
        for other in tokens:
            new = symbol_of(other, 1)
            if other is not mask and new in symbols and new != name and caches:
                return name, sorted(caches)[0], new
    return None


def _caches(graph: ir.Graph) -> set[ir.Value]:
    return {v for v in graph.inputs if v.shape is not None and len(v.shape) == 4}


def _repaired(graph: ir.Graph, sizes: Mapping[str, int]) -> Shapes:
    """The same sizes, each symbol that conflicts with a computed size set to that size.

    A size that was set is the least that fits, not the only one where the graph cuts a length in
    blocks: as many blocks as fit are not one of them, which would look like none at all.
    """
    shapes = Shapes(graph, dict(sizes))
    for _ in range(_REPAIRS):
        if not shapes.conflicts:
            break
        trials = [Shapes(graph, {**shapes.sizes, **change}) for change in _changes(shapes)]
        better = [trial for trial in trials if _faults(trial) < _faults(shapes)]
        if not better:
            break
        shapes = min(better, key=_faults)
    changed = {name: size for name, size in shapes.sizes.items() if size != sizes[name]}
    if _faults(shapes) or not changed:
        return shapes
    wider = {name: size * sizes[name] for name, size in changed.items()}
    blocks = Shapes(graph, {**shapes.sizes, **wider})
    return shapes if _faults(blocks) else blocks


def _changes(shapes: Shapes) -> list[dict[str, int]]:
    """New sizes that would resolve the first conflict.

    Either a symbol meets another size directly, or it is a factor of an element count that a
    Reshape with a baked-in length contradicts, or does not divide.
    """
    changes: dict[tuple[str, int], None] = {}
    for left, right in shapes.conflicts[:2]:
        for have, want in ((left, right), (right, left)):
            for name, size in shapes.sizes.items():
                if have <= 0 or have % size or want <= 0:
                    continue
                if want * size % have == 0:
                    changes.setdefault((name, want * size // have))
                changes.setdefault((name, want // math.gcd(have // size, want)))
    return [{name: size} for name, size in changes]
