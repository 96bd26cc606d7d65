"""Small triggers of known failures of other tools, numbered; each kind must be right here.

A trigger that concerns recognition alone (13, 14, 16, 19) is tested there.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from runtimes import OrtSession, ReferenceSession, findings

from mha_export.bounds import error_bounds, judge
from mha_export.cases import cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.oracle import OracleInputs, attention
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkOutput,
    RotarySpec,
)

NUMBERS = {*range(1, 13), 15, 17, 18}
"""Those that concern building; docs/quality.md says what each is."""

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
SQUARE = {"q_len": "s", "kv_len": "s"}


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 16} | fields)


TRIGGERS = {
    "1-prefix-is-not-causal": _spec(
        mask=MaskSpec(causal=BOTTOM_RIGHT, prefix=True),
        cache=CacheSpec(),
        rotary=RotarySpec(dim=16, theta=1e4, max_positions=4096),
    ),
    "1-bidirectional-is-not-causal": _spec(
        cache=CacheSpec(), rotary=RotarySpec(dim=16, theta=1e4, max_positions=4096)
    ),
    "2-window-survives-a-past": _spec(
        mask=MaskSpec(causal=BOTTOM_RIGHT, left_window=4), cache=CacheSpec(), q_len=8, kv_len=24
    ),
    "3-scale-1": _spec(scale=1.0, **SQUARE),
    "3-scale-eighth": _spec(scale=0.125, **SQUARE),
    "4-padding-with-holes": _spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO), **SQUARE),
    "5-top-left": _spec(mask=MaskSpec(causal=TOP_LEFT), q_len=1, kv_len=6),
    "5-bottom-right": _spec(mask=MaskSpec(causal=BOTTOM_RIGHT), q_len=1, kv_len=6),
    "6-empty-rows-zero": _spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO), **SQUARE),
    "6-empty-rows-uniform": _spec(
        mask=MaskSpec(padding=True, empty_row=EmptyRow.UNIFORM), **SQUARE
    ),
    "7-cap-then-mask": _spec(
        softcap=2.0,
        scale=1.5,
        mask=MaskSpec(keep=("batch", 1, "s", "s"), empty_row=EmptyRow.ZERO),
        **SQUARE,
    ),
    "8-heads-interleave": _spec(),
    "8-heads-interleave-in-threes": _spec(q_heads=6, kv_heads=2, **SQUARE),
    "9-mask-shorter-than-the-keys": _spec(
        mask=MaskSpec(keep=("q_len", "mask_len"), empty_row=EmptyRow.ZERO)
    ),
    "10-gqa-position-ids": _spec(
        mask=MaskSpec(causal=BOTTOM_RIGHT),
        cache=CacheSpec(),
        rotary=RotarySpec(dim=16, theta=1e4, positions="input", max_positions=4096),
    ),
    "10-gqa-bias": _spec(
        mask=MaskSpec(causal=TOP_LEFT, bias=(1, 4, "s", "s"), empty_row=EmptyRow.ZERO), **SQUARE
    ),
    "10-gqa-sinks": _spec(mask=MaskSpec(causal=TOP_LEFT), sinks=True, **SQUARE),
    "11-head-dim-512": _spec(head_dim=512, q_heads=2, kv_heads=1, **SQUARE),
    "11-value-width-differs-with-gqa": _spec(v_head_dim=24, **SQUARE),
    "15-probabilities-are-an-output": _spec(qk_output=QkOutput.PROBABILITIES),
    "17-gqa-of-equal-heads": _spec(kv_heads=4, mask=MaskSpec(causal=TOP_LEFT), **SQUARE),
}


def test_every_trigger_that_concerns_building_is_here() -> None:
    names = [*TRIGGERS, *(name.removeprefix("test_") for name in globals())]
    assert {int(found[0]) for name in names if (found := re.match(r"\d+", name))} == NUMBERS


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("form", list(all_forms()))
def test_right_or_refused(form: str, trigger: str) -> None:
    spec = TRIGGERS[trigger]
    least = all_forms()[form].min_opset
    for opset in (25, 24, 23) if form == "onnx" else (max(least, 17),):
        params = FormParams(opset=opset)
        if form_named(form).supports(spec, params):
            wrong = list(findings(form, spec, params, runtime="cpu", battery="ordinary"))
            assert not wrong, "\n".join(str(finding) for finding in wrong)


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_each_is_stated_by_primitive_and_by_a_fused_form(trigger: str) -> None:
    stating = [
        form
        for form in all_forms()
        if form_named(form).supports(TRIGGERS[trigger], FormParams(opset=25))
    ]
    assert "primitive" in stating
    assert len(stating) >= 2


def test_5_the_two_alignments_differ_on_one_query() -> None:
    specs = [TRIGGERS["5-top-left"], TRIGGERS["5-bottom-right"]]
    inputs = next(iter(cases(specs[0], battery="quick"))).inputs
    outputs = []
    for spec in specs:
        model = build_model(form_named("onnx"), spec, FormParams(opset=23))
        outputs.append(OrtSession(model).run(feeds(spec, inputs))["output"])
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1


@pytest.mark.parametrize("form", [form for form in all_forms() if form != "ort-attention"])
def test_6_poison_in_masked_values_does_not_reach_the_output(form: str) -> None:
    """Finite and huge: 0 times NaN is NaN in every runtime, so NaN is no fair poison."""
    spec = TRIGGERS["4-padding-with-holes"]
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((1, heads, 8, 16)) for heads in (4, 2, 2))
    padding = np.array([[0, 0, 0, 1, 1, 1, 0, 1]])
    value[:, :, padding[0] == 0] = 1e30
    inputs = OracleInputs(query=query, key=key, value=value, key_padding=padding)
    session = OrtSession(build_model(form_named(form), spec, FormParams(opset=23)))
    found = oracle_outputs(spec, session.run(feeds(spec, inputs)))["output"]
    np.testing.assert_allclose(found, attention(spec, inputs).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["onnx", "ort-mha", "ort-gqa"])
def test_9_present_outputs_are_named_beside_a_past(form: str) -> None:
    """ONNX Runtime computes something else, or refuses, where only the output is named."""
    spec = _spec(kv_heads=4, mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec())
    model = build_model(form_named(form), spec, FormParams(opset=23))
    (node,) = (n for n in model.graph if n.op_type.endswith("Attention"))
    assert [value.name for value in node.outputs][1:3] == ["present_key", "present_value"]


def test_12_overflow_of_half_precision_is_seen() -> None:
    """Logits near 6e4 leave fp16; the judgement must not pass what came of it."""
    spec = _spec(io_dtype=DType.FP16, scale=1.0, q_heads=1, kv_heads=1)
    query = np.full((1, 1, 2, 16), 60.0)
    key = np.full((1, 1, 3, 16), 70.0) + np.arange(3)[None, None, :, None]
    value = np.arange(48.0).reshape(1, 1, 3, 16)
    inputs = OracleInputs(query=query, key=key, value=value)
    model = build_model(form_named("primitive"), spec, FormParams(opset=17))
    found = oracle_outputs(spec, ReferenceSession(model).run(feeds(spec, inputs)))["output"]
    exact = attention(spec, inputs)
    bounds = error_bounds(spec, inputs, exact)
    judged = judge(found, exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
    assert judged.status == "fail"


@pytest.mark.slow
def test_12_many_keys_in_half_precision() -> None:
    from mha_export.cases import long_case

    spec = _spec(io_dtype=DType.FP16, q_heads=2, kv_heads=1)
    case = long_case(spec)
    assert case is not None
    for form in ("primitive", "onnx", "ort-mha"):
        session = OrtSession(build_model(form_named(form), spec, FormParams(opset=23)))
        found = oracle_outputs(spec, session.run(feeds(spec, case.inputs)))["output"]
        exact = attention(spec, case.inputs)
        bounds = error_bounds(spec, case.inputs, exact)
        judged = judge(found, exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
        assert judged.status in ("pass", "imprecise"), (form, judged.reason)


def test_18_a_shared_key_projection_keeps_its_site() -> None:
    """Keys of another site come rotated and normalised: the form does neither again."""
    spec = _spec(
        kv_source="layer.0.self", rotary=RotarySpec(dim=16, theta=1e4, key=False), **SQUARE
    )
    for form in ("primitive", "onnx", "ort-gqa"):
        params = FormParams(opset=23)
        assert form_named(form).supports(spec, params)
        assert not list(findings(form, spec, params, runtime="cpu"))
