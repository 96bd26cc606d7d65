"""The oracle against ONNX's stored outputs, each at the case's own tolerance."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_cases import Expressed, NodeCase, attention_cases, node_cases, read_case, verdicts

from mha_export.oracle import attention, rotate
from mha_export.spec import RotarySpec, RotaryStyle

CASES = attention_cases()

# One unit in the last place of the dtype an output is stored in: the reference rounds at each step.
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def test_every_case_in_op_form_is_a_spec() -> None:
    refused = {case.name: verdict for case, verdict in verdicts() if verdict != "expressed"}
    assert refused == {}
    assert len(CASES) > 90


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_gives_the_stored_outputs(case: NodeCase) -> None:
    reading = read_case(case)
    assert isinstance(reading, Expressed)
    result = attention(reading.spec, reading.inputs)
    found = {
        "output": result.output,
        "present_key": result.present_key,
        "present_value": result.present_value,
    }
    if reading.spec.qk_output is not None:
        found["qk_output"] = result.scores(reading.spec.qk_output)
    for name, expected in reading.expected.items():
        actual = found[name].astype(expected.dtype).astype(np.float64)
        np.testing.assert_allclose(
            actual, expected.astype(np.float64), rtol=case.rtol, atol=case.atol, err_msg=name
        )
