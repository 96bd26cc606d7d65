"""Cutting the queries of one attention into tiles, and the keys each tile has to read.

Query ``s`` stands at ``i = s + offset``. A tile of the queries ``a .. e - 1`` reads the keys
``lo .. hi - 1``: every key that any of them may see, and perhaps some more (a mask hides those):

============= ========================================== ============================
part          lo                                         hi
============= ========================================== ============================
causal                                                   ``e + offset``, or the prefix
left window   ``a + offset - left_window``
right window                                             ``e + offset + right_window``
block c       ``(a + offset) // c * c``                  ``((e - 1 + offset) // c + 1) * c``
lengths                                                  the largest length
============= ========================================== ============================

Where the offset differs by batch row, lo takes the least and hi the largest. Of these keys the
range ``free`` is seen by *every* query of the tile, so that only the rest needs a mask: the
diagonal block of a causal tile.

No tile and no range of keys is ever empty: with fewer queries than tiles the last query is computed
again by those to spare, and :attr:`Cuts.repeats` says that the joined rows must be cut to length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._counts import Count, Counts, Span, same
from mha_export.forms._layout import Sizes, cast, reduce
from mha_export.forms._mask_parts import added_parts, hiding_parts
from mha_export.forms._positions import Offset, is_square, offset_of
from mha_export.forms._scope import Scope
from mha_export.forms._tile_mask import POSITION_PARTS
from mha_export.operands import Operands
from mha_export.spec import AttentionSpec

DEFAULT_TILES = 8
"""Tiles where the query length is not known while emitting, and the least for long queries."""
MOST_DEFAULT_TILES = 32
"""Of a static length without a window."""
_ROWS = 128
_SHORT_ROWS = 64


def default_tiles(spec: AttentionSpec) -> int:
    """How many tiles a spec gets where nobody says.

    Static lengths: tiles of 64 rows up to 8 of them, then of 128 up to 32 (64 in a window, where a
    shorter tile reads fewer keys), then longer ones. Dynamic lengths: 8. A row block shorter than
    that leaves a matrix product too little to do.
    """
    if not isinstance(spec.q_len, int):
        return DEFAULT_TILES
    few = math.ceil(spec.q_len / _SHORT_ROWS)
    windowed = spec.mask.left_window is not None
    most = 2 * MOST_DEFAULT_TILES if windowed else MOST_DEFAULT_TILES
    many = min(math.ceil(spec.q_len / _ROWS), most)
    return max(1, min(few, DEFAULT_TILES), many)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some queries and the keys they read.

    Attributes:
        rows: of the queries. keys: that any of them may see.
        free: those that all of them see, so that no mask is needed there; None where every key
            of the tile needs its mask.
    """

    rows: Span
    keys: Span
    free: Span | None


