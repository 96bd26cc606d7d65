"""``torch.onnx.export``, by either of its exporters, quietly, to a graph free of torch types."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends._frontend import ExporterName
from mha_export.frontends._traceable import Axes, Traceable, cleaned, name_axes, name_outputs


@dataclass(frozen=True, kw_only=True)
class ExportedGraph:
    """What an exporter made, and what to say about it."""

    model: ir.Model
    notes: tuple[str, ...]


class FailedExportError(InputError):
    """Torch's own exporters could not export what they were given."""


def export(
    traceable: Traceable, *, exporter: ExporterName, opset: int | None, what: str
) -> ExportedGraph:
    """Run the exporter, or both in turn for ``auto``.

    Args:
        traceable: the module, its sample arguments, names and axes.
        exporter: which of torch's exporters.
        opset: version of ``ai.onnx``, or None for the exporter's own default.
        what: the source in words, for messages.

    Errors:
        FailedExportError: the exporter (both, for ``auto``) failed; its own last words are in the
            message.
    """
    if exporter == "dynamo":
        return _dynamo(traceable, opset, what)
    if exporter == "legacy":
        return _legacy(traceable, opset, what)
    try:
        return _dynamo(traceable, opset, what)
    except InputError as failure:
        first = failure
    try:
        graph = _legacy(traceable, opset, what)
    except InputError as second:
        both = f"{first.what}\n  and by tracing: {second.what}"
        raise FailedExportError(both, fix=first.fix) from second
    note = f"exported by tracing (legacy), since torch.export failed: {first.what}"
    return ExportedGraph(model=graph.model, notes=(note, *graph.notes))


def export_program(program: Any, *, opset: int | None, what: str) -> ExportedGraph:
    """Translate a ``torch.export.ExportedProgram``, whose dynamic axes are already decided."""
    import torch

    options = {} if opset is None else {"opset_version": opset}
    with quiet(), _reported(what, "torch.onnx.export"):
        translated = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    return ExportedGraph(model=cleaned(translated.model), notes=())


def _dynamo(traceable: Traceable, opset: int | None, what: str) -> ExportedGraph:
    import torch

    def shapes_of(axes: Axes | None, arg: Any) -> dict[int, Any]:
        if axes is None:
            return dict.fromkeys(range(arg.ndim), torch.export.Dim.AUTO)
        return dict(axes)

    shapes = tuple(
        shapes_of(axes, arg) for axes, arg in zip(traceable.input_axes, traceable.args, strict=True)
    )
    options = {} if opset is None else {"opset_version": opset}
    with quiet(), _reported(what, "torch.export"), _plain_attention():
        program = torch.onnx.export(
            traceable.module,
            traceable.args,
            input_names=list(traceable.input_names),
            output_names=list(traceable.output_names) or None,
            dynamic_shapes=(shapes,),
            dynamo=True,
            verbose=False,
            **options,
        )
    model = cleaned(program.model)
    name_outputs(model, traceable)
    name_axes(model, traceable)
    return ExportedGraph(model=model, notes=())


def _legacy(traceable: Traceable, opset: int | None, what: str) -> ExportedGraph:
    import torch

    axes = _traced_axes(traceable)
    axes |= {name: dict(given) for name, given in traceable.output_axes.items()}
    options = {} if opset is None else {"opset_version": opset}
    with (
        tempfile.TemporaryDirectory(prefix="mha-export-") as folder,
        quiet() as said,
        _reported(what, "the tracing exporter"),
        _plain_attention(),
    ):
        file = Path(folder) / "traced.onnx"
        torch.onnx.export(
            traceable.module,
            traceable.args,
            file,
            input_names=list(traceable.input_names),
            output_names=list(traceable.output_names) or None,
            dynamic_axes=axes,
            dynamo=False,
            **options,
        )
        model = ir.load(file)
        ir.external_data.load_to_model(model)
    model = cleaned(model)
    name_outputs(model, traceable)
    name_axes(model, traceable)
    return ExportedGraph(model=model, notes=_tracing_notes(said.warnings))


def _traced_axes(traceable: Traceable) -> dict[str, dict[int, str]]:
    """Axes to leave open by input; where nobody said, the first two, but never a feature axis.

    A tracer proves nothing about sizes, so axes share a name when they share a size in the sample.
    """
    names_of: dict[int, str] = {}
    result: dict[str, dict[int, str]] = {}
    for name, axes, arg in zip(
        traceable.input_names, traceable.input_axes, traceable.args, strict=True
    ):
        if axes is not None:
            result[name] = dict(axes)
            names_of |= {arg.shape[axis]: word for axis, word in axes.items()}
            continue
        last = arg.ndim - 1 if arg.is_floating_point() and arg.ndim > 2 else arg.ndim
        result[name] = {}
        for axis in range(min(2, last)):
            plain = ("batch", "seq")[axis]
            fresh = f"{name}_{axis}" if plain in names_of.values() else plain
            known = names_of.setdefault(arg.shape[axis], fresh)
            result[name][axis] = fresh if known in result[name].values() else known
    return result


@dataclass
class _Said:
    """What an exporter printed and warned of while it was kept quiet."""

    text: io.StringIO
    warnings: list[warnings.WarningMessage]


@contextlib.contextmanager
def quiet() -> Iterator[_Said]:
    """Keep progress, log lines and warnings off the user's streams, and remember them."""
    text = io.StringIO()
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        warnings.simplefilter("always")
        logging.disable(logging.ERROR)
        try:
            yield _Said(text=text, warnings=caught)
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _reported(what: str, exporter: str) -> Iterator[None]:
    """Turn whatever an exporter raises into one clear error."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise FailedExportError(
            f"{what} could not be exported: {exporter} says: {last_words(error)}",
            fix="try the other --exporter (dynamo or legacy), or export it to .onnx yourself and "
            "give that file",
        ) from error


def last_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = re.sub(r"\s+", " ", " ".join(lines[:2]))
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Without ``nn.MultiheadAttention``'s fused fast path, which no exporter can translate."""
    import torch

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _tracing_notes(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    places = {
        f"{Path(item.filename).name}:{item.lineno}"
        for item in caught
        if item.category.__name__ == "TracerWarning"
    }
    if not places:
        return ()
    return (
        "tracing followed one branch of the Python code at "
        f"{', '.join(sorted(places))}; sizes may be fixed to the sample's there",
    )


def as_array(tensor: Any) -> np.ndarray:
    """A tensor's values as a contiguous array of its own (bfloat16 by way of ``ml_dtypes``)."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return np.array(plain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    return np.array(plain.numpy())
