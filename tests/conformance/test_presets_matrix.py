"""Every preset, at reduced width, in every form, dtype and opset: the core and the whole layer.

A handful of rows run always, all of them with ``-m slow``. A form may refuse a row, and must say
why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from known_defects import known_defect
from layers import check_layer
from reduced_presets import CHOSEN, reduced
from runtimes import SESSIONS, findings

from mha_export.forms import FormParams, all_forms
from mha_export.presets import load_preset, preset_names
from mha_export.spec import AttentionSpec, DType, RotarySpec
from mha_export.targets import (
    EvaluationError,
    Unavailable,
    all_targets,
    capabilities_for,
    evaluator_of,
)

PLAIN = {"grouped", "primitive", "tiled", "trt"}
"""Forms of ops that every runtime knows."""

CONTRIB = {"ort-attention", "ort-gqa", "ort-mha"}
"""Forms whose op onnx's evaluator does not know."""


def opsets_of(form: str) -> tuple[int, ...]:
    """The least opset of a form, and each at which it or the ops around it have new words."""
    least = all_forms()[form].min_opset
    return tuple(sorted({least, *(opset for opset in (18, 23, 24, 25) if opset > least)}))


def whole(preset: str) -> AttentionSpec:
    """The reduced layer, its rotary table long enough for the battery."""
    spec = reduced(load_preset(preset))
    return spec if spec.rotary is None else replace(spec, rotary=_long(spec.rotary))


def _long(rotary: RotarySpec) -> RotarySpec:
    return replace(rotary, max_positions=4096)


def core(preset: str, dtype: DType) -> AttentionSpec:
    """The attention alone: what the battery has inputs for."""
    return replace(whole(preset), projections=None, io_dtype=dtype)


def rows(presets: tuple[str, ...] | None = None) -> list:
    return [
        pytest.param(preset, form, opset, id=f"{preset}-{form}-{opset}")
        for preset in presets or preset_names()
        for form in all_forms()
        for opset in opsets_of(form)
    ]


EVERY_DAY = [pytest.param(*row, id="-".join(map(str, row))) for row in CHOSEN]


def check_core(
    preset: str, form: str, opset: int, dtype: DType, runtime: str, battery: str = "quick"
) -> None:
    spec = core(preset, dtype)
    verdict = all_forms()[form].supports(spec, FormParams(opset=opset))
    if not verdict:
        assert verdict.feature
        assert verdict.needs
        return
    wrong = list(findings(form, spec, FormParams(opset=opset), runtime=runtime, battery=battery))
    assert known_defect(runtime, form, opset, spec) is None
    assert not wrong, "\n".join(str(finding) for finding in wrong)


def check_whole(preset: str, form: str, opset: int) -> None:
    spec = whole(preset)
    if all_forms()[form].supports(spec, FormParams(opset=opset)):
        check_layer(form, spec, opset)


@pytest.mark.parametrize(("preset", "form", "opset"), EVERY_DAY)
def test_core(preset: str, form: str, opset: int) -> None:
    check_core(preset, form, opset, DType.FP32, "cpu")


@pytest.mark.parametrize(("preset", "form", "opset"), EVERY_DAY)
def test_layer(preset: str, form: str, opset: int) -> None:
    check_whole(preset, form, opset)


@pytest.mark.parametrize("preset", preset_names())
def test_primitive_says_every_preset_in_every_dtype(preset: str) -> None:
    check_whole(preset, "primitive", 18)
    for dtype in (DType.FP32, DType.FP16, DType.BF16):
        assert all_forms()["primitive"].supports(core(preset, dtype), FormParams(opset=13))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("preset", "form", "opset"), rows())
def test_core_on_onnx_runtime(preset: str, form: str, opset: int, dtype: DType) -> None:
    check_core(preset, form, opset, dtype, "cpu", "full")


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "form", "opset"), rows())
def test_layer_on_onnx_runtime(preset: str, form: str, opset: int) -> None:
    check_whole(preset, form, opset)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("preset", "form", "opset"), rows())
def test_core_on_the_reference(preset: str, form: str, opset: int, dtype: DType) -> None:
    """ONNX Runtime's CPU provider has no bf16 kernels: onnx's evaluator computes those rows."""
    if form not in CONTRIB:
        check_core(preset, form, opset, dtype, "reference")


OTHERS = [name for name in all_targets() if name not in SESSIONS]
PRECISION = {"openvino": "f32"}
"""Where a runtime would choose another one for an fp32 graph."""


@pytest.mark.slow
@pytest.mark.parametrize("form", list(all_forms()))
@pytest.mark.parametrize("target", OTHERS)
def test_core_on_every_other_target_is_right_or_refused(target: str, form: str) -> None:
    """A runtime may refuse to load or to run what it does not know; what it gives must be right.

    What the target's matrix says of a feature holds: an export never emits what is wrong there.
    """
    state = all_targets()[target].availability().run
    if isinstance(state, Unavailable):
        pytest.skip(f"target {target} is not here: {state.reason}")
    params = FormParams(opset=max(all_forms()[form].min_opset, 17))
    wrong, ran = [], 0
    evaluator = evaluator_of(target, PRECISION.get(target))
    known = capabilities_for(all_targets()[target])
    for preset in preset_names():
        spec = core(preset, DType.FP32)
        if known.refusal(form, spec) is not None:
            continue
        if all_forms()[form].supports(spec, params):
            try:
                found = list(findings(form, spec, params, runtime=evaluator))
            except EvaluationError:
                continue
            wrong += [f"{preset}: {finding}" for finding in found]
            ran += 1
    evaluator.close()  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)
    assert ran or form not in PLAIN, "not even plain ops ran"


def test_the_rows_of_every_day_name_each_form_and_known_presets() -> None:
    assert {row[0] for row in CHOSEN} <= set(preset_names())
    assert {row[1] for row in CHOSEN} >= set(all_forms())
