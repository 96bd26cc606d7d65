"""The body that a portable file carries, run by a runtime that knows the op by nothing else."""

from __future__ import annotations

import pytest
from features import FEATURES
from runtimes import findings

from mha_export.forms import FormParams
from mha_export.spec import DType

BODIES = ("mha", "gqa", "v-head-dim", "scale-negative", "causal-top-left", "padding-min-uniform")


@pytest.mark.parametrize("opset", [15, 23])
@pytest.mark.parametrize("feature", BODIES)
def test_the_body_is_the_attention(feature: str, opset: int) -> None:
    params = FormParams(opset=opset)
    assert not list(findings("portable", FEATURES[feature], params, runtime="reference"))


def test_the_body_computes_its_softmax_in_single_precision() -> None:
    spec = FEATURES["mha"].replace(io_dtype=DType.FP16, softmax_dtype=DType.FP32)
    assert not list(findings("portable", spec, FormParams(opset=23), runtime="reference"))
