"""``grouped``: the queries of a key/value group as rows of one product, for decoding.

    S = reshape(Q, [b, k, g * s, d]) Kᵀ ; O = Softmax(S + mask) V

A decode step is bound by reading the cache: here each key and value is read once for all g query
heads that share it, and is never repeated, converted or transposed. The cache grows by Concat, or
is a buffer of ``max_length`` that TensorScatter (opset 24 and above; ScatterElements below) writes
into. The present outputs are then the whole buffer, so that an application binds one buffer as past
and present, and nothing is copied. See docs/forms/grouped.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mha_export.forms._counts import Counts
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._grouping import Groups
from mha_export.forms._hiding import Hiding
from mha_export.forms._layout import Sizes, as_layout
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts, hiding_parts
from mha_export.forms._positions import Offset, offset_of
from mha_export.forms._prepare import finished, prepare
from mha_export.forms._products import Piece, Products, scaled_query
from mha_export.forms._scope import Scope
from mha_export.forms._support import common_refusal, first_refusal, means_around
from mha_export.operands import Heads, Layout, Operands
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class GroupedForm:
    name: str = "grouped"
    min_opset: int = 13
    summary: str = "queries of a key/value group as rows, cache written in place: decoding"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        refusal = first_refusal(common_refusal(self, spec, params), _refusal(spec))
        if refusal is not None:
            return refusal
        return Supported(by_other_means=means_around(spec, params, cache_in_op=False))

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        sizes, counts = Sizes(scope, spec, operands), Counts(scope)
        ready = prepare(scope, spec, operands, sizes, ops=True)
        mask = Mask(scope, spec, operands, sizes)
        groups = Groups(scope=scope, spec=spec, counts=counts, rows=True)
        hiding = Hiding(spec=spec, operands=operands, cuts=False)
        products = Products(
            scope=scope,
            spec=spec,
            operands=operands,
            sizes=sizes,
            counts=counts,
            groups=groups,
            hiding=hiding,
            few=True,
        )
        query = as_layout(scope, scaled_query(scope, spec, ready.query), Layout.BHSD)
        value = as_layout(scope, ready.value, Layout.BHSD)
        parts = _needed(spec, operands)
        masked = bool(parts or added_parts(spec.mask))
        piece = Piece(
            keys=groups.keys(as_layout(scope, ready.key, Layout.BHSD).value),
            count=counts.of(sizes.kv),
            mask=mask if masked else None,
        )
        output = products.context(
            query.value,
            counts.of(sizes.q),
            [piece],
            groups.keys(value.value),
            parts,
            by_head=masked or spec.sinks,
        )
        if hiding.fixes_rows:
            has_key, stated = mask.row_has_key(), hiding.stated_row(scope, value)
            output = scope.op("Where", [has_key, output, stated], dtype=output.dtype)
        heads = Heads(value=output, layout=Layout.BHSD, heads=spec.q_heads, dim=spec.value_dim)
        return Emitted(
            output=finished(scope, spec, heads),
            present_key=ready.present_key,
            present_value=ready.present_value,
        )


def _needed(spec: AttentionSpec, operands: Operands) -> frozenset[str]:
    """The hiding parts, without a diagonal that the only query stands at the end of.

    One query at the end of a cache sees everything before it: ``causal`` hides nothing that the
    lengths do not. (Lengths that are numbers may leave the count of new keys open: it stays.)
    """
    parts = hiding_parts(spec)
    one = spec.q_len == 1 and not isinstance(spec.kv_len, int) and spec.cache is not None
    at_end = offset_of(spec) in (Offset.PAST, Offset.LENGTHS)
    return parts - {"causal"} if one and at_end and operands.score_mask is None else parts


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    if spec.qk_output is not None:
        return Unsupported(feature="qk_output", needs="form primitive or onnx")
    return None


FORM = GroupedForm()
