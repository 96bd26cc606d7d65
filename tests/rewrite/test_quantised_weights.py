"""Quantised weights: which products get them, how far they are off, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from runtimes import OrtSession

from mha_export.errors import InputError
from mha_export.forms import FormParams, build_model, form_named
from mha_export.recognise import recognise
from mha_export.rewrite import WEIGHT_KINDS, with_quantised_weights
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec, ProjectionSpec

SPEC = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    batch=1,
    q_len="s",
    kv_len="s",
    mask=MaskSpec(causal=CausalAlignment.TOP_LEFT),
    projections=ProjectionSpec(d_model=64, q_bias=True),
)
ERRORS = {"int8": 0.02, "int4": 0.3, "int4-qdq": 0.3}
"""Of the largest output: steps of 1/255 and of 1/15 of a block's range, through three layers."""


def _model(spec: AttentionSpec = SPEC, opset: int = 18) -> ir.Model:
    return build_model(form_named("primitive"), spec, FormParams(opset=opset))


def _ops(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


def _output(model: ir.Model) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((1, 7, 64)).astype(np.float32)
    return OrtSession(model).run({"hidden_states": x})["output"]


def test_every_kind_has_a_tolerance() -> None:
    assert set(ERRORS) == set(WEIGHT_KINDS)


@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_projections_are_quantised_and_attention_is_not(name: str) -> None:
    model = _model()
    made = with_quantised_weights(model, name)
    kind = WEIGHT_KINDS[name]
    layer = "DequantizeLinear" if kind.qdq else "MatMulNBits"
    assert _ops(made, layer) == 4
    assert _ops(made, "MatMul") == (6 if kind.qdq else 2), "both products of attention stay"
    assert _ops(model, "MatMul") == 6, "the model that was given is not changed"
    exact, found = _output(model), _output(made)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < ERRORS[name]


@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_attention_is_still_recognised(name: str) -> None:
    (site,) = recognise(with_quantised_weights(_model(), name)).sites
    assert site.replaceable
    assert site.spec.replace(projections=None) == recognise(_model()).sites[0].spec.replace(
        projections=None
    )


def test_only_qdq_raises_the_opset() -> None:
    opsets = {
        name: with_quantised_weights(_model(), name).graph.opset_imports[""]
        for name in WEIGHT_KINDS
    }
    assert opsets == {"int8": 18, "int4": 18, "int4-qdq": 21}


@pytest.mark.parametrize("name", WEIGHT_KINDS)
def test_layers_may_share_a_weight(name: str) -> None:
    model = _model(SPEC.replace(kv_heads=4))
    keys, values = (
        next(n for n in model.graph if any(v is not None and v.name == w for v in n.inputs))
        for w in ("w_k", "w_v")
    )
    values.replace_input_with(1, keys.inputs[1])
    made = with_quantised_weights(model, name)
    assert np.isfinite(_output(made)).all()


@pytest.mark.parametrize(
    ("spec", "name", "words"),
    [
        (SPEC, "int3", "expected one of"),
        (SPEC.replace(projections=None), "int8", "no MatMul by a constant matrix"),
    ],
    ids=["kind", "nothing"],
)
def test_what_cannot_be_quantised_is_refused(spec: Any, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        with_quantised_weights(_model(spec), name)
