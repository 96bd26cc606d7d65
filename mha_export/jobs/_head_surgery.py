"""What ``prune`` and ``regroup`` share: writing the model, and the record beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.errors import CheckFailedError, InputError
from mha_export.heads import HeadModel
from mha_export.heads.checking import TOLERANCE, runnable
from mha_export.heads.regrouping import cache_bytes
from mha_export.jobs._head_work import HeadOptions, Opened
from mha_export.jobs._store import check_file, file_sha256, staged_file, write_models
from mha_export.jobs.inspect import model_record
from mha_export.measure.machine import machine_record
from mha_export.measure.model_inputs import cases_at_traced_sizes, model_cases
from mha_export.report.records import SurgeryRecord, write_json


def check_output(output: Path, source: object) -> None:
    """Before long work: an ``.onnx`` that can be written, and room for the JSON beside it.

    Errors:
        InputError: another suffix, a place that can't be written, or the source itself.
    """
    if output.suffix.lower() != ".onnx":
        raise InputError(f"{output}: the model is written as .onnx", fix="end -o in .onnx")
    check_file(output, source=source)
    check_file(output.with_suffix(".json"))


def check_cases(opened: Opened, options: HeadOptions) -> list[Mapping[str, np.ndarray]]:
    """Inputs that the written model is compared on.

    Errors:
        InputError: the model runs on none of those tried.
    """
    model = opened.heads.model
    for cases in (model_cases(model, seed=options.seed), cases_at_traced_sizes(model)):
        found = runnable(model, [case.inputs for case in cases], opened.evaluator)
        if found:
            return found
    raise InputError(
        f"{opened.loaded.name} runs at none of the sizes tried, so nothing can be proven of it",
        fix="export it with free batch and sequence axes",
    )


def require_equal(difference: float, what: str) -> None:
    """Nothing is written that is not equal.

    Errors:
        CheckFailedError: it is not.
    """
    if not difference <= TOLERANCE:
        raise CheckFailedError(
            f"the new model differs from {what} by {difference:.3g}; expected {TOLERANCE:g} at "
            "most; nothing was written",
            fix="this is a bug: please report it with the model",
        )


def written(
    opened: Opened,
    options: HeadOptions,
    model: ir.Model,
    after: HeadModel,
    output: Path,
    **more: Any,
) -> tuple[SurgeryRecord, tuple[Path, Path]]:
    """Write the model and its record; whole or not at all."""
    with staged_file(output) as stage:
        write_models(stage.parent, {stage.stem: model}, standalone=True)
    before = opened.heads
    record = SurgeryRecord(
        machine=machine_record(),
        model=model_record(opened.loaded),
        file=output.name,
        sha256=file_sha256(output),
        heads_before=sum(layer.heads for layer in before.layers),
        parameters_before=parameters(opened.loaded.model),
        parameters_after=parameters(model),
        bytes_before=weight_bytes(opened.loaded.model),
        bytes_after=weight_bytes(model),
        cache_bytes_before=cache_bytes(before),
        cache_bytes_after=cache_bytes(after),
        data=None if options.data is None else options.data.name,
        samples=0 if opened.samples is None else opened.samples.samples,
        **more,
    )
    beside = write_json(output.with_suffix(".json"), record)
    return record, (output, beside)


def parameters(model: ir.Model) -> int:
    """Numbers in float weights."""
    return sum(int(np.prod(tensor.shape.numpy())) for tensor in _weights(model))


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all float weights."""
    return sum(tensor.nbytes for tensor in _weights(model))


def _weights(model: ir.Model) -> Sequence[ir.TensorProtocol]:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return [t for t in tensors if t is not None and t.dtype.is_floating_point()]
