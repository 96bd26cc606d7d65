"""The mask of a tile is the whole mask, cut; constant where every position is a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from emission import Bench

from mha_export.forms._counts import Counts, Span
from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._positions import Offset, offset_of
from mha_export.forms._tile_mask import TileMask
from mha_export.operands import Operands
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, EmptyRow, MaskSpec

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
B, H, Q, T, PAST = 3, 2, 6, 9, 3
RNG = np.random.default_rng(14)
ZERO = EmptyRow.ZERO
OPEN = {"q_len": "q", "kv_len": "t"}
ARRAYS: dict[str, np.ndarray] = {
    "key_padding": RNG.integers(0, 2, (B, T)),
    "kv_lengths": np.array([T, 7, 6]),
    "prefix_lengths": np.array([0, 4, 8]),
    "document_ids": RNG.integers(0, 3, (B, T)),
}


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": H, "kv_heads": H, "head_dim": 4} | OPEN | fields)


def _mask(**mask: Any) -> AttentionSpec:
    return _spec(mask=MaskSpec(**mask))


KEEPS: dict[str, tuple[Any, ...]] = {
    "keep-keys": ("t",),
    "keep-pairs": ("q", "t"),
    "keep-heads": (H, 1, "t"),
    "keep-rows": (H, "q", "t"),
    "keep-batch": ("batch", 1, "q", "t"),
    "keep-other-rows": ("rows", "t"),
    "keep-short": ("q", "short"),
}
SPECS: dict[str, AttentionSpec] = {
    "causal": _mask(causal=TOP_LEFT),
    "causal-end": _mask(causal=BOTTOM_RIGHT),
    "causal-past": _spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec()),
    "band": _mask(left_window=1, right_window=2),
    "left": _mask(causal=TOP_LEFT, left_window=2),
    "block": _mask(block=4),
    "block-end": _mask(block=4, causal=BOTTOM_RIGHT),
    "all": _mask(block=5, causal=TOP_LEFT, left_window=3, right_window=1),
    "prefix": _mask(causal=TOP_LEFT, prefix=True),
    "padding": _mask(padding=True, empty_row=ZERO),
    "lengths": _mask(lengths=True, empty_row=ZERO),
    "lengths-causal": _mask(lengths=True, causal=BOTTOM_RIGHT, empty_row=ZERO),
    "documents": _mask(documents=True, causal=TOP_LEFT),
    "documents-end": _mask(documents=True, causal=BOTTOM_RIGHT),
    "documents-lengths": _mask(documents=True, lengths=True, empty_row=ZERO),
    "alibi": _mask(alibi_slopes=(0.5, 0.25), causal=TOP_LEFT),
    "bias": _mask(bias=(1, H, "q", "t")),
    "bias-causal": _mask(bias=("q", "t"), causal=TOP_LEFT),
    "bias-keys": _mask(bias=("t",)),
    "bias-short": _mask(bias=(H, "q", "short"), empty_row=ZERO),
    **{name: _mask(keep=shape, empty_row=ZERO) for name, shape in KEEPS.items()},
}
SHAPES = {"batch": B, "q": Q, "t": T, "rows": Q, "short": T - 2}


class Tile:
    """A tile's mask and the whole one, of the same operands."""

    def __init__(
        self, spec: AttentionSpec, rows: tuple[int, int], keys: tuple[int, int], *, numbers: bool
    ) -> None:
        self.bench, self.spec = Bench(), spec
        named: dict[str, Any] = {}
        new = T - PAST if spec.cache is not None else T
        for name, length in (("query", Q), ("key", new), ("value", new)):
            named[name] = self.bench.heads(name, np.zeros((B, H, length, 4), np.float32))
        if spec.cache is not None:
            named["past_key"] = self.bench.heads("past", np.zeros((B, H, PAST, 4), np.float32))
        stated = {
            "key_padding": spec.mask.padding,
            "kv_lengths": spec.mask.lengths,
            "prefix_lengths": spec.mask.prefix,
            "document_ids": spec.mask.documents,
        }
        for name in ARRAYS:
            if stated[name]:
                named[name] = self.bench.value(name, ARRAYS[name])
        for name, shape in (("keep", spec.mask.keep), ("bias", spec.mask.bias)):
            if shape is not None:
                drawn = RNG.standard_normal([SHAPES.get(n, n) for n in shape]).astype(np.float32)
                named[name] = self.bench.value(name, drawn if name == "bias" else drawn > 0)
        operands = Operands(**named)
        sizes = Sizes(self.bench.scope, spec, operands)
        counts = Counts(self.bench.scope)
        self.whole = Mask(self.bench.scope, spec, operands, sizes)
        self.rows, self.keys = rows, keys
        offset: Any = {Offset.ZERO: 0, Offset.DIFFERENCE: T - Q, Offset.PAST: PAST}.get(
            offset_of(spec)
        )
        self.tile = TileMask(
            self.bench.scope,
            spec,
            operands,
            sizes,
            whole=self.whole,
            counts=counts,
            rows=self._span("rows", rows, numbers=numbers),
            keys=self._span("keys", keys, numbers=numbers),
            offset=offset,
        )

    def _span(self, name: str, ends: tuple[int, int], *, numbers: bool) -> Span:
        if numbers:
            return Span(start=ends[0], end=ends[1])
        start, end = (
            self.bench.value(f"{name} {at}", np.array([end]), shape=[1])
            for at, end in enumerate(ends)
        )
        return Span(start=start, end=end)

    def check(self) -> None:
        """All that a form asks for, at [b, h, rows, keys]."""
        parts = hiding_parts(self.spec)
        pairs = [(self.tile.allowed(parts), self.whole.allowed(parts))]
        for fill in (-math.inf, -9.0):
            pairs.append((self.tile.additive(parts, fill), self.whole.additive(parts, fill)))
        made = iter(self.bench.run(*(v for pair in pairs for v in pair if v is not None)))
        for own, whole in pairs:
            # No mask at all says that the tile sees every key.
            found = np.zeros(()) if own is None else next(made)
            wanted = np.zeros(()) if whole is None else next(made)
            np.testing.assert_array_equal(self._wide(found), self._cut(wanted))

    def _cut(self, whole: np.ndarray) -> np.ndarray:
        full = np.broadcast_to(whole, (B, H, Q, T))
        return full[:, :, self.rows[0] : self.rows[1], self.keys[0] : self.keys[1]]

    def _wide(self, found: np.ndarray) -> np.ndarray:
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        return np.broadcast_to(found, (B, H, rows, keys))


