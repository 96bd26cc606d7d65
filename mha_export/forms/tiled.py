"""``tiled``: the queries cut into tiles, each of which reads only the keys it can see.

    tile a .. e:  S = Q[a:e] K[lo:hi]ᵀ, masked only where some query of the tile may not look
                  O[a:e] = Softmax(S) V[lo:hi]

About half the work of a causal prefill is never done, and a window's tile reads the window alone;
the largest tensor of scores shrinks with the number of tiles. Plain ops of opset 13, so that every
runtime takes it; or, with ``product: attention``, one ``ai.onnx`` Attention a tile. Key/value heads
are never repeated. Lengths may be numbers or symbols: cuts are then computed in the graph. See
docs/forms/tiled.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms._counts import Counts, Span, same
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._grouping import Groups
from mha_export.forms._hiding import Hiding
from mha_export.forms._layout import LENGTH_AXIS, Sizes, as_layout, four_dimensional
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts, hiding_parts
from mha_export.forms._prepare import Prepared, finished, prepare
from mha_export.forms._products import Piece, Products, scaled_query
from mha_export.forms._scope import Scope
from mha_export.forms._support import common_refusal, first_refusal
from mha_export.forms._tile_mask import POSITION_PARTS, TileMask
from mha_export.forms._tile_op import TileOp, op_fixes_rows, op_refusal
from mha_export.forms._tiles import DEFAULT_TILES, Cuts, Tile, default_tiles
from mha_export.operands import Heads, Layout, Operands
from mha_export.spec import AttentionSpec

MOST_TILES = 256


@dataclass(frozen=True, kw_only=True)
class TiledForm:
    name: str = "tiled"
    min_opset: int = 13
    summary: str = "query tiles that read only the keys they see, in plain ops: long prefill"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        refusal = first_refusal(
            common_refusal(self, spec, params), _option_refusal(spec, params), _refusal(spec)
        )
        if refusal is not None:
            return refusal
        means: dict[str, str] = {}
        if not isinstance(spec.mask.fill, str) and hiding_parts(spec) & POSITION_PARTS:
            means["fill"] = "every tile reads every key: a score can outbid a finite fill"
        return Supported(by_other_means=means)

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        operands = dataclasses.replace(operands, score_mask=None)  # a tile's mask is never [s, t]
        sizes = Sizes(scope, spec, operands)
        ready = prepare(scope, spec, operands, sizes, ops=False)
        output = _Tiles(scope, spec, params, operands, sizes).emit(ready)
        heads = Heads(value=output, layout=Layout.BSHD, heads=spec.q_heads, dim=spec.value_dim)
        return Emitted(
            output=finished(scope, spec, heads),
            present_key=ready.present_key,
            present_value=ready.present_value,
        )


def _option_refusal(spec: AttentionSpec, params: FormParams) -> Unsupported | None:
    tiles = params.options.get("tiles", DEFAULT_TILES)
    if type(tiles) is not int or not 1 <= tiles <= MOST_TILES:
        return Unsupported(feature="tiles", needs=f"a whole number of 1 to {MOST_TILES} tiles")
    if params.options.get("mask", "diagonal") not in ("diagonal", "tile"):
        return Unsupported(feature="mask", needs="'diagonal' or 'tile'")
    if params.options.get("heads", "rows") not in ("rows", "broadcast"):
        return Unsupported(feature="heads", needs="'rows' or 'broadcast'")
    if params.options.get("product", "matmul") not in ("matmul", "attention"):
        return Unsupported(feature="product", needs="'matmul' or 'attention'")
    return op_refusal(spec, params) if _by_op(params) else None


def _by_op(params: FormParams) -> bool:
    return params.options.get("product") == "attention"


def _as_rows(params: FormParams) -> bool:
    return params.options.get("heads", "rows") == "rows"


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    if spec.qk_output is not None:
        return Unsupported(
            feature="qk_output", needs="form primitive or onnx: the scores of a tile are a part"
        )
    return None


class _Tiles:
    """Emits the tiles of one attention and joins them."""

    def __init__(
        self,
        scope: Scope,
        spec: AttentionSpec,
        params: FormParams,
        operands: Operands,
        sizes: Sizes,
    ) -> None:
        self._scope = scope
        self._spec = spec
        self._params = params
        self._operands = operands
        self._sizes = sizes
        self._counts = counts = Counts(scope)
        self._cuts = Cuts(scope, spec, operands, sizes, counts)
        self._parts = hiding_parts(spec)
        self._whole_mask = Mask(scope, spec, operands, sizes)
        self._hiding = Hiding(spec=spec, operands=operands, cuts=True)
        self._groups = Groups(scope=scope, spec=spec, counts=counts, rows=_as_rows(params))
        self._by_op = _by_op(params)
        self._op = TileOp(
            scope,
            spec,
            counts,
            parts=self._parts,
            q=self._cuts.q,
            kv=self._cuts.kv,
        )
        self._products = Products(
            scope=scope,
            spec=spec,
            operands=operands,
            sizes=sizes,
            counts=counts,
            groups=self._groups,
            hiding=self._hiding,
            few=False,
        )

    def emit(self, ready: Prepared) -> ir.Value:
        """[b, s, h, e]: tiles are turned one by one, while they are in the cache."""
        scope, spec = self._scope, self._spec
        query = ready.query if self._by_op else scaled_query(scope, spec, ready.query)
        query = four_dimensional(scope, query)
        value = as_layout(scope, ready.value, Layout.BHSD)
        keys = self._groups.keys(as_layout(scope, ready.key, Layout.BHSD).value)
        values = self._groups.keys(value.value)
        fixes = op_fixes_rows(spec) if self._by_op else self._hiding.fixes_rows
        stated = self._hiding.stated_row(scope, value) if fixes else None
        split = self._params.options.get("mask", "diagonal") == "diagonal" and not self._by_op
        wanted = self._params.options.get("tiles", default_tiles(spec))
        assert isinstance(wanted, int)
        outputs = [
            self._tile(tile, query, keys, values, stated)
            for tile in self._cuts.tiles(wanted, split=split)
        ]
        if len(outputs) == 1:
            return outputs[0]
        joined = scope.op("Concat", outputs, {"axis": 1}, dtype=values.dtype)
        if self._cuts.repeats:
            joined = self._counts.rows(joined, Span(start=0, end=self._cuts.q), 1)
        return joined

    def _tile(
        self,
        tile: Tile,
        query: Heads,
        keys: ir.Value,
        values: ir.Value,
        stated: ir.Value | None,
    ) -> ir.Value:
        """[b, rows, h, e]."""
        queries = self._queries(query, tile.rows)
        if self._by_op:
            mask = self._mask(tile, tile.keys)
            output = self._op.context(tile, queries, keys, values, mask)
        else:
            output = self._by_products(tile, queries, keys, values)
        if stated is not None:
            has_key = self._mask(tile, tile.keys).row_has_key()
            output = self._scope.op("Where", [has_key, output, stated], dtype=output.dtype)
        return self._scope.op("Transpose", [output], {"perm": [0, 2, 1, 3]}, dtype=output.dtype)

    def _by_products(
        self, tile: Tile, queries: ir.Value, keys: ir.Value, values: ir.Value
    ) -> ir.Value:
        """[b, h, rows, e] by two products and a softmax."""
        counts, kv, axis = self._counts, self._cuts.kv, self._groups.key_axis
        rows = counts.sub(tile.rows.end, tile.rows.start)
        pieces = [
            Piece(
                keys=counts.rows(keys, span, axis, of=kv),
                count=counts.sub(span.end, span.start),
                mask=self._mask(tile, span) if masked else None,
            )
            for span, masked in _pieces(tile)
        ]
        return self._products.context(
            queries,
            rows,
            pieces,
            counts.rows(values, tile.keys, axis, of=kv),
            self._parts,
            by_head=self._meets_by_head(pieces),
        )

    def _queries(self, query: Heads, rows: Span) -> ir.Value:
        """The queries of one tile, [b, h, rows, d]."""
        axis = LENGTH_AXIS[query.layout]
        cut = self._counts.rows(query.value, rows, axis, of=self._cuts.q)
        return as_layout(self._scope, dataclasses.replace(query, value=cut), Layout.BHSD).value

    def _mask(self, tile: Tile, keys: Span) -> TileMask:
        shared = self._cuts.offset_is_shared
        return TileMask(
            self._scope,
            self._spec,
            self._operands,
            self._sizes,
            whole=self._whole_mask,
            counts=self._counts,
            rows=tile.rows,
            keys=keys,
            offset=self._cuts.offset if shared else None,
        )

    def _meets_by_head(self, pieces: Sequence[Piece]) -> bool:
        """Whether scores are masked as [b, h, s, t]: groups are rows, or the mask has heads."""
        if self._groups.rows:
            return self._spec.sinks or any(piece.mask is not None for piece in pieces)
        positions = self._parts <= POSITION_PARTS and self._cuts.offset_is_shared
        added = added_parts(self._spec.mask)
        return bool(added) or not positions or self._spec.mask.prefix


def _pieces(tile: Tile) -> list[tuple[Span, bool]]:
    """The tile's keys in order, each range with whether it needs a mask; none provably empty."""
    free = tile.free
    if free is None:
        return [(tile.keys, True)]
    before = Span(start=tile.keys.start, end=free.start)
    after = Span(start=free.end, end=tile.keys.end)
    ranges = [(before, True), (free, False), (after, True)]
    return [(span, masked) for span, masked in ranges if not same(span.start, span.end)]


FORM = TiledForm()
