"""Which keys a tile reads, and which of them need no mask: against the pairs themselves."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from runtimes import OrtSession

from mha_export.forms import FormParams, build_model, form_named
from mha_export.forms._counts import Count, Counts, Span
from mha_export.forms._layout import Sizes
from mha_export.forms._scope import Scope
from mha_export.forms._tile_mask import visible
from mha_export.forms._tiles import Cuts
from mha_export.operands import Heads, Layout, Operands
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, EmptyRow, MaskSpec

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
ROW_OPERANDS = ("kv_lengths", "prefix_lengths")
BATCH = 2

Numbers = list[int | None]
"""Of one tile: first and last row, first and last key, first and last free key; ends excluded."""


def _operands(spec: AttentionSpec, *, shapes: bool) -> Operands:
    def heads(name: str, length: Any) -> Heads:
        shape = ir.Shape([BATCH, length, 8]) if shapes else None
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
        return Heads(value=value, layout=Layout.BSM, heads=1, dim=8)

    named: dict[str, Any] = {
        "query": heads("query", spec.q_len),
        "key": heads("key", spec.q_len if spec.cache else spec.kv_len),
        "value": heads("value", spec.kv_len),
    }
    if spec.cache is not None:
        named["past_key"] = heads("past_key", "past")
    stated = {"kv_lengths": spec.uses_lengths, "prefix_lengths": spec.mask.prefix}
    named |= {
        name: ir.Value(name=name, shape=ir.Shape([BATCH]), type=ir.TensorType(ir.DataType.INT64))
        for name in ROW_OPERANDS
        if stated[name]
    }
    return Operands(**named)


class Tiles:
    """The tiles of a spec, as numbers where lengths are, else from a run of their arithmetic."""

    def __init__(
        self, spec: AttentionSpec, wanted: int, *, split: bool = True, shapes: bool = True
    ) -> None:
        self.scope = Scope("", opset=18)
        self.operands = _operands(spec, shapes=shapes)
        sizes, counts = Sizes(self.scope, spec, self.operands), Counts(self.scope)
        self.cuts = Cuts(self.scope, spec, self.operands, sizes, counts)
        self.tiles = self.cuts.tiles(wanted, split=split)
        self._counts = counts

    def counts(self) -> list[list[Count | None]]:
        def ends(span: Span | None) -> list[Count | None]:
            return [None, None] if span is None else [span.start, span.end]

        return [[*ends(t.rows), *ends(t.keys), *ends(t.free)] for t in self.tiles]

    def numbers(self) -> list[Numbers]:
        """Where everything is known while emitting."""
        assert not self.scope.nodes, "numbers fold: there is nothing to compute"
        found = self.counts()
        assert all(isinstance(count, int | None) for tile in found for count in tile)
        return found

    def run(self, lengths: dict[str, int], **rows: np.ndarray) -> list[Numbers]:
        """What a graph of them computes at these lengths."""
        shapes = {"query": "q", "key": "n", "past_key": "past"}
        arrays = {
            name: np.zeros((BATCH, lengths.get(shapes.get(name, ""), 1), 8), np.float32)
            for name in ("query", "key", "value", "past_key")
        }
        made = self._session.run(arrays | rows)
        return [
            [None if c is None else int(made[f"{t} {at}"][0]) for at, c in enumerate(tile)]
            for t, tile in enumerate(self.counts())
        ]

    @functools.cached_property
    def _session(self) -> OrtSession:
        outputs = []
        for t, tile in enumerate(self.counts()):
            for at, count in enumerate(tile):
                if count is not None:
                    outputs.append(self.scope.op("Identity", [self._counts.value(count)]))
                    outputs[-1].name = f"{t} {at}"
        graph = ir.Graph(
            [value for _, value in self.operands.values()],
            outputs,
            nodes=self.scope.nodes,
            initializers=self.scope.initializers,
            opset_imports={"": 18},
            name="counts",
        )
        return OrtSession(ir.Model(graph, ir_version=10))


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 1, "kv_heads": 1, "head_dim": 8} | fields)


MASKS = {
    "none": MaskSpec(),
    "causal": MaskSpec(causal=TOP_LEFT),
    "causal-end": MaskSpec(causal=BOTTOM_RIGHT),
    "left-0": MaskSpec(causal=TOP_LEFT, left_window=0),
    "left-1": MaskSpec(causal=TOP_LEFT, left_window=1),
    "left-7": MaskSpec(causal=BOTTOM_RIGHT, left_window=7),
    "right-0": MaskSpec(right_window=0),
    "right-3": MaskSpec(right_window=3),
    "right-end": MaskSpec(causal=BOTTOM_RIGHT, right_window=1),
    "band": MaskSpec(left_window=2, right_window=4),
    "block-1": MaskSpec(block=1),
    "block-4": MaskSpec(block=4),
    "block-causal": MaskSpec(block=6, causal=TOP_LEFT),
    "block-end": MaskSpec(block=5, causal=BOTTOM_RIGHT),
    "all": MaskSpec(block=9, causal=BOTTOM_RIGHT, left_window=5, right_window=2),
}
SIZES = [(1, 1), (12, 12), (13, 13), (12, 20), (20, 12), (1, 9), (2, 9), (9, 40)]


def _pairs(mask: MaskSpec, q: int, kv: int, offset: int) -> np.ndarray:
    return visible(mask, np.arange(q) + offset, np.arange(kv))


def _check(tiles: list[Numbers], seen: np.ndarray, *, spare: int = 0) -> None:
    """The tiles cover the rows, and each reads the keys from the first to the last that it sees.

    ``spare``: keys that a tile may read beyond those.
    """
    rows = [row for start, end, *_ in tiles for row in range(start or 0, end or 0)]
    assert sorted(set(rows)) == list(range(len(seen)))
    for start, end, lo, hi, free, last in tiles:
        assert start is not None
        assert end is not None
        assert lo is not None
        assert hi is not None
        assert 0 <= start < end <= len(seen)
        assert 0 <= lo < hi <= seen.shape[1]
        (looked,) = np.nonzero(seen[start:end].any(axis=0))
        if len(looked):
            assert lo <= looked[0]
            assert looked[-1] < hi
            assert hi - lo <= looked[-1] + 1 - looked[0] + spare
        else:
            assert hi - lo <= 1 + spare
        if free is not None:
            assert last is not None
            assert seen[start:end, free:last].all(), "a free key is seen by every query"


@pytest.mark.parametrize("wanted", [1, 2, 4, 5, 32])
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_numbers(mask: str, wanted: int) -> None:
    for q, kv in SIZES:
        spec = _spec(mask=MASKS[mask], q_len=q, kv_len=kv)
        offset = kv - q if MASKS[mask].causal is BOTTOM_RIGHT else 0
        seen = _pairs(MASKS[mask], q, kv, offset)
        tiles = Tiles(spec, wanted).numbers()
        assert len(tiles) == -(-q // -(-q // min(wanted, q)))
        assert [end for _, end, *_ in tiles[:-1]] == [start for start, *_ in tiles[1:]]
        _check(tiles, seen, spare=_spare(spec))
        for start, end, lo, hi, free, last in tiles:
            clear = _seen_by_all(MASKS[mask], seen[start:end], start + offset)
            clear = [key for key in clear if lo <= key < hi]
            found = [] if free is None else [*range(free, last)]
            assert found == (clear if 2 * len(clear) >= hi - lo else [])


def _spare(spec: AttentionSpec) -> int:
    """A block is read from its start to its end; what else is hidden in it is not looked at."""
    alone = replace(spec.mask, block=None) == MaskSpec()
    return 0 if alone else spec.mask.block or 0


def _seen_by_all(mask: MaskSpec, seen: np.ndarray, first: int) -> list[int]:
    """Keys that every row sees; the diagonal's block stays square, with its first column."""
    (clear,) = np.nonzero(seen.all(axis=0))
    square = mask.causal is not None and len(seen) > 1
    return [int(key) for key in clear if not (square and key == first)]