TILES = [((0, Q), (0, T)), ((0, 2), (0, 4)), ((3, 5), (2, 7)), ((5, 6), (8, 9))]


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "counts"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", SPECS)
def test_a_tile_s_mask_is_the_whole_one_cut(
    name: str, tile: tuple[tuple[int, int], tuple[int, int]], numbers: bool
) -> None:
    Tile(SPECS[name], *tile, numbers=numbers).check()


@pytest.mark.parametrize("kind", ["allowed", "additive"])
@pytest.mark.parametrize("name", ["causal", "band", "left", "block", "all"])
def test_positions_that_are_numbers_make_a_constant(name: str, kind: str) -> None:
    tile = Tile(SPECS[name], (1, 4), (0, 5), numbers=True)
    parts = hiding_parts(tile.spec)
    fill = () if kind == "allowed" else (-math.inf,)
    value = getattr(tile.tile, kind)(parts, *fill)
    assert value.const_value is not None
    assert list(value.shape) == [1, 1, 3, 5]
    assert not tile.bench.scope.nodes


def test_a_tile_that_sees_everything_needs_nothing_added() -> None:
    tile = Tile(SPECS["causal"], (4, 6), (0, 5), numbers=True)
    assert tile.tile.additive(frozenset({"causal"}), -math.inf) is None


@pytest.mark.parametrize("name", ["documents", "padding", "prefix", "keep-pairs", "lengths-causal"])
def test_what_tiles_share_is_made_once(name: str) -> None:
    """A cast, an unsqueeze or a padding of a whole operand is not repeated tile by tile."""
    tile = Tile(SPECS[name], (0, 2), (0, 4), numbers=False)
    parts = hiding_parts(tile.spec)
    tile.tile.allowed(parts)
    one = len(tile.bench.types)
    again = TileMask(
        tile.bench.scope,
        tile.spec,
        tile.tile._operands,
        tile.tile._sizes,
        whole=tile.whole,
        counts=Counts(tile.bench.scope),
        rows=Span(start=2, end=4),
        keys=Span(start=0, end=4),
        offset=None,
    )
    again.allowed(parts)
    assert len(tile.bench.types) - one < one
    made = tile.bench.types[one:]
    assert not {"Range", "Cast"} & set(made)


@pytest.mark.parametrize(
    ("name", "cuts"), [("keep-keys", 1), ("keep-heads", 1), ("keep-pairs", 2), ("bias-keys", 1)]
)
def test_a_mask_of_one_row_is_cut_by_keys_alone(name: str, cuts: int) -> None:
    tile = Tile(SPECS[name], (1, 4), (0, 5), numbers=True)
    tile.tile.additive(hiding_parts(tile.spec), -math.inf)
    assert tile.bench.types.count("Slice") == cuts
    assert not {"Shape", "Min", "Sub"} & set(tile.bench.types), "its rows are the queries'"
