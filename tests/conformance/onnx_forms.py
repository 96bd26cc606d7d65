"""ONNX's own attention cases in every form that supports them, against the stored outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx_cases import Expressed, attention_cases, read_case
from runtimes import SESSIONS

from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, all_forms, build_model
from mha_export.spec import DType

CONTRIB_OPSET = 23

KNOWN: dict[tuple[str, str], str] = {
    ("onnx", "test_attention_4d_causal_fp16"): (
        "ONNX Runtime 1.32 rounds fp16 attention once more than plain ops, and than the stored "
        "outputs allow"
    ),
    ("ort-gqa", "test_attention_local_window_with_past"): (
        "the case has more new keys than queries; GroupQueryAttention takes as many of each"
    ),
}
"""(form, case) to why a runtime does not give the stored outputs; shown small by
``test_runtime_limits.py``."""


@dataclass(frozen=True)
class Outcome:
    """What one case gave in one form: ``pass``, ``unsupported`` or ``fail``, and why."""

    case: str
    form: str
    runtime: str
    status: str
    reason: str = ""


def expressed_cases() -> list[Expressed]:
    """Every case in op form that a spec states (all of them, as the oracle's tests say)."""
    readings = [read_case(case) for case in attention_cases()]
    return [reading for reading in readings if isinstance(reading, Expressed)]


def runtime_for(reading: Expressed) -> str:
    """ONNX Runtime's CPU provider has no bfloat16 kernels: those run on the reference."""
    return "reference" if reading.spec.io_dtype is DType.BF16 else "cpu"


def outcome(reading: Expressed, form: str) -> Outcome:
    """Emit one case in one form, run it and compare at the case's own tolerance."""
    runtime = runtime_for(reading)
    name = reading.case.name
    opset = reading.case.opset if form == "onnx" else CONTRIB_OPSET
    params = FormParams(opset=opset)
    verdict = all_forms()[form].supports(reading.spec, params)
    if not verdict:
        return Outcome(name, form, runtime, "unsupported", str(verdict))
    if runtime == "reference" and form.startswith("ort-"):
        return Outcome(name, form, runtime, "unsupported", "the reference has no contrib ops")
    try:
        session = SESSIONS[runtime](build_model(all_forms()[form], reading.spec, params))
        found = oracle_outputs(reading.spec, session.run(feeds(reading.spec, reading.inputs)))
    except Exception as error:  # a runtime's refusal is a result here
        return Outcome(name, form, runtime, "fail", str(error).splitlines()[0][:300])
    for output, expected in reading.expected.items():
        if output not in found:
            continue  # a form names no present output where the spec has no cache
        actual = found[output].astype(np.float64)
        try:
            np.testing.assert_allclose(
                actual,
                expected.astype(np.float64),
                rtol=reading.case.rtol,
                atol=reading.case.atol,
            )
        except AssertionError as error:
            text = " ".join(str(error).split())
            return Outcome(name, form, runtime, "fail", f"{output}: {text[:200]}")
    return Outcome(name, form, runtime, "pass")


def outcomes() -> Iterator[Outcome]:
    """Every case in every form."""
    for reading in expressed_cases():
        for form in all_forms():
            yield outcome(reading, form)
