"""Lengths at which a site can be run: numbers for the symbols of the graph that fit together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from mha_export.cases._sizes import has_position_rule
from mha_export.operands import Heads, Layout
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context, SizedView
from mha_export.recognise._evaluate_view import symbols_in
from mha_export.spec import CausalAlignment

_AXES = {Layout.BSM: (0, 1), Layout.BSHD: (0, 1), Layout.BHSD: (0, 2)}
_MAX_LENGTH = 96
_LONG_QUERIES, _LONG_KEYS = 37, 70
"""Lengths at which runtimes were seen to take other kernels: from 32 queries, and 64 keys."""
_LONG_SCORES = 1 << 19
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedSite:
    """A site at numbers for every symbol.

    ``b``, ``s``: batch and queries; ``n``: new keys; ``p``: cached ones; ``t``: all. ``relation``
    names the symbols that are the sum of two others.
    """

    numbers: Mapping[str, int]
    view: SizedView
    b: int
    s: int
    n: int
    p: int
    t: int
    relation: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def dims(self) -> dict[str, int]:
        """As ``cases`` names them."""
        return {"batch": self.b, "q_len": self.s, "kv_len": self.t, "past_len": self.p}


def sized_sites(
    site: Site, context: Context, *, wanted: int = 3, known: Sequence[Mapping[str, int]] = ()
) -> list[SizedSite]:
    """Up to ``wanted`` choices of sizes, the richest first; empty where none is consistent.

    Symbols that depend on each other (a mask as long as past and new tokens together) are found by
    trying: a choice at which the operands' shapes contradict each other is not one. ``known`` are
    choices that fit the graph, for lengths that nobody would guess: blocks, two baked ones.
    """
    symbols = _symbols(context.model)
    base = _first_consistent(site, context, symbols, known)
    if base is None:
        return []
    found = replace(base[0], relation=base[1])
    result = [found]
    seen = {(found.b, found.s, found.n, found.p)}
    sized = _masks_are_sized(site, found)
    for numbers in (*_variations(site, context, found, symbols), *known):
        if len(result) >= wanted:
            break
        other = size_at(site, context, numbers)
        if other is None or (sized and not _masks_are_sized(site, other)):
            continue
        if (other.b, other.s, other.n, other.p) not in seen:
            seen.add((other.b, other.s, other.n, other.p))
            result.append(other)
    return result


def long_site(site: Site, context: Context, found: SizedSite) -> SizedSite | None:
    """The site at more queries and keys than its other sizes have; None where they are fixed.

    A table of positions or a stored mask may be shorter: then fewer are tried.
    """
    sized = _masks_are_sized(site, found)
    for change in _long_changes(site, context, found):
        other = size_at(site, context, _with(found.numbers, found.relation, change))
        if other is None or other.b * site.spec.q_heads * other.s * other.t > _LONG_SCORES:
            continue
        more = (other.s >= _LONG_QUERIES > found.s) or (other.t >= _LONG_KEYS > found.t)
        if more and (_masks_are_sized(site, other) or not sized):
            return other
    return None


def _long_changes(site: Site, context: Context, found: SizedSite) -> Iterator[dict[str, int]]:
    symbols = _symbols(context.model)
    controls = _controls(site, context, found, symbols)
    s, p, n = controls.get("s"), controls.get("p"), controls.get("n")
    if s is not None and p is not None:
        yield {s: _LONG_QUERIES, p: _LONG_KEYS - _LONG_QUERIES}
        yield {s: _LONG_QUERIES}
    elif s is not None and n is not None and n != s:
        yield {s: _LONG_QUERIES, n: _LONG_KEYS}
    elif s is not None:
        yield {s: _LONG_KEYS}
        yield {s: _LONG_QUERIES}
    elif n is not None:
        yield {n: _LONG_KEYS}
    else:
        lengths = [name for name, is_batch in symbols.items() if not is_batch]
        for length in (_LONG_KEYS, _LONG_QUERIES) if lengths else ():
            yield dict.fromkeys(lengths, length)


def fixed_lengths(site: Site, context: Context, found: SizedSite) -> dict[str, int]:
    """Lengths of graph inputs that are symbols there and numbers at the site: baked in by a trace.

    At any other number the graph does not run, or not as an attention over that length.
    """
    stated = {n for n in (site.spec.q_len, site.spec.kv_len) if isinstance(n, int)}
    fixed: dict[str, int] = {}
    for name, number in found.numbers.items():
        if number not in stated:
            continue
        others = [
            size_at(site, context, {**found.numbers, name: n}) for n in (number + 1, 2 * number)
        ]
        sizes = {(other.b, other.s, other.n) for other in others if other is not None}
        if sizes <= {(found.b, found.s, found.n)}:
            fixed[name] = number
    return fixed


def size_at(site: Site, context: Context, numbers: Mapping[str, int]) -> SizedSite | None:
    """The site at these numbers, or None where its operands do not fit together."""
    view = context.sized(numbers)
    operands, spec = site.operands, site.spec
    lengths: dict[str, tuple[int, int]] = {}
    for name in ("query", "key", "value", "past_key", "past_value"):
        heads: Heads | None = getattr(operands, name)
        if heads is None:
            continue
        found = _batch_and_length(view, heads)
        if found is None:
            return None
        lengths[name] = found
    b, s = lengths["query"]
    n = lengths["key"][1]
    p = lengths["past_key"][1] if "past_key" in lengths else 0
    static = spec.cache is not None and spec.cache.growth != "concat"
    t = p if static else p + n
    agree = all(batch == b for batch, _ in lengths.values())
    agree &= lengths.get("value", (b, n))[1] == n
    agree &= lengths.get("past_value", (b, p))[1] == p
    agree &= spec.cache is None or n == s
    agree &= _lengths_are_meant(site, s, n, t)
    agree &= min(b, s, n) > 0 and b * spec.q_heads * s * t <= _MAX_SCORES
    if not agree or not _side_operands_fit(site, view, b, s, t):
        return None
    output = _batch_and_length(view, site.output)
    if (output is not None and output != (b, s)) or _is_contradicted(site, view):
        return None
    return SizedSite(numbers=dict(numbers), view=view, b=b, s=s, n=n, p=p, t=t)


def _is_contradicted(site: Site, view: SizedView) -> bool:
    """Whether a Reshape inside the attention has another number of elements than it is to have.

    The operands fit together at any length where one that is written into the graph comes after.
    """
    for node in site.nodes:
        if node.op_type != "Reshape" or view.shape(node.outputs[0]) is not None:
            continue
        source, target = node.inputs[:2]
        if source is None or target is None or view.shape(source) is None:
            continue
        if view.array(target) is not None:
            return True
    return False


def _lengths_are_meant(site: Site, s: int, n: int, t: int) -> bool:
    """Whether an attention of this spec is defined at these lengths at all."""
    spec, rotary = site.spec, site.operands.rotary
    shared_tables = (
        spec.rotary is not None
        and spec.rotary.key
        and not spec.cross
        and rotary is not None
        and rotary.key_cos is None
    )
    if shared_tables and n != s:
        return False
    counts_from_the_end = has_position_rule(spec) and (
        spec.mask.causal is not CausalAlignment.TOP_LEFT
    )
    return s <= t or not counts_from_the_end


def _batch_and_length(view: SizedView, heads: Heads) -> tuple[int, int] | None:
    shape = view.shape(heads.value)
    if shape is None:
        return None
    batch, length = _AXES[heads.layout]
    width = {Layout.BSM: (heads.heads * heads.dim,), Layout.BSHD: (heads.heads, heads.dim)}
    fits = len(shape) == (3 if heads.layout is Layout.BSM else 4)
    if heads.layout is Layout.BHSD:
        fits = fits and (shape[1], shape[3]) == (heads.heads, heads.dim)
    else:
        fits = fits and shape[2:] == width[heads.layout]
    return (shape[batch], shape[length]) if fits else None


def _side_operands_fit(site: Site, view: SizedView, b: int, s: int, t: int) -> bool:
    operands, h = site.operands, site.spec.q_heads
    exact = {"key_padding": (b, t), "kv_lengths": (b,), "document_ids": (b, t)}
    for name, wanted in exact.items():
        value = getattr(operands, name)
        if value is not None and view.shape(value) not in (None, wanted):
            return False
    broadcast = [operands.keep, operands.bias]
    if operands.score_mask is not None:
        broadcast.append(operands.score_mask.value)
    for value in broadcast:
        shape = None if value is None else view.shape(value)
        if shape is None:
            continue
        padded = (1,) * (4 - len(shape)) + shape
        fits = len(padded) == 4 and padded[3] <= t
        if not fits or any(
            have not in (1, want) for have, want in zip(padded[:3], (b, h, s), strict=True)
        ):
            return False
    rotary = operands.rotary
    if rotary is not None and rotary.position_ids is None:
        table = view.shape(rotary.cos)
        if table is not None and (len(table) != 3 or table[0] not in (1, b) or table[1] != s):
            return False
    return True


# The search.


def _symbols(model: ir.Model) -> dict[str, bool]:
    """Every free symbol of the graph inputs, and whether it only ever is a first axis (a batch)."""
    first: dict[str, bool] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, int):
                continue
            names = [f"{value.name}.{axis}"] if dim.value is None else sorted(symbols_in(dim))
            for name in names:
                first[name] = first.get(name, True) and axis == 0
    return first


Relation = Mapping[str, tuple[str, str]]
"""Symbols that are the sum of two others."""


def _first_consistent(
    site: Site, context: Context, symbols: Mapping[str, bool], known: Sequence[Mapping[str, int]]
) -> tuple[SizedSite, Relation] | None:
    doubtful: tuple[SizedSite, Relation] | None = None
    for numbers, relation in _guesses(site, symbols, known):
        found = size_at(site, context, numbers)
        if found is not None and _masks_are_sized(site, found):
            return found, relation
        if found is not None:
            doubtful = doubtful or (found, relation)
    return doubtful


def _masks_are_sized(site: Site, found: SizedSite) -> bool:
    """Whether the masks have shapes, as long as the keys or one for all of them.

    Where they have none, data decide, or they contradict; a shorter one hides the keys it lacks.
    """
    shapes = [found.view.shape(mask) for mask in (site.operands.keep, site.operands.bias) if mask]
    return all(shape is not None and shape[-1:] in ((1,), (found.t,)) for shape in shapes)


def _reach(site: Site) -> int:
    """Keys it takes to look past every window and out of a block on either side."""
    mask = site.spec.mask
    sizes = [x for x in (mask.left_window, mask.right_window, mask.block) if x is not None]
    return min(max(sizes, default=0) + 4, _MAX_LENGTH)


def _guesses(
    site: Site, symbols: Mapping[str, bool], known: Sequence[Mapping[str, int]]
) -> Iterator[tuple[dict[str, int], Relation]]:
    batches = [name for name, is_batch in symbols.items() if is_batch]
    lengths = [name for name, is_batch in symbols.items() if not is_batch]
    start = max(5, _reach(site))
    pool = [start, start + 2, start - 2, start + 3, start + 1]
    plain = {name: pool[i % 5] + 5 * (i // 5) for i, name in enumerate(lengths)}
    for batch in (2, 1):
        numbers = {**dict.fromkeys(batches, batch), **plain}
        yield numbers, {}
        for total, one, other in itertools.permutations(lengths, 3):
            if lengths.index(one) < lengths.index(other):
                yield {**numbers, total: numbers[one] + numbers[other]}, {total: (one, other)}
        yield {**numbers, **dict.fromkeys(lengths, start)}, {}
        yield {**numbers, **dict(zip(reversed(lengths), plain.values(), strict=True))}, {}
        for choice in known:
            yield {**numbers, **choice}, {}
        for length in _baked_lengths(site):
            yield {**numbers, **dict.fromkeys(lengths, length)}, {}
    for batch, length in itertools.product(_baked_lengths(site), repeat=2):
        if batch <= 16:
            numbers = {**dict.fromkeys(batches, batch), **dict.fromkeys(lengths, length)}
            yield numbers, {}


def _baked_lengths(site: Site) -> list[int]:
    """Numbers written into the shapes around the site, and their quotients by the heads.

    An exporter that traced one length leaves it there: at any other the graph does not run.
    """
    found: dict[int, None] = {}
    for dim in (site.spec.q_len, site.spec.kv_len, site.spec.batch):
        if isinstance(dim, int):
            found.setdefault(dim)
    for node in _surroundings(site):
        for value in node.inputs if node.op_type == "Concat" else node.inputs[1:]:
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            if tensor is None or tensor.dtype is not ir.DataType.INT64 or tensor.size > 8:
                continue
            for number in tensor.numpy().reshape(-1).tolist():
                found.setdefault(number)
                if number % site.spec.q_heads == 0:
                    found.setdefault(number // site.spec.q_heads)
    return [number for number in found if 1 <= number <= _MAX_LENGTH][:8]


def _surroundings(site: Site) -> Iterator[ir.Node]:
    """The shape-giving nodes of the site and for some way above its operands."""
    pending: list[ir.Node | None] = [*site.nodes]
    pending += [value.producer() for _, value in site.operands.values()]
    seen: set[ir.Node] = set()
    while pending and len(seen) < 400:
        node = pending.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in ("Concat", "Expand", "Reshape", "Slice", "Tile"):
            yield node
        pending += [value.producer() for value in node.inputs if value is not None]


def _controls(
    site: Site, context: Context, found: SizedSite, symbols: Mapping[str, bool]
) -> dict[str, str]:
    """The symbol that is the batch, the queries, the past, the new keys, each by itself."""
    controls: dict[str, str] = {}
    for name in symbols:
        if name in found.relation:
            continue
        more = {name: found.numbers[name] + 1}
        moved = size_at(site, context, _with(found.numbers, found.relation, more))
        for dim in ("b", "s", "p", "n") if moved is not None else ():
            if getattr(moved, dim) == getattr(found, dim) + 1:
                controls.setdefault(dim, name)
    return controls


def _variations(
    site: Site, context: Context, found: SizedSite, symbols: Mapping[str, bool]
) -> Iterator[dict[str, int]]:
    """Other sizes: one query, many; a shorter or absent past; one batch row."""
    relation = found.relation
    controls = _controls(site, context, found, symbols)
    s, p, n = controls.get("s"), controls.get("p"), controls.get("n")
    tries: list[dict[str, int]] = []
    if p is not None and s is not None:
        tries += [{s: 1}, {s: max(4, found.s), p: 0}, {s: 3, p: found.p + found.s}]
    elif n is not None and s is not None and n != s:
        tries += [{s: 3, n: found.n + found.s}, {s: found.n + 3, n: 4}, {s: 1}]
    elif s is not None:
        tries += [{s: found.s + 4}, {s: 1}]
    if controls.get("b") is not None:
        tries = [{**change, controls["b"]: 3 - index} for index, change in enumerate(tries)]
        tries += [{controls["b"]: 1}]
    for change in tries:
        yield _with(found.numbers, relation, change)
    lengths = [name for name, is_batch in symbols.items() if not is_batch]
    for length in (found.s + 4, 1):
        yield {**found.numbers, **dict.fromkeys(lengths, length)}


def _with(
    numbers: Mapping[str, int], relation: Relation, changes: Mapping[str, int]
) -> dict[str, int]:
    result = {**numbers, **changes}
    for total, (one, other) in relation.items():
        result[total] = result[one] + result[other]
    return result
