"""A tile as one ``ai.onnx`` Attention node: masking, softmax and both products head by head.

    O[a:e] = Attention(Q[a:e], K[lo:hi], V[lo:hi], allowed)

A runtime that does one head after another keeps that head's scores in its cache, where plain ops
pass all heads' scores through memory once an op. Causal tiles whose cuts are numbers need no masks:
``is_causal`` counts from the end of a past, and what a tile has grown its keys to is the past of
the next. ONNX Runtime refuses a past without its present, and an output that nothing reads is soon
lost: so the last tile has a mask, and joins its keys to what the one before has grown.
Source: ai.onnx Attention, opset 23.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_export.forms._counts import Count, Counts, same
from mha_export.forms._form import FormParams, Unsupported
from mha_export.forms._layout import ints
from mha_export.forms._mask_parts import PAIRWISE_PARTS, added_parts
from mha_export.forms._rows import policy_of
from mha_export.forms._scope import Scope
from mha_export.forms._tile_mask import TileMask
from mha_export.forms._tiles import Tile
from mha_export.operands import ir_dtype
from mha_export.spec import AttentionSpec, EmptyRow

MIN_OPSET = 23


def op_refusal(spec: AttentionSpec, params: FormParams) -> Unsupported | None:
    """Why the tiles of ``spec`` cannot be the op; None where they can."""
    if params.opset < MIN_OPSET:
        return Unsupported(feature="product", needs=f"opset {MIN_OPSET} for 'attention'")
    if "mask" in params.options or "heads" in params.options:
        return Unsupported(feature="product", needs="'matmul' where mask or heads are chosen")
    plain = {
        "sinks": not spec.sinks,
        "softcap": spec.softcap is None,
        "fill": isinstance(spec.mask.fill, str),
        "bias": not added_parts(spec.mask),
        "scale": spec.effective_scale > 0,
    }
    lost = next((feature for feature, fits in plain.items() if not fits), None)
    return None if lost is None else Unsupported(feature=lost, needs="product 'matmul'")


def op_fixes_rows(spec: AttentionSpec) -> bool:
    """Whether a row without a key has to be put in place: what the op gives is not relied on."""
    return policy_of(spec) not in (EmptyRow.NOT_APPLICABLE, EmptyRow.FINITE)


class TileOp:
    """Emits one node a tile, tile after tile.

    Args:
        parts: what the mask of a tile hides.
        q: how many queries there are. kv: how many keys.
    """

    def __init__(
        self,
        scope: Scope,
        spec: AttentionSpec,
        counts: Counts,
        *,
        parts: frozenset[str],
        q: Count,
        kv: Count,
    ) -> None:
        self._scope = scope
        self._spec = spec
        self._counts = counts
        self._parts = parts
        self._q = q
        self._kv = kv
        causal = parts == {"causal"} and not spec.mask.prefix
        self._grows = causal and isinstance(q, int) and same(q, kv)
        """Whether a tile's keys are those of the one before and its own: the diagonal of a square,
        where query 0 stands at key 0 by every alignment."""
        self._grown: list[ir.Value] = []
        """Keys and values up to the end of the tile before."""

    def context(
        self, tile: Tile, q_bhsd: ir.Value, keys: ir.Value, values: ir.Value, mask: TileMask
    ) -> ir.Value:
        """[b, h, rows, e] of the tile's queries and all keys and values [b, k, t, d]."""
        span = tile.rows if self._grows else tile.keys
        own = [self._counts.rows(value, span, 2, of=self._kv) for value in (keys, values)]
        if not self._grows:
            return self._op([q_bhsd, *own, self._allowed(tile, mask)])[0]
        if self._grown and same(tile.rows.end, self._q):
            joined = [self._joined(*pair) for pair in zip(self._grown, own, strict=True)]
            return self._op([q_bhsd, *joined, self._allowed(tile, mask)])[0]
        past = [None, *self._grown] if self._grown else []
        context, *grown = self._op([q_bhsd, *own, *past], is_causal=1)
        self._grown = grown or own
        return context

    def _joined(self, before: ir.Value, own: ir.Value) -> ir.Value:
        return self._scope.op("Concat", [before, own], {"axis": 2}, dtype=own.dtype)

    def _allowed(self, tile: Tile, mask: TileMask) -> ir.Value | None:
        """[.., rows, keys]: True where a pair takes part."""
        allowed = mask.allowed(self._parts)
        if allowed is None or self._parts & PAIRWISE_PARTS:
            return allowed
        return self._full(tile, allowed)

    def _full(self, tile: Tile, value: ir.Value) -> ir.Value:
        """ONNX Runtime refuses a query axis that broadcasts."""
        counts = self._counts
        sizes = [counts.value(counts.sub(s.end, s.start)) for s in (tile.rows, tile.keys)]
        shape = [ints(self._scope, 1, 1), *sizes]
        full = self._scope.op("Concat", shape, {"axis": 0}, dtype=ir.DataType.INT64)
        return self._scope.op("Expand", [value, full], dtype=value.dtype)

    def _op(self, inputs: list[ir.Value | None], **attributes: int | float) -> list[ir.Value]:
        """The context, and what each past has grown to."""
        spec, typed = self._spec, (ir_dtype(self._spec.io_dtype), None)
        attributes["scale"] = spec.effective_scale
        if spec.effective_softmax_dtype is not spec.io_dtype:
            attributes["softmax_precision"] = ir_dtype(spec.effective_softmax_dtype).value
        outputs = [typed] * (1 + len(inputs[4:]))
        return self._scope.op_multi("Attention", inputs, attributes, outputs=outputs)
