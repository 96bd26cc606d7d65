"""A second rewrite changes no byte, and primitive again is the same spec: one spec a kind.

Each kind is one that a form says by other means than the graph it came from: another fill, a Where
for rows without a key, a sink as a key, rotation and normalisation beside a cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import pytest

from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.recognise import Recognition, recognise
from mha_export.rewrite import Rewritten, choose_form, rewrite
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
)

OPSET = 23
PLAIN = AttentionSpec(
    q_heads=4, kv_heads=2, head_dim=8, projections=ProjectionSpec(d_model=32), q_len="s", kv_len="s"
)
TOP_LEFT = MaskSpec(causal=CausalAlignment.TOP_LEFT)


def _padded(**changes: Any) -> MaskSpec:
    return MaskSpec(**{"causal": CausalAlignment.TOP_LEFT, "padding": True, **changes})


KINDS: dict[str, AttentionSpec] = {
    "causal-by-the-minimum": PLAIN.replace(mask=dataclasses.replace(TOP_LEFT, fill="min")),
    "padding-minimum": PLAIN.replace(mask=_padded(fill="min", empty_row=EmptyRow.UNIFORM)),
    "padding-nan": PLAIN.replace(mask=MaskSpec(padding=True, empty_row=EmptyRow.NAN)),
    "padding-zero": PLAIN.replace(mask=_padded(empty_row=EmptyRow.ZERO)),
    "window-and-padding": PLAIN.replace(
        mask=_padded(left_window=2, fill="min", empty_row=EmptyRow.UNIFORM)
    ),
    "sinks": PLAIN.replace(sinks=True, mask=_padded(empty_row=EmptyRow.ZERO)),
    "bias": PLAIN.replace(mask=MaskSpec(bias=("batch", 4, "s", "s"))),
    "bias-and-padding": PLAIN.replace(
        mask=MaskSpec(
            bias=(1, 4, "s", "s"), padding=True, fill="min", empty_row=EmptyRow.UNIFORM
        )
    ),
    "norm-and-rotary": PLAIN.replace(
        mask=TOP_LEFT, rotary=RotarySpec(dim=8, theta=1e4), qk_norm=QkNormSpec(kind="rms")
    ),
    "cache": PLAIN.replace(
        mask=MaskSpec(
            causal=CausalAlignment.BOTTOM_RIGHT, padding=True, empty_row=EmptyRow.ZERO
        ),
        rotary=RotarySpec(dim=8, theta=1e4),
        qk_norm=QkNormSpec(kind="rms"),
        cache=CacheSpec(),
        kv_len="t",
    ),
    "scale": PLAIN.replace(scale=0.1),
    "mean-and-padding": PLAIN.replace(
        combine="mean",
        projections=ProjectionSpec(d_model=32, output=False),
        mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO),
    ),
    "keep-and-padding": PLAIN.replace(
        mask=MaskSpec(padding=True, keep=("batch", 1, "s", "s"), empty_row=EmptyRow.NAN)
    ),
    "large-number": PLAIN.replace(
        mask=MaskSpec(keep=("batch", 1, "s", "s"), fill=-1e9, empty_row=EmptyRow.UNIFORM)
    ),
    "static-cache": PLAIN.replace(
        mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT),
        cache=CacheSpec(growth="static"),
        kv_len="t",
    ),
}  # fmt: skip
RESTATED = {"keep-and-padding": ("mask", "fill", "empty_row")}
"""What an op's bias, taken apart again, says by other names."""
FORMS: dict[str, dict[str, str]] = {
    **{name: {} for name in all_forms()},
    "tiled by the op": {"product": "attention"},
}
"""Every form, and what it is told."""


def _params(form: str) -> FormParams:
    return FormParams(opset=OPSET, options=FORMS[form])


def _rewritten(found: Recognition, form: str, evaluator: Evaluator) -> Rewritten:
    return rewrite(
        found,
        lambda site: choose_form(
            site, preferred=(), params=_params(form), only=form.removesuffix(" by the op")
        ),
        evaluator=evaluator,
    )


def _bytes(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _cases() -> list[Any]:
    return [
        pytest.param(kind, form, id=f"{kind}-{form.replace(' ', '-')}")
        for kind, spec in KINDS.items()
        for form in FORMS
        if form_named(form.removesuffix(" by the op")).supports(spec, _params(form))
    ]


@pytest.mark.parametrize(("kind", "form"), _cases())
def test_twice_is_once_and_back_is_the_same(kind: str, form: str, evaluator: Evaluator) -> None:
    spec = KINDS[kind]
    first = recognise(build_model(form_named("primitive"), spec, FormParams(opset=OPSET)))
    done = _rewritten(first, form, evaluator)
    assert [o.status for o in done.outcomes.values()] == ["fused"], done.outcomes
    found = recognise(done.model, evaluator=evaluator)
    again = _rewritten(found, form, evaluator)
    stated = any(site.stated_as for site in found.sites)  # a claim, proven each time
    assert [o.proof is not None for o in again.outcomes.values()] == [stated]
    assert _bytes(again.model) == _bytes(done.model)
    back = recognise(_rewritten(found, "primitive", evaluator).model, evaluator=evaluator)
    one, two = ([site.spec.to_json() for site in each.sites] for each in (found, back))
    for stated in (*one, *two):
        stated["fill"] = "-inf" if stated["fill"] == "min" else stated["fill"]
        stated.update(dict.fromkeys(RESTATED.get(kind, ())))
    assert two == one


BIAS_OF_QUERIES = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch,4,6,8] q, float[batch,4,6,8] k, float[batch,4,6,8] v, float[6,8] table)
  => (float[batch,4,6,8] y)
{
  bias = <bias>
  scaled = Constant<value_float = 0.25>()
  turned = Transpose<perm = [0, 1, 3, 2]>(k)
  products = MatMul(q, turned)
  scores = Mul(products, scaled)
  biased = Add(scores, bias)
  weights = Softmax<axis = -1>(biased)
  y = MatMul(weights, v)
}"""
WAYS = {
    "einsum": 'Einsum<equation = "bhqd,kd->bhqk">(q, table)',
    "matmul": "MatMul(q, turned_table)\n  turned_table = Transpose<perm = [1, 0]>(table)",
    "sums": (
        "ReduceSum<keepdims = 0>(pairs, last)\n"
        "  last = Constant<value_ints = [-1]>()\n"
        "  three = Constant<value_ints = [3]>()\n"
        "  apart = Unsqueeze(q, three)\n"
        "  pairs = Mul(apart, table)"
    ),
}
"""How a relative position's bias is made of queries (SAM, DeBERTa)."""


@pytest.mark.parametrize("form", ["onnx", "ort-mha"])
@pytest.mark.parametrize("way", WAYS)
def test_a_bias_of_queries_comes_back(way: str, form: str, evaluator: Evaluator) -> None:
    model = ir.from_onnx_text(BIAS_OF_QUERIES.replace("<bias>", WAYS[way]))
    model.graph.sort()
    done = _rewritten(recognise(model), form, evaluator)
    assert [o.status for o in done.outcomes.values()] == ["fused"], done.outcomes
    found = recognise(done.model, evaluator=evaluator)
    assert _bytes(_rewritten(found, form, evaluator).model) == _bytes(done.model)
    back = recognise(_rewritten(found, "primitive", evaluator).model, evaluator=evaluator)
    one, two = ([site.spec.to_json() for site in each.sites] for each in (found, back))
    assert two == one
    assert found.sites[0].spec.to_json()["mask"] == ["bias"]
