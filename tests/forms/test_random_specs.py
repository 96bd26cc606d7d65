"""Specs that hypothesis draws: built in every form that states them, run, equal to the oracle."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings
from known_defects import known_defect
from runtimes import findings
from strategies import attention_specs

from mha_export.forms import FormParams, all_forms, form_named
from mha_export.spec import AttentionSpec

OPSETS = {"onnx": (23, 24, 25)}
FORMS = [form for form in all_forms() if form != "ort-attention"]


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(spec=attention_specs(without=("projections",)))
def test_a_random_spec_is_right_or_refused(form: str, spec: AttentionSpec) -> None:
    for opset in OPSETS.get(form, (17,)):
        params = FormParams(opset=opset)
        verdict = form_named(form).supports(spec, params)
        if not verdict:
            assert form != "primitive", str(verdict)
            continue
        note(f"{form}@{opset}: {verdict}")
        wrong = list(findings(form, spec, params, runtime="cpu"))
        defect = known_defect("cpu", form, opset, spec)
        if defect is not None:
            wrong = [finding for finding in wrong if defect.symptom not in finding.reason]
        assert not wrong, "\n".join(str(finding) for finding in wrong)
