"""Writing an export folder: graphs that share one weights file, whole or not at all.

Runtimes refuse external data outside the model's own folder and through links, so the folder is
flat: ``<variant>.onnx`` ... and one ``weights.bin``. Equal tensors of different graphs are stored
once; a further variant costs kilobytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from mha_export.errors import InputError

PORTABLE = "portable"
"""Not a target but a variant every target can run: see docs/forms/portable.md."""
ORIGINAL = "original"
"""The unmodified graph beside the variants: what parity and ``--vs raw`` refer to."""
WEIGHTS = "weights.bin"
INLINE_BYTES = 1024
"""Tensors up to this size stay in the graph: shapes, scales and scalars that optimisers fold."""
_ALIGNMENT = 4096
_ALIGN_ABOVE_BYTES = 64 * 1024
_PROTOBUF_LIMIT = 2**31 - 1


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling of ``out`` that replaces its files when the block ends without error.

    Errors:
        InputError: ``out`` is a file, or its parent cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected a folder", fix="choose another -o")
    stage = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"cannot write beside {out}: {error.strerror}", fix="choose a folder you may write"
        ) from error
    try:
        yield stage
        _move_into_place(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move_into_place(stage: Path, out: Path) -> None:
    if not out.exists():
        stage.rename(out)
        return
    for path in sorted(stage.iterdir()):
        path.replace(out / path.name)


@contextmanager
def staged_file(out: Path) -> Iterator[Path]:
    """A temporary sibling of ``out``, of the same suffix, that becomes it when the block ends.

    Errors:
        InputError: ``out`` is a folder, or lies in one that cannot be written.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; expected a file", fix="choose another -o")
    stage = out.with_name(f".{out.stem}.partial-{os.getpid()}{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield stage
        stage.replace(out)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}", fix="choose a place you may write"
        ) from error
    finally:
        stage.unlink(missing_ok=True)


def write_models(folder: Path, models: Mapping[str, ir.Model], *, standalone: bool) -> None:
    """Write ``models`` (file stem to model) into ``folder``. The models are left unchanged.

    ``standalone`` keeps each model's weights inside its own file.

    Errors:
        InputError: a stand-alone model is above the 2 GB a protobuf file can hold.
    """
    if standalone:
        for stem, model in models.items():
            _check_size(stem, model)
            ir.save(model, folder / f"{stem}.onnx")
        return
    clones = {stem: model.clone() for stem, model in models.items()}
    holders: dict[str, list[ir.Value]] = {}
    tensors: dict[str, ir.TensorProtocol] = {}
    for clone in clones.values():
        for value in _initializers(clone):
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= INLINE_BYTES:
                continue
            if tensor.dtype is ir.DataType.STRING:
                continue
            key = _content_key(tensor)
            tensors.setdefault(key, tensor)
            holders.setdefault(key, []).append(value)
    # Wide items first: a densely packed file then keeps every tensor aligned to its item size.
    order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    if order:
        written = ir.external_data.convert_tensors_to_external(
            [tensors[key] for key in order],
            folder,
            WEIGHTS,
            alignment=_ALIGNMENT,
            align_threshold=_ALIGN_ABOVE_BYTES,
        )
        for key, external in zip(order, written, strict=True):
            for value in holders[key]:
                value.const_value = ir.ExternalTensor(
                    external.location,
                    external.offset,
                    external.length,
                    external.dtype,
                    shape=external.shape,
                    name=value.name or "",
                    base_dir=folder,
                )
    for stem, clone in clones.items():
        ir.save(clone, folder / f"{stem}.onnx")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    graphs = [model.graph, *model.graph.subgraphs()]
    for graph in graphs:
        yield from graph.initializers.values()


def _content_key(tensor: ir.TensorProtocol) -> str:
    digest = hashlib.sha256(tensor.tobytes()).hexdigest()
    return f"{tensor.dtype.name}:{tuple(tensor.shape)}:{digest}"


def _check_size(stem: str, model: ir.Model) -> None:
    total = sum(
        value.const_value.nbytes for value in _initializers(model) if value.const_value is not None
    )
    if total > _PROTOBUF_LIMIT:
        raise InputError(
            f"{stem}.onnx would hold {total} bytes of weights; one file can hold {_PROTOBUF_LIMIT}",
            fix="leave --standalone out: the weights then lie beside the graphs",
        )