SQUARE = {"q_len": "q", "kv_len": "q"}
FREE = {"q_len": "q", "kv_len": "n"}
PAST: dict[str, Any] = {"q_len": "q", "cache": CacheSpec()}
ZERO, FINITE = EmptyRow.ZERO, EmptyRow.FINITE
DYNAMIC = {
    "none": _spec(**FREE),
    "causal": _spec(mask=MASKS["causal"], **SQUARE),
    "causal-others": _spec(mask=MASKS["causal"], **FREE),
    "causal-end": _spec(mask=MASKS["causal-end"], **FREE),
    "causal-past": _spec(mask=MASKS["causal-end"], **PAST),
    "left": _spec(mask=MASKS["left-1"], **SQUARE),
    "left-past": _spec(mask=MASKS["left-7"], **PAST),
    "band": _spec(mask=MASKS["band"], **SQUARE),
    "band-others": _spec(mask=MASKS["band"], **FREE),
    "right-end": _spec(mask=MASKS["right-end"], **FREE),
    "block": _spec(mask=MASKS["block-4"], **SQUARE),
    "block-1": _spec(mask=MASKS["block-1"], **SQUARE),
    "block-end": _spec(mask=MASKS["block-end"], **FREE),
    "all": _spec(mask=MASKS["all"], **PAST),
    "fill": _spec(mask=MaskSpec(causal=TOP_LEFT, fill=-9.0), **SQUARE),
    "fill-band": _spec(mask=MaskSpec(left_window=2, right_window=4, fill=-9.0), **SQUARE),
    "fill-block": _spec(mask=MaskSpec(block=4, fill=-9.0), **SQUARE),
    "fill-lengths": _spec(mask=MaskSpec(lengths=True, fill=-9.0, empty_row=FINITE), **FREE),
    "prefix": _spec(mask=MaskSpec(causal=TOP_LEFT, prefix=True), **SQUARE),
    "lengths": _spec(mask=MaskSpec(lengths=True, empty_row=ZERO), **FREE),
    "lengths-end": _spec(mask=MaskSpec(lengths=True, causal=BOTTOM_RIGHT, empty_row=ZERO), **FREE),
    "lengths-left": _spec(
        mask=MaskSpec(lengths=True, causal=BOTTOM_RIGHT, left_window=3, empty_row=ZERO), **FREE
    ),
    "lengths-first": _spec(mask=MaskSpec(lengths=True, causal=TOP_LEFT, empty_row=ZERO), **SQUARE),
}
OFFSET = ("causal-end", "causal-past")
ONLY_DIAGONAL = ("causal", "causal-others", *OFFSET)
LENGTHS = [(1, 1), (1, 9), (2, 9), (7, 7), (8, 8), (9, 12), (12, 5), (17, 30)]
ROWS = {"kv_lengths": np.array([3, 5]), "prefix_lengths": np.array([4, 2])}


