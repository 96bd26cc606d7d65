"""One file per kind of source. A file that defines ``FRONTEND`` is found by itself."""

from __future__ import annotations

import functools
from pathlib import Path

from mha_export.discovery import members
from mha_export.errors import InputError
from mha_export.frontends._frontend import ExporterName, Frontend, LoadedModel, SourceOptions
from mha_export.presets import preset_names

__all__ = [
    "ExporterName",
    "Frontend",
    "LoadedModel",
    "SourceOptions",
    "all_frontends",
    "open_source",
]


@functools.cache
def all_frontends() -> dict[str, Frontend]:
    """Every frontend of the package by name, in alphabetical order of their files."""
    return {frontend.name: frontend for frontend in members(__name__, "FRONTEND")}


def open_source(source: object, options: SourceOptions | None = None) -> LoadedModel:
    """Read a model from wherever it is.

    Args:
        source: a path (``.onnx``, ONNX text, a Hugging Face folder, a YAML specification),
            ``preset:NAME``, ``module.py:factory``, or an object: ``torch.nn.Module``,
            ``torch.export.ExportedProgram``, ``onnx_ir.Model``, ``onnx.ModelProto``,
            :class:`mha_export.spec.AttentionSpec`.
        options: how to read it.

    Errors:
        InputError: no frontend knows this kind of source, or its own could not read it.
    """
    if source == "":  # an unset variable; as a path it would be the current folder
        raise InputError("the source is empty", fix="name a file or a folder; `.` is this one")
    for frontend in all_frontends().values():
        if frontend.accepts(source):
            return frontend.load(source, options or SourceOptions())
    raise _unknown(source)


def _unknown(source: object) -> InputError:
    kinds = "; ".join(frontend.summary for frontend in all_frontends().values())
    if not isinstance(source, (str, Path)):
        return InputError(
            f"{type(source).__module__}.{type(source).__qualname__} is not a kind of model",
            fix=f"give one of: {kinds}",
        )
    if str(source) in preset_names():
        return InputError(
            f"{source}: no such file or folder, but a preset", fix=f"write preset:{source}"
        )
    if not Path(source).exists():
        return InputError(f"{source}: no such file or folder", fix=f"give one of: {kinds}")
    return InputError(f"{source}: not a kind of file known here", fix=f"give one of: {kinds}")
