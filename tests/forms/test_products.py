"""Scores, softmax and context of queries against keys in pieces, in both arrangements of groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench

from mha_export.forms._counts import Count, Counts
from mha_export.forms._grouping import Groups
from mha_export.forms._hiding import Hiding
from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.forms._products import Piece, Products, scaled_query
from mha_export.operands import Layout, Operands
from mha_export.spec import AttentionSpec, DType, EmptyRow, MaskSpec

B, ROWS, KEYS, D, E = 3, 5, 7, 4, 6
RNG = np.random.default_rng(12)
CUT = 4
"""The first piece has these many keys."""


class Context:
    """The attention of all queries to all keys, as ``Products`` emits it."""

    def __init__(
        self,
        *,
        group: int,
        rows: bool,
        pieces: int = 1,
        masked: bool = False,
        few: bool = False,
        numbers: bool = False,
        by_head: bool | None = None,
        **fields: Any,
    ) -> None:
        mask = MaskSpec(keep=(2 * group, "q_len", "kv_len"), empty_row=EmptyRow.NAN)
        self.spec = spec = AttentionSpec(
            q_heads=2 * group,
            kv_heads=2,
            head_dim=D,
            v_head_dim=E,
            mask=mask if masked else MaskSpec(),
            **fields,
        )
        self.bench = bench = Bench()
        h = spec.q_heads
        self.query, self.key, self.value = (
            RNG.standard_normal(shape).astype(np.float32)
            for shape in ((B, h, ROWS, D), (B, 2, KEYS, D), (B, 2, KEYS, E))
        )
        self.sinks = RNG.standard_normal(h).astype(np.float32)
        self.keep = RNG.random((h, ROWS, KEYS)) < 0.6
        self.keep[..., 0] = True
        named: dict[str, Any] = {
            name: bench.heads(name, getattr(self, name)) for name in ("query", "key", "value")
        }
        if masked:
            named["keep"] = bench.value("keep", self.keep)
        if spec.sinks:
            named["sinks"] = bench.value("sinks", self.sinks)
        operands = Operands(**named)
        sizes, counts = Sizes(bench.scope, spec, operands), Counts(bench.scope)
        groups = Groups(scope=bench.scope, spec=spec, counts=counts, rows=rows)
        products = Products(
            scope=bench.scope,
            spec=spec,
            operands=operands,
            sizes=sizes,
            counts=counts,
            groups=groups,
            hiding=Hiding(spec=spec, operands=operands, cuts=False),
            few=few,
        )
        masking = Mask(bench.scope, spec, operands, sizes) if masked else None
        key, value = (groups.keys(named[name].value) for name in ("key", "value"))
        count: Count = KEYS if numbers else counts.of(sizes.kv)
        whole = [Piece(keys=key, count=count, mask=masking)]
        if pieces == 2:
            whole = [
                Piece(keys=self._cut(key, a, e, groups.key_axis), count=e - a, mask=None)
                for a, e in ((0, CUT), (CUT, KEYS))
            ]
        self.output = products.context(
            named["query"].value,
            ROWS if numbers else counts.of(sizes.q),
            whole,
            value,
            frozenset({"keep"} if masked else ()),
            by_head=masked if by_head is None else by_head,
        )

    def _cut(self, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        from mha_export.forms._layout import ints

        inputs = [value, *(ints(self.bench.scope, n) for n in (start, end, axis))]
        return self.bench.scope.op("Slice", inputs, dtype=value.dtype)

    def exact(self) -> np.ndarray:
        group = self.spec.group
        query = self.query.astype(np.float64)
        key, value = (
            np.repeat(x.astype(np.float64), group, axis=1) for x in (self.key, self.value)
        )
        scores = query @ key.swapaxes(2, 3)
        if self.spec.softcap is not None:
            scores = self.spec.softcap * np.tanh(scores / self.spec.softcap)
        if self.spec.mask.keep is not None:
            scores = np.where(self.keep, scores, -np.inf)
        weights = np.exp(scores)
        total = weights.sum(axis=-1, keepdims=True)
        if self.spec.sinks:
            total = total + np.exp(self.sinks[:, None, None])
        return weights / total @ value

    def check(self) -> None:
        (found,) = self.bench.run(self.output)
        np.testing.assert_allclose(found, self.exact(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("numbers", [False, True], ids=["symbols", "numbers"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"pieces": 2},
        {"masked": True},
        {"by_head": True},
        {"few": True},
        {"sinks": True, "by_head": True},
        {"sinks": True, "by_head": True, "few": True},
        {"sinks": True, "masked": True},
        {"sinks": True, "masked": True, "few": True},
        {"sinks": True, "pieces": 2, "by_head": True},
    ],
    ids=lambda case: "-".join(case) or "plain",
)
@pytest.mark.parametrize("rows", [False, True], ids=["broadcast", "rows"])
@pytest.mark.parametrize("group", [1, 3])
def test_the_context_is_that_of_all_keys(
    group: int, rows: bool, case: dict[str, Any], softcap: float | None, numbers: bool
) -> None:
    Context(group=group, rows=rows, softcap=softcap, numbers=numbers, **case).check()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_sinks_of_heads_that_stay_as_the_product_has_them(group: int, few: bool) -> None:
    """Broadcast over a group axis, nothing masked: no reshape between the products."""
    context = Context(group=group, rows=False, sinks=True, few=few, by_head=False)
    context.check()


def test_what_is_copied_for_a_sink_is_the_smaller() -> None:
    """Of few queries the weights are cut, of many the values get a row of nothing."""
    few, many = (
        Context(group=3, rows=True, sinks=True, by_head=True, few=few).bench.types
        for few in (True, False)
    )
    assert (few.count("Slice"), few.count("Pad")) == (1, 0)
    assert (many.count("Slice"), many.count("Pad")) == (0, 1)


def test_one_piece_is_not_joined() -> None:
    assert "Concat" not in Context(group=1, rows=False).bench.types
    assert Context(group=1, rows=False, pieces=2).bench.types.count("Concat") == 1


def test_a_wider_softmax_has_its_scores_and_its_sink_wider() -> None:
    wide = Context(group=3, rows=True, sinks=True, by_head=True, softmax_dtype=DType.FP64)
    (softmax,) = (node for node in wide.bench.scope.nodes if node.op_type == "Softmax")
    assert softmax.inputs[0].dtype is softmax.outputs[0].dtype is ir.DataType.DOUBLE
    wide.check()


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5, 0.0, -1.0, None])
def test_the_query_takes_the_whole_scale(scale: float | None) -> None:
    bench = Bench()
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=D, scale=scale)
    query = RNG.standard_normal((B, 2, ROWS, D)).astype(np.float32)
    heads = scaled_query(bench.scope, spec, bench.heads("query", query, Layout.BSM))
    assert heads.layout is Layout.BSM
    assert bench.types == ([] if scale == 1.0 else ["Mul"])
    (found,) = bench.run(heads.value)
    flat = query.swapaxes(1, 2).reshape(B, ROWS, 2 * D)
    np.testing.assert_allclose(found, flat * (0.5 if scale is None else scale), rtol=1e-6)
