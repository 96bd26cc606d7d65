"""Every precision that ``-t`` takes has a reference: a number format, or what the graph says."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from mha_export.measure.reference_run import ModelReference
from mha_export.spec import DType
from mha_export.targets import all_targets

TEXT = '<ir_version: 8, opset_import: ["": 18]> g (float[n] a) => (float[n] b) { b = Neg(a) }'
TOLD = {"f16": DType.FP16, "bf16": DType.BF16}


@pytest.mark.parametrize(
    "precision",
    sorted({name for target in all_targets().values() for name in target.precisions}),
)
def test_a_precision_has_a_reference(precision: str) -> None:
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    assert ModelReference(model, precision=precision).dtype is TOLD.get(precision, DType.FP32)
