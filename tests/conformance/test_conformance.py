"""Every form x every feature x dtype x opset, run on a runtime and judged against the oracle.

The forms come from the registry: a new file is tested unedited.
"""

from __future__ import annotations

import pytest
from features import FEATURES
from known_defects import DEFECTS, known_defect
from runtimes import findings

from mha_export.forms import FormParams, all_forms
from mha_export.spec import DType

NEWEST_OPSET = 25
CONTRIB = {"ort-attention", "ort-gqa", "ort-mha"}
"""Forms whose op the reference evaluator does not know (``portable`` brings its own body)."""


def opsets_of(form: str) -> tuple[int, ...]:
    """Where a form's spelling changes: its least opset, and those at which it has new words."""
    least = all_forms()[form].min_opset
    return tuple(sorted({least, *(opset for opset in (23, 24, 25) if form == "onnx")}))


def later_opsets_of(form: str) -> tuple[int, ...]:
    """Opsets at which only the ops around a form change: reductions (18), norms (23), scatter."""
    least = all_forms()[form].min_opset
    first = opsets_of(form)
    return tuple(opset for opset in (18, 23, 24) if opset >= least and opset not in first)


def matrix(*, opsets=opsets_of, forms=None) -> list:
    """One row a form, feature and opset; a spec the form refuses is a row too: it must say why."""
    return [
        pytest.param(form, feature, opset, id=f"{form}-{opset}-{feature}")
        for form in forms or all_forms()
        for feature in FEATURES
        for opset in opsets(form)
    ]


def check(form: str, feature: str, opset: int, dtype: DType, runtime: str, battery: str) -> None:
    spec = FEATURES[feature].replace(io_dtype=dtype)
    params = FormParams(opset=opset)
    verdict = all_forms()[form].supports(spec, params)
    if not verdict:
        assert verdict.feature
        assert verdict.needs
        return
    wrong = list(findings(form, spec, params, runtime=runtime, battery=battery))
    defect = known_defect(runtime, form, opset, spec)
    if defect is None:
        assert not wrong, "\n".join(str(finding) for finding in wrong)
    else:
        assert wrong, f"mended, so remove it from the list: {defect.reason}"
        assert all(defect.symptom in finding.reason for finding in wrong), wrong


@pytest.mark.parametrize(("form", "feature", "opset"), matrix())
def test_onnx_runtime_cpu_fp32(form: str, feature: str, opset: int) -> None:
    check(form, feature, opset, DType.FP32, "cpu", "quick")


HALF = (
    "mha", "softmax-fp32", "softcap", "alibi", "rotary", "rotary-interleaved", "rms", "layer", "l2",
    "bias-causal", "padding-inf-zero", "padding-min-uniform", "keep-finite-finite", "sinks",
    "static", "scores-probabilities",
)  # fmt: skip
"""Features with something of their own to say in half precision."""


@pytest.mark.parametrize("feature", HALF)
@pytest.mark.parametrize("form", ["grouped", "onnx", "primitive", "tiled"])
def test_onnx_runtime_cpu_fp16_of_every_day(form: str, feature: str) -> None:
    check(form, feature, opsets_of(form)[0], DType.FP16, "cpu", "quick")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "feature", "opset"), matrix(opsets=later_opsets_of))
def test_onnx_runtime_cpu_later_opsets(form: str, feature: str, opset: int) -> None:
    check(form, feature, opset, DType.FP32, "cpu", "quick")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "feature", "opset"), matrix())
def test_onnx_runtime_cpu_fp16(form: str, feature: str, opset: int) -> None:
    check(form, feature, opset, DType.FP16, "cpu", "ordinary")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "feature", "opset"), matrix())
def test_onnx_runtime_cpu_full_battery(form: str, feature: str, opset: int) -> None:
    check(form, feature, opset, DType.FP32, "cpu", "full")


def _evaluated() -> list[str]:
    return [form for form in all_forms() if form not in CONTRIB]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(("form", "feature", "opset"), matrix(forms=_evaluated()))
def test_reference_evaluator(form: str, feature: str, opset: int, dtype: DType) -> None:
    check(form, feature, opset, dtype, "reference", "quick")


def test_every_listed_defect_names_a_row() -> None:
    for defect in DEFECTS:
        assert defect.form in all_forms()
        assert defect.triggers(FEATURES[defect.example])
        assert set(defect.opsets) <= set(opsets_of(defect.form))


def test_every_feature_is_stated_by_at_least_one_form() -> None:
    unstated = [
        name
        for name, spec in FEATURES.items()
        if not any(form.supports(spec, FormParams(opset=25)) for form in all_forms().values())
    ]
    # Softmax of -inf alone is NaN: "finite" contradicts the fill, and every form says so.
    assert all(name.endswith("inf-finite") for name in unstated), unstated
