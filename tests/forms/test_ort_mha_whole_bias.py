"""``ort-mha`` told ``bias=whole``: one additive mask of [b, h, s, t], and nothing else hides."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from features import FEATURES
from runtimes import OrtSession, compare

from mha_export.cases import cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, build_model, form_named
from mha_export.recognise import recognise
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec

FORM = form_named("ort-mha")
WHOLE = FormParams(opset=17, options={"bias": "whole"})
PLAIN = FormParams(opset=17)
STATED = [name for name, spec in FEATURES.items() if FORM.supports(spec, WHOLE)]


def node_of(model: ir.Model) -> ir.Node:
    (node,) = (node for node in model.graph if node.op_type == "MultiHeadAttention")
    return node


@pytest.mark.parametrize("feature", STATED)
def test_it_is_right_and_its_bias_is_whole(feature: str) -> None:
    spec = FEATURES[feature]
    model = build_model(FORM, spec, WHOLE)
    node = node_of(model)
    assert "unidirectional" not in node.attributes
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    if bias is not None:
        bias.name = "bias_of_the_node"
        model.graph.outputs.append(bias)
    session = OrtSession(model)
    for case in cases(spec, battery="quick"):
        outputs = session.run(feeds(spec, case.inputs))
        if bias is not None:
            got = outputs.pop("bias_of_the_node").shape
            keys = case.dims["kv_len"] + spec.sinks
            assert got == (case.dims["batch"], spec.q_heads, case.dims["q_len"], keys)
        found = list(compare(spec, case, oracle_outputs(spec, outputs)))
        assert not found, "\n".join(map(str, found))


SQUARE = AttentionSpec(
    q_heads=2,
    kv_heads=2,
    head_dim=8,
    q_len="s",
    kv_len="s",
    mask=MaskSpec(causal=CausalAlignment.TOP_LEFT),
)


def test_only_then_is_causality_in_it() -> None:
    assert "unidirectional" in node_of(build_model(FORM, SQUARE, PLAIN)).attributes
    assert node_of(build_model(FORM, SQUARE, WHOLE)).inputs[5] is not None
    assert "causal" in FORM.supports(SQUARE, WHOLE).by_other_means
    assert len(node_of(build_model(FORM, SQUARE.replace(mask=MaskSpec()), WHOLE)).inputs) == 3


def test_a_site_is_recognised_under_its_whole_bias() -> None:
    (site,) = recognise(build_model(FORM, SQUARE, WHOLE)).sites
    assert site.spec.mask == SQUARE.mask


@pytest.mark.parametrize("value", ["part", "", 1, True])
def test_another_bias_is_refused(value: object) -> None:
    params = FormParams(opset=17, options={"bias": value})  # type: ignore[dict-item]
    verdict = FORM.supports(SQUARE, params)
    assert not verdict
    assert str(verdict) == "bias: needs 'least' or 'whole'"