@pytest.mark.parametrize("wanted", [1, 2, 8])
@pytest.mark.parametrize("mask", DYNAMIC)
def test_tiles_of_symbols(mask: str, wanted: int) -> None:
    """One graph for all lengths: tiles to spare repeat the last query, and read one key for it."""
    spec = DYNAMIC[mask]
    made = Tiles(spec, wanted)
    assert len(made.tiles) == wanted
    assert made.cuts.repeats
    assert made.cuts.offset_is_shared is (mask not in ("lengths-end", "lengths-left"))
    for q, kv in LENGTHS:
        if spec.kv_len == "q":
            kv = q
        kv = max(kv, q) if spec.cache is not None else kv
        new = q if spec.cache is not None else kv
        given = {operand for operand, _ in made.operands.values()}
        rows = {name: np.minimum(ROWS[name], kv) for name in given & set(ROWS)}
        tiles = made.run({"q": q, "n": new, "past": max(kv - q, 0)}, **rows)
        seen, offset = _seen(spec, q, kv, **rows)
        each = -(-q // wanted)
        used = -(-q // each)
        _check(tiles[:used], seen, spare=_spare(spec))
        assert [tile[:2] for tile in tiles[used:]] == [[q - 1, q]] * (wanted - used)
        assert [tile[3] - tile[2] for tile in tiles[used:]] == [1] * (wanted - used)
        for at, (start, _, _, hi, free, last) in enumerate(tiles[:used]):
            if mask in ONLY_DIAGONAL:
                first = at == 0 and mask not in OFFSET
                expected = [None, None] if first else [0, max(min(start + offset, hi), 0)]
                assert [free, last] == expected
            elif mask == "none":
                assert [free, last] == [0, kv]
            else:
                assert free is None


def _seen(spec: AttentionSpec, q: int, kv: int, **rows: np.ndarray) -> tuple[np.ndarray, int]:
    """[s, t]: whether any batch row's query sees the key; and the offset, where they share one."""
    mask, offset = spec.mask, 0
    if spec.cache is not None or (mask.causal is BOTTOM_RIGHT and not mask.lengths):
        offset = kv - q
    if not isinstance(mask.fill, str):
        return np.ones((q, kv), np.bool_), offset
    keys = np.arange(kv)
    seen = np.zeros((q, kv), np.bool_)
    for b in range(BATCH):
        shift = offset
        if mask.lengths and mask.causal is not TOP_LEFT:
            shift = int(rows["kv_lengths"][b]) - q
        own = _pairs(mask, q, kv, shift)
        if mask.prefix:
            own |= keys < rows["prefix_lengths"][b]
        if mask.lengths:
            own &= keys < rows["kv_lengths"][b]
        seen |= own
    return seen, offset


def test_nothing_is_looked_for_where_a_tile_has_one_mask() -> None:
    for spec in DYNAMIC.values():
        assert all(tile.free is None for tile in Tiles(spec, 4, split=False).tiles)


@pytest.mark.parametrize(
    "mask",
    [
        MaskSpec(causal=TOP_LEFT, alibi_slopes=(0.5,)),
        MaskSpec(causal=TOP_LEFT, bias=(12, 12)),
        MaskSpec(bias=(12, 12)),
        MaskSpec(causal=TOP_LEFT, padding=True, empty_row=ZERO),
        MaskSpec(causal=TOP_LEFT, prefix=True),
        MaskSpec(causal=TOP_LEFT, fill=-9.0),
    ],
    ids=["alibi", "bias", "bias-alone", "padding", "prefix", "fill"],
)
def test_what_positions_do_not_decide_needs_a_mask_everywhere(mask: MaskSpec) -> None:
    spec = _spec(mask=mask, q_len=12, kv_len=12)
    assert all(tile.free is None for tile in Tiles(spec, 4).tiles)


def test_lengths_that_move_no_position_are_not_read_for_an_offset() -> None:
    """Padding of a whole attention: every query stands at its own index for all there is to see."""
    made = Tiles(DYNAMIC["lengths"], 1)
    types = [node.op_type for node in made.scope.nodes]
    assert "ReduceMin" not in types
    assert types.count("ReduceMax") == 1


def test_the_diagonal_of_a_square_is_the_end_of_its_rows() -> None:
    """No bound is computed for what is one by itself."""
    first = Tiles(DYNAMIC["causal"], 4).tiles[0]
    assert first.keys.end is first.rows.end


def test_stated_numbers_need_no_shapes() -> None:
    """An operand of a graph may have lost its shape; the spec has not."""
    spec = _spec(mask=MASKS["causal-end"], q_len=12, kv_len=20)
    shaped = Tiles(spec, 4).numbers()
    assert Tiles(spec, 4, shapes=False).numbers() == shaped


def test_queries_of_a_block_beyond_the_keys_see_nothing() -> None:
    """The last key was read for them, and not masked: it lies in a block of its own."""
    spec = _spec(mask=MaskSpec(block=4, empty_row=EmptyRow.NAN), q_len=6, kv_len=4)
    model = build_model(form_named("tiled"), spec, FormParams(opset=13, options={"tiles": 6}))
    rng = np.random.default_rng(3)
    arrays = {
        name: rng.standard_normal((1, length, 8)).astype(np.float32)
        for name, length in (("query", 6), ("key", 4), ("value", 4))
    }
    output = OrtSession(model).run(arrays)["output"]
    assert np.isfinite(output[:, :4]).all()
    assert np.isnan(output[:, 4:]).all()
