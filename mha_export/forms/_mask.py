"""The mask of one attention as graph values, from its parts or as the source graph made it.

Every part is emitted from run-time shapes, so that all dimensions may be symbolic. Hiding parts
make a boolean tensor (True: the pair takes part), additive parts a float one; both broadcast to
[b, h, s, t] and have rank 4. Fill and empty rows are the caller's affair: they differ by form.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from mha_export.forms._layout import (
    Sizes,
    cast,
    dimension,
    floating,
    ints,
    lowest,
    numpy_dtype,
    reduce,
    unsqueeze,
)
from mha_export.forms._mask_parts import PAIRWISE_PARTS, hiding_parts, may_be_shorter
from mha_export.forms._positions import Offset, offset_of
from mha_export.forms._scope import Scope
from mha_export.operands import Operands, ScoreMask, ir_dtype
from mha_export.spec import AttentionSpec

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL


class Mask:
    """Emits the mask of one attention.

    Args:
        scope: where the nodes go.
        spec: the attention.
        operands: its bound values; a bound ``score_mask`` stands for all hiding parts.
        sizes: its run-time sizes.
    """

    def __init__(self, scope: Scope, spec: AttentionSpec, operands: Operands, sizes: Sizes) -> None:
        self._scope = scope
        self._spec = spec
        self._operands = operands
        self._sizes = sizes
        self._made: dict[str, ir.Value] = {}

    @property
    def bound(self) -> bool:
        """Whether the source graph's own mask stands for the hiding parts."""
        return self._operands.score_mask is not None

    @property
    def source(self) -> ScoreMask | None:
        """The source graph's own mask, where it stands for the hiding parts."""
        return self._operands.score_mask

    def allowed(self, parts: frozenset[str]) -> ir.Value | None:
        """True where every one of ``parts`` lets a pair take part; None without parts."""
        makers = {
            "causal": self._causal,
            "left_window": self._left_window,
            "right_window": self._right_window,
            "block": self._block,
            "documents": self._documents,
            "lengths": self._lengths,
            "padding": self._padding,
            "keep": self._keep,
            "bias": self._bias_present,
        }
        total: ir.Value | None = None
        for name, make in makers.items():
            if name in parts:
                part = make()
                total = part if total is None else self._bool("And", total, part)
        return total

    def added(self) -> ir.Value | None:
        """Bias plus ALiBi in the I/O dtype; a bias shorter than the keys is padded with 0."""
        total: ir.Value | None = None
        if self._operands.bias is not None:
            total = self._bias()
        if self._spec.mask.alibi_slopes is not None:
            alibi = self._alibi(self._spec.mask.alibi_slopes)
            if total is None:
                return alibi
            total = self._scope.op("Add", [total, alibi], dtype=alibi.dtype)
        return total

    def additive(self, parts: frozenset[str], fill: float) -> ir.Value | None:
        """The value added to the scores: ``fill`` where ``parts`` forbid, plus bias and ALiBi.

        A finite fill is added to the bias, -inf replaces it. A bound source mask is used as it is.
        """
        dtype = self._spec.io_dtype
        added = self.added()
        source = self._operands.score_mask
        if source is not None and parts:
            base = source.value
            if source.kind == "keep":
                base = self._choose(
                    base, floating(self._scope, 0.0, dtype), floating(self._scope, fill, dtype)
                )
            return base if added is None else self._float("Add", base, added)
        allowed = self.allowed(parts)
        if allowed is None:
            return added
        zero, fill_value = floating(self._scope, 0.0, dtype), floating(self._scope, fill, dtype)
        if added is None:
            return self._choose(allowed, zero, fill_value)
        if math.isinf(fill):
            return self._choose(allowed, added, fill_value)
        return self._float("Add", added, self._choose(allowed, zero, fill_value))

    def constant(self, value: float) -> ir.Value:
        """A scalar of the I/O dtype."""
        return floating(self._scope, value, self._spec.io_dtype)

    def full(self, value: ir.Value, parts: frozenset[str]) -> ir.Value:
        """``value``, made from ``parts``, at rank 4 with its last two axes exactly [s, t]."""
        if self._is_full(parts):
            return value
        one = ints(self._scope, 1)
        shape = self._scope.op(
            "Concat", [one, one, self._sizes.q, self._sizes.kv], {"axis": 0}, dtype=_INT64
        )
        return self._scope.op("Expand", [value, shape], dtype=value.dtype)

    def _is_full(self, parts: frozenset[str]) -> bool:
        """Whether a mask of these parts is [.., s, t] without expansion."""
        spec, source = self._spec, self._operands.score_mask
        if spec.mask.alibi_slopes is not None:
            return True
        if source is None or not parts:
            return bool(parts & PAIRWISE_PARTS)
        shape = source.value.shape
        known = None if shape is None or len(shape) != 4 else [_dim(size) for size in shape]
        return known is not None and known[2:] == [spec.q_len, spec.kv_len]

    def row_has_key(self) -> ir.Value:
        """[b or 1, h or 1, s or 1, 1] bool: whether any key takes part in a query's softmax."""
        alive: list[ir.Value] = []
        source = self._operands.score_mask
        if source is not None and source.kind == "keep":
            alive.append(source.value)
        elif source is not None:
            # The source adds its fill: anything at half of the most negative it can be is hidden.
            limit = floating(self._scope, _hidden_below(self._spec), self._spec.io_dtype)
            alive.append(self._bool("Greater", source.value, limit))
        else:
            parts = self.allowed(hiding_parts(self._spec))
            if parts is not None:
                alive.append(parts)
        if self._operands.bias is not None:
            low = floating(self._scope, -math.inf, self._spec.io_dtype)
            alive.append(self._bool("Greater", self._bias(), low))
        total = alive[0]
        for other in alive[1:]:
            total = self._bool("And", total, other)
        counted = cast(self._scope, total, ir.DataType.INT32)
        return cast(self._scope, reduce(self._scope, "ReduceMax", counted, [-1]), _BOOL)

    # Positions

    def query_positions(self) -> ir.Value:
        """i = s + offset as [1, 1, s, 1], or [b, 1, s, 1] where the offset differs by row."""
        if "i" not in self._made:
            i_s1 = unsqueeze(self._scope, self._sizes.range(self._sizes.q), 1)
            offset = self.offset()
            if offset is not None:
                i_s1 = self._int("Add", i_s1, offset)
            rank4 = i_s1 if offset_of(self._spec) is Offset.LENGTHS else None
            self._made["i"] = rank4 or unsqueeze(self._scope, i_s1, 0, 1)
        return self._made["i"]

    def offset(self) -> ir.Value | None:
        """Position of query 0: [1], or [b, 1, 1, 1]; None for 0."""
        kind = offset_of(self._spec)
        if kind is Offset.ZERO:
            return None
        if kind is Offset.PAST:
            return self._sizes.past
        if kind is Offset.DIFFERENCE:
            return self._int("Sub", self._sizes.kv, self._sizes.q)
        return self._int("Sub", self._per_row(self._operands.kv_lengths), self._sizes.q)

    def key_positions(self) -> ir.Value:
        """[t] int64."""
        if "t" not in self._made:
            self._made["t"] = self._sizes.range(self._sizes.kv)
        return self._made["t"]

    # Hiding parts

    def _causal(self) -> ir.Value:
        seen = self._bool("LessOrEqual", self.key_positions(), self.query_positions())
        if self._operands.prefix_lengths is None:
            return seen
        prefix = self._per_row(self._operands.prefix_lengths)
        return self._bool("Or", seen, self._bool("Less", self.key_positions(), prefix))

    def _left_window(self) -> ir.Value:
        assert self._spec.mask.left_window is not None
        first = self._int("Sub", self.query_positions(), self._one(self._spec.mask.left_window))
        return self._bool("GreaterOrEqual", self.key_positions(), first)

    def _right_window(self) -> ir.Value:
        assert self._spec.mask.right_window is not None
        last = self._int("Add", self.query_positions(), self._one(self._spec.mask.right_window))
        return self._bool("LessOrEqual", self.key_positions(), last)

    def _block(self) -> ir.Value:
        assert self._spec.mask.block is not None
        size = self._one(self._spec.mask.block)
        own, other = self.query_positions(), self.key_positions()
        if offset_of(self._spec) in (Offset.LENGTHS, Offset.DIFFERENCE):
            # A negative position belongs to a negative chunk; integer Div truncates towards zero.
            own = self._int("Max", self._int("Add", own, size), self._one(0))
            other = self._int("Add", other, size)
        return self._bool("Equal", self._int("Div", own, size), self._int("Div", other, size))

    def _documents(self) -> ir.Value:
        ids = self._operands.document_ids
        assert ids is not None
        ids = cast(self._scope, ids, _INT64)
        own = self._own_documents(ids)
        return self._bool(
            "Equal", unsqueeze(self._scope, own, 1, 3), unsqueeze(self._scope, ids, 1, 2)
        )

    def _own_documents(self, ids: ir.Value) -> ir.Value:
        """[b, s]: the id of the key at each query's position."""
        zero = self._one(0)
        if offset_of(self._spec) is not Offset.LENGTHS:
            at = self._scope.op(
                "Squeeze", [self.query_positions(), ints(self._scope, 0, 1, 3)], dtype=_INT64
            )
            at = self._int("Max", at, zero)
            return self._scope.op("Gather", [ids, at], {"axis": 1}, dtype=_INT64)
        at = self._scope.op(
            "Squeeze", [self.query_positions(), ints(self._scope, 1, 3)], dtype=_INT64
        )
        at = self._int("Max", at, zero)
        return self._scope.op("GatherElements", [ids, at], {"axis": 1}, dtype=_INT64)

    def _lengths(self) -> ir.Value:
        length = self._per_row(self._operands.kv_lengths)
        return self._bool("Less", self.key_positions(), length)

    def _padding(self) -> ir.Value:
        padding = self._operands.key_padding
        assert padding is not None
        return unsqueeze(self._scope, cast(self._scope, padding, _BOOL), 1, 2)

    def _keep(self) -> ir.Value:
        keep, shape = self._operands.keep, self._spec.mask.keep
        assert keep is not None
        assert shape is not None
        keep = cast(self._scope, keep, _BOOL)
        if may_be_shorter(shape, self._spec):
            keep = cast(self._scope, keep, ir.DataType.INT32)
            zero = self._scope.constant(np.array(0, np.int32), hint="int")
            keep = cast(self._scope, self._padded(keep, len(shape), zero), _BOOL)
        return self._rank4(keep, len(shape))

    def _bias_present(self) -> ir.Value:
        """[1, 1, 1, t] bool: the keys that a short bias has an entry for."""
        bias, shape = self._operands.bias, self._spec.mask.bias
        assert bias is not None
        assert shape is not None
        present = self._bool("Less", self.key_positions(), self._last_size(bias, len(shape)))
        return unsqueeze(self._scope, present, 0, 1, 2)

    # Additive parts

    def _bias(self) -> ir.Value:
        bias, shape = self._operands.bias, self._spec.mask.bias
        assert bias is not None
        assert shape is not None
        if "bias" not in self._made:
            dtype = self._spec.io_dtype
            value = cast(self._scope, bias, ir_dtype(dtype)) if bias.dtype is not None else bias
            if may_be_shorter(shape, self._spec):
                value = self._padded(value, len(shape), floating(self._scope, 0.0, dtype))
            self._made["bias"] = self._rank4(value, len(shape))
        return self._made["bias"]

    def _alibi(self, slopes: tuple[float, ...]) -> ir.Value:
        distance = self._int("Sub", self.key_positions(), self.query_positions())
        distance = cast(self._scope, distance, ir_dtype(self._spec.io_dtype))
        per_head = np.array(slopes, numpy_dtype(self._spec.io_dtype))[None, :, None, None]
        slope = self._scope.constant(per_head, hint="alibi_slopes")
        return self._float("Mul", distance, slope)

    def _padded(self, value: ir.Value, rank: int, filler: ir.Value) -> ir.Value:
        missing = self._int("Sub", self._sizes.kv, self._last_size(value, rank))
        zeros = ints(self._scope, *[0] * (2 * rank - 1))
        pads = self._scope.op("Concat", [zeros, missing], {"axis": 0}, dtype=_INT64)
        return self._scope.op("Pad", [value, pads, filler], dtype=value.dtype)

    def _last_size(self, value: ir.Value, rank: int) -> ir.Value:
        return dimension(self._scope, value, rank - 1)

    def _rank4(self, value: ir.Value, rank: int) -> ir.Value:
        return value if rank == 4 else unsqueeze(self._scope, value, *range(4 - rank))

    def _per_row(self, value: ir.Value | None) -> ir.Value:
        """[b] as [b, 1, 1, 1] int64."""
        assert value is not None
        return unsqueeze(self._scope, cast(self._scope, value, _INT64), 1, 2, 3)

    def _one(self, value: int) -> ir.Value:
        return ints(self._scope, value)

    def _int(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        return self._scope.op(op_type, inputs, dtype=_INT64)

    def _bool(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        return self._scope.op(op_type, inputs, dtype=_BOOL)

    def _float(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        return self._scope.op(op_type, inputs, dtype=ir_dtype(self._spec.io_dtype))

    def _choose(self, condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
        return self._float("Where", condition, yes, no)


def _dim(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _hidden_below(spec: AttentionSpec) -> float:
    if spec.mask.fill == "-inf":
        return -math.inf
    if spec.mask.fill == "min":
        return lowest(spec.io_dtype) / 2
    return spec.mask.fill / 2
