"""A bias whose whole row is the dtype's minimum, as exporters write it: a mean, in every form.

ONNX Runtime's ``Attention`` takes that number for -inf and gave such rows zeros.
"""

from __future__ import annotations

import pytest
from runtimes import SESSIONS, compare

from mha_export.cases import Case, cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
)

LAYER = AttentionSpec(q_heads=4, kv_heads=4, head_dim=8)
BIAS = ("batch", 4, "q_len", "kv_len")
SPECS = {
    "bias": LAYER.replace(mask=MaskSpec(bias=BIAS)),
    "shared over heads": LAYER.replace(
        kv_heads=2, mask=MaskSpec(bias=(1, 1, "q_len", "kv_len"), empty_row=EmptyRow.NAN)
    ),
    "causal": LAYER.replace(mask=MaskSpec(bias=BIAS, causal=CausalAlignment.BOTTOM_RIGHT)),
    "padded": LAYER.replace(mask=MaskSpec(bias=BIAS, padding=True, empty_row=EmptyRow.ZERO)),
    "cache": LAYER.replace(
        cache=CacheSpec(), mask=MaskSpec(bias=BIAS, causal=CausalAlignment.BOTTOM_RIGHT)
    ),
    "sinks": LAYER.replace(sinks=True, mask=MaskSpec(bias=BIAS)),
}


def the_case(spec: AttentionSpec) -> Case | None:
    return next((case for case in cases(spec) if case.name == "minimum_bias"), None)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", all_forms())
@pytest.mark.parametrize("runtime", SESSIONS)
def test_every_form_gives_the_mean_or_refuses(form: str, name: str, runtime: str) -> None:
    spec = SPECS[name]
    case = the_case(spec)
    assert case is not None
    for opset in (18, 23, 25):
        params = FormParams(opset=opset)
        verdict = form_named(form).supports(spec, params)
        if opset < form_named(form).min_opset or not verdict:
            continue
        if runtime == "reference" and form.startswith("ort-"):
            continue  # it has no contrib ops
        session = SESSIONS[runtime](build_model(form_named(form), spec, params))
        outputs = oracle_outputs(spec, session.run(feeds(spec, case.inputs)))
        wrong = [str(found) for found in compare(spec, case, outputs)]
        assert not wrong, f"opset {opset}: {wrong}"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(LAYER.replace(mask=MaskSpec(bias=BIAS), io_dtype=DType.FP16), id="fp16"),
        pytest.param(
            LAYER.replace(
                mask=MaskSpec(bias=BIAS, padding=True, fill="min", empty_row=EmptyRow.UNIFORM)
            ),
            id="the fill is the same number",
        ),
        pytest.param(
            LAYER.replace(mask=MaskSpec(bias=BIAS), projections=ProjectionSpec(d_model=8), q_len=1),
            id="one query",
        ),
    ],
)
def test_there_is_no_such_case_where_the_mean_is_not_defined(spec: AttentionSpec) -> None:
    assert the_case(spec) is None