class Cuts:
    """The lengths, offset and tiles of one attention, as numbers where they are known."""

    def __init__(
        self, scope: Scope, spec: AttentionSpec, operands: Operands, sizes: Sizes, counts: Counts
    ) -> None:
        self._scope = scope
        self._spec = spec
        self._operands = operands
        self._counts = counts
        self.parts = hiding_parts(spec) if isinstance(spec.mask.fill, str) else frozenset()
        """Parts that keep keys out of a tile: none with a finite fill, which a score can outbid."""
        self.q: Count = spec.q_len if isinstance(spec.q_len, int) else counts.of(sizes.q)
        self.kv: Count = self._kv(sizes)
        self.offset, self._last_offset = self._offsets(sizes)
        """Position of query 0: the least of all batch rows, and the largest."""
        self._each: Count = self.q

    @property
    def offset_is_shared(self) -> bool:
        """Whether all batch rows have one offset."""
        return same(self.offset, self._last_offset)

    def tiles(self, wanted: int, *, split: bool) -> list[Tile]:
        """At most ``wanted`` tiles. ``split``: look for keys that need no mask."""
        rows = self._rows(wanted)
        return [self._tile(index, span, split=split) for index, span in enumerate(rows)]

    @property
    def repeats(self) -> bool:
        """Whether the last query may come more than once."""
        return not isinstance(self.q, int)

    def _rows(self, wanted: int) -> list[Span]:
        counts, q = self._counts, self.q
        if isinstance(q, int):
            size = math.ceil(q / min(wanted, q))
            return [Span(start=a, end=min(a + size, q)) for a in range(0, q, size)]
        if wanted == 1:
            return [Span(start=0, end=q)]
        self._each = each = counts.div(counts.add(q, wanted - 1), wanted)
        last = counts.sub(q, 1)
        starts = [counts.mul(each, index) for index in range(wanted)]
        return [
            Span(
                start=0 if index == 0 else counts.least(starts[index], last),
                end=self._end(starts, index),
            )
            for index in range(wanted)
        ]

    def _end(self, starts: list[Count], index: int) -> Count:
        if index == len(starts) - 1:
            return self.q  # tiles of ceil(q / n) rows reach the end
        # The first tile ends where the second would start: never beyond q.
        return starts[1] if index == 0 else self._counts.least(starts[index + 1], self.q)

    def _tile(self, index: int, rows: Span, *, split: bool) -> Tile:
        keys = self._spared(index, self._keys(rows))
        free = self._free(rows, keys) if split else None
        return Tile(rows=rows, keys=keys, free=free)

    def _keys(self, rows: Span) -> Span:
        counts = self._counts
        lows, highs = self._lows(rows), self._highs(rows)
        start: Count = 0
        if lows:
            start = counts.most(counts.least(counts.most(*lows), counts.sub(self.kv, 1)), 0)
        if not highs:
            return Span(start=start, end=self.kv)
        if self._ends_within(rows, highs):
            return Span(start=start, end=highs[0])
        end = counts.least(*highs, self.kv)
        return Span(start=start, end=counts.most(end, counts.add(start, 1)))

    def _spared(self, index: int, keys: Span) -> Span:
        """One key is enough for a tile that only repeats the last query."""
        counts = self._counts
        if index == 0 or isinstance(self.q, int):
            return keys
        beyond = counts.sub(self.q, counts.mul(self._each, index))
        used = counts.least(counts.most(beyond, 0), 1)
        end = counts.most(counts.mul(used, keys.end), counts.add(keys.start, 1))
        return Span(start=keys.start, end=end)

    def _ends_within(self, rows: Span, highs: list[Count]) -> bool:
        """Whether the only bound is the tile's own end in a sequence as long as the queries."""
        return self.kv is self.q and len(highs) == 1 and same(highs[0], rows.end)

    def _lows(self, rows: Span) -> list[Count]:
        counts, mask = self._counts, self._spec.mask
        first = counts.add(rows.start, self.offset)
        found: list[Count] = []
        if "left_window" in self.parts and mask.left_window is not None:
            found.append(counts.sub(first, mask.left_window))
        if "block" in self.parts and mask.block is not None:
            chunk = counts.div(counts.most(first, 0), mask.block)
            found.append(counts.mul(chunk, mask.block))
        return found

    def _highs(self, rows: Span) -> list[Count]:
        counts, mask = self._counts, self._spec.mask
        end = counts.add(rows.end, self._last_offset)
        found: list[Count] = []
        if "causal" in self.parts:
            prefix = self._operands.prefix_lengths
            found.append(end if prefix is None else counts.most(end, self._largest(prefix)))
        if "right_window" in self.parts and mask.right_window is not None:
            found.append(counts.add(end, mask.right_window))
        if "block" in self.parts and mask.block is not None:
            chunk = counts.div(counts.most(counts.sub(end, 1), 0), mask.block)
            found.append(counts.mul(counts.add(chunk, 1), mask.block))
        if "lengths" in self.parts and self._operands.kv_lengths is not None:
            found.append(self._largest(self._operands.kv_lengths))
        return found

    def _free(self, rows: Span, keys: Span) -> Span | None:
        """Keys that all queries of the tile see; None where looking for them does not pay."""
        spec, parts = self._spec, hiding_parts(self._spec)
        if not parts:
            return None if added_parts(spec.mask) else keys
        positions = parts <= POSITION_PARTS and self.parts and not spec.mask.prefix
        if not positions or added_parts(spec.mask) or not self.offset_is_shared:
            return None
        counts = self._counts
        numbers = [rows.start, rows.end, keys.start, keys.end, self.offset]
        if all(isinstance(number, int) for number in numbers):
            return self._free_numbers(rows, keys)
        if parts != {"causal"}:
            return None
        first = counts.add(rows.start, self.offset)
        if first == 0:
            return None
        first = counts.least(first, keys.end)
        if offset_of(spec) is Offset.DIFFERENCE:
            first = counts.most(first, 0)
        return Span(start=0, end=first)

    def _free_numbers(self, rows: Span, keys: Span) -> Span | None:
        """The free range of a tile whose positions are numbers, if it is half of its keys."""
        a, e, lo, hi, offset = (
            count
            for count in (rows.start, rows.end, keys.start, keys.end, self.offset)
            if isinstance(count, int)
        )
        mask = self._spec.mask
        start, end = lo, hi
        if mask.causal is not None:
            end = min(end, a + offset if e - a > 1 else a + offset + 1)
        if mask.right_window is not None:
            end = min(end, a + offset + mask.right_window + 1)
        if mask.left_window is not None:
            start = max(start, e - 1 + offset - mask.left_window)
        if mask.block is not None:
            start = max(start, (e - 1 + offset) // mask.block * mask.block)
            end = min(end, ((a + offset) // mask.block + 1) * mask.block)
        return Span(start=start, end=end) if 2 * (end - start) >= hi - lo else None

    def _kv(self, sizes: Sizes) -> Count:
        spec, counts = self._spec, self._counts
        if is_square(spec):
            return self.q
        if isinstance(spec.kv_len, int) and spec.cache is None:
            return spec.kv_len
        return counts.of(sizes.kv)

    def _offsets(self, sizes: Sizes) -> tuple[Count, Count]:
        counts, kind = self._counts, offset_of(self._spec)
        if kind is Offset.PAST:
            past = counts.of(sizes.past)
            return past, past
        if kind is Offset.DIFFERENCE:
            difference = counts.sub(self.kv, self.q)
            return difference, difference
        if kind is Offset.LENGTHS and self._reads_positions():
            lengths = self._operands.kv_lengths
            assert lengths is not None
            return (
                counts.sub(self._reduced("ReduceMin", lengths), self.q),
                counts.sub(self._largest(lengths), self.q),
            )
        return 0, 0

    def _reads_positions(self) -> bool:
        return bool(self.parts & POSITION_PARTS)

    def _largest(self, value: ir.Value) -> Count:
        return self._reduced("ReduceMax", value)

    def _reduced(self, op_type: str, value: ir.Value) -> Count:
        """The extreme of a [b] operand, [1]."""
        return self._counts.once(
            (op_type, id(value)),
            lambda: reduce(self._scope, op_type, cast(self._scope, value, ir.DataType.INT64), [0]),
        )
