"""What a reader makes of a mask input: named parts where they can be named, else bound as it is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from mha_export.operands import ScoreMask
from mha_export.recognise._mask_steps import LOWEST_BIAS
from mha_export.recognise._masks_sizes import ScoreShape
from mha_export.recognise.fused._node import FusedNode
from mha_export.recognise.masks import MaskReading, MaskTerm, read_mask
from mha_export.spec import Dim, EmptyRow, MaskSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """A mask spec and the operands that carry its data (fields of :class:`Operands`)."""

    spec: MaskSpec
    operands: dict[str, Any]


def named(
    fused: FusedNode,
    mask: ir.Value,
    *,
    kind: Literal["additive", "keep"],
    scores: ScoreShape,
    cached: bool,
) -> Bound | None:
    """The mask's parts, when it is the only thing that hides keys; None where no name fits."""
    fill = -np.inf if kind == "keep" else None
    if not _spans_keys(fused, mask, scores):
        return None
    reading = read_mask(
        [MaskTerm(value=mask, kind=kind, fill=fill)],
        scores=scores,
        context=fused.context,
        anchor=fused.node,
        heads=scores.heads,
        cached=cached,
    )
    if reading is None or reading.replaces or len(reading.rest) > 1:
        return None
    finite = reading.fill not in (None, "-inf")
    if finite and any(_may_be_as_low(fused, term.value) for term in reading.rest):
        return None
    return _bound(fused, reading, mask, kind)


def _may_be_as_low(fused: FusedNode, bias: ir.Value) -> bool:
    """Whether an addition given from outside may hide as a finite fill does: then it is no bias.

    A floating point input may be anything; what ids or flags become is looked at.
    """
    contents: dict[ir.Value, np.ndarray] = {}
    rng = np.random.default_rng(1)
    for source in fused.context.sources(bias):
        if not source.is_graph_input():
            continue
        shape, dtype = fused.shape(source), source.dtype
        if shape is None or dtype is None or dtype.is_floating_point():
            return True
        contents[source] = rng.integers(0, 2, shape).astype(dtype.numpy())
    if not contents:
        return False
    found = fused.context.sized(fused.sizes, contents).array(bias)
    return found is None or not bool(np.all(found.astype(np.float64) > LOWEST_BIAS))


def _spans_keys(fused: FusedNode, mask: ir.Value, scores: ScoreShape) -> bool:
    """The last axis is the keys': 1 would mean one key, not all of them."""
    shape, whole = fused.shape(mask), scores.at(fused.context.sized(fused.sizes))
    return shape is not None and whole is not None and bool(shape) and shape[-1] == whole[-1]


def _bound(
    fused: FusedNode, reading: MaskReading, mask: ir.Value, kind: Literal["additive", "keep"]
) -> Bound:
    operands: dict[str, Any] = {
        name: value
        for name in ("key_padding", "kv_lengths", "prefix_lengths", "document_ids")
        if (value := getattr(reading, name)) is not None
    }
    bias: tuple[Dim, ...] | None = None
    if reading.rest:
        operands["bias"] = reading.rest[0].value
        bias = mask_shape(fused, reading.rest[0].value)
    elif reading.hides or reading.alibi_slopes is not None:
        operands["score_mask"] = ScoreMask(value=mask, kind=kind)
    spec = MaskSpec(
        causal=reading.causal,
        left_window=reading.left_window,
        right_window=reading.right_window,
        block=reading.block,
        alibi_slopes=reading.alibi_slopes,
        padding=reading.key_padding is not None,
        lengths=reading.kv_lengths is not None,
        prefix=reading.prefix_lengths is not None,
        documents=reading.document_ids is not None,
        bias=bias,
        fill="-inf" if reading.fill is None else reading.fill,
        empty_row=reading.empty_row,
    )
    return Bound(spec=spec, operands=operands)


def beside(own: MaskSpec, bound: Bound, *, sinks: bool) -> Bound | None:
    """``bound`` with what the node itself hides by -inf; None where no one statement says both.

    ``own`` states causality and windows alone. Rules of positions are one only where they count
    from the same position; a finite fill of the mask beside -inf only where no row can tell.
    """
    mask = bound.spec
    if not own.hides_keys:
        return bound
    if (
        mask.lengths
        or mask.prefix
        or (mask.causal or own.causal) is not (own.causal or mask.causal)
    ):
        return None
    named = mask.padding or mask.documents or mask.block is not None or mask.keep is not None
    if mask.hides_keys and mask.fill != "-inf" and (named or mask.bias) and not sinks:
        return None
    spec = dataclasses.replace(
        mask,
        causal=own.causal or mask.causal,
        left_window=_narrower(own.left_window, mask.left_window),
        right_window=_narrower(own.right_window, mask.right_window),
    )
    operands = dict(bound.operands)
    if spec != mask:  # the mask input alone does not state what the node adds to it
        operands.pop("score_mask", None)
    return Bound(spec=spec, operands=operands)


def _narrower(left: int | None, right: int | None) -> int | None:
    return left if right is None else right if left is None else min(left, right)


def mask_shape(fused: FusedNode, value: ir.Value) -> tuple[Dim, ...]:
    """The shape as a spec states it: numbers, or the graph's own names."""
    rank = fused.rank(value)
    defaults = ("batch", "q_heads", "q_len", "kv_len")[-rank:]
    concrete = fused.shape(value)
    found: list[Dim] = []
    for axis, default in enumerate(defaults):
        dim = fused.dim(value, axis, default)
        if isinstance(dim, str) and concrete is not None:
            # heads are never a symbol, and every symbol is looked at above 1
            dim = concrete[axis] if default == "q_heads" or concrete[axis] == 1 else dim
        found.append(dim)
    return tuple(found)


def with_empty_rows(bound: Bound, policy: EmptyRow, *, sinks: bool = False) -> Bound:
    """The same with the node's own policy for a row in which every key is masked by -inf.

    With a sink it is zero, whatever the fill.
    """
    if not bound.spec.may_empty_a_row or (bound.spec.fill != "-inf" and not sinks):
        return bound
    policy = EmptyRow.ZERO if sinks else policy
    return Bound(spec=dataclasses.replace(bound.spec, empty_row=policy), operands=bound.operands)
