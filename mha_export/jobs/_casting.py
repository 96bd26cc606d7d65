"""What ``--dtype`` makes of a model, the same in every job that takes it."""

from __future__ import annotations

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.jobs._progress import Progress
from mha_export.measure.reference_run import model_dtype
from mha_export.rewrite import with_dtype
from mha_export.spec import DType


def cast_model(model: ir.Model, dtype: DType | None, progress: Progress) -> ir.Model:
    """``model`` in ``dtype``; the model itself where nothing is asked for, or fp32 of an fp32 one.

    Errors:
        InputError: a model of double precision, which no cast here touches.
    """
    own = model_dtype(model)
    if dtype is None or dtype is own is DType.FP32:
        return model
    if own is DType.FP64:
        raise InputError(
            f"--dtype {dtype}: the model is in fp64, which is not cast",
            fix="leave --dtype out, or convert the model to fp32 where it comes from",
        )
    progress(f"casting to {dtype}")
    return with_dtype(model, dtype)
