"""Writing an export folder: graphs that share one weights file, whole or not at all.

Runtimes refuse external data outside the model's own folder and through links, so the folder is
flat: ``<variant>.onnx`` ... and one ``weights.bin``. Equal tensors of different graphs are stored
once; a further variant costs kilobytes.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx_ir as ir

from mha_export.errors import InputError

PORTABLE = "portable"
"""Not a target but a variant every target can run: see docs/forms/portable.md."""
ORIGINAL = "original"
"""The unmodified graph beside the variants: what parity and ``--vs raw`` refer to."""
WEIGHTS = "weights.bin"
MANIFEST = "export.json"
INLINE_BYTES = 1024
"""Tensors up to this size stay in the graph: shapes, scales and scalars that optimisers fold."""
_ALIGNMENT = 4096
_ALIGN_ABOVE_BYTES = 64 * 1024
_PROTOBUF_LIMIT = 2**31 - 1


def check_folder(out: Path) -> None:
    """Before long work: can ``out`` become an export folder?

    Errors:
        InputError: ``out``, or a part of its path, is a file, or may not be written.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected a folder", fix="choose another -o")
    # A new folder is a sibling renamed; an old one gets its files replaced, from that sibling.
    for folder in (out.absolute().parent, *([out] if out.exists() else [])):
        _check_writable(out, folder)


def check_file(out: Path, *, source: object = None) -> None:
    """Before long work: can ``out`` be written, and is it another file than ``source``?

    Errors:
        InputError: ``out`` is a folder, or lies in none, or in one that may not be written; or it
            is what it would be made from.
    """
    check_source_stays([out], files_of_source(source) | _export_in(source))
    if out.is_dir():
        raise InputError(f"{out} is a folder; expected a file", fix="choose another -o")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise InputError(f"cannot write {out}: {parent} is no folder", fix="make the folder first")
    _check_writable(out, parent)


def files_of_source(source: object, model: ir.Model | None = None) -> frozenset[Path]:
    """The file that ``source`` is, where it is one, and those that hold weights of ``model``."""
    found = set()
    if isinstance(source, (str, Path)):
        with suppress(OSError, ValueError):  # what is no path at all is no file
            if Path(source).is_file():
                found.add(Path(source))
    for value in () if model is None else _initializers(model):
        if isinstance(value.const_value, ir.ExternalTensor):
            found.add(Path(value.const_value.path))
    return frozenset(found)


def _export_in(source: object) -> frozenset[Path]:
    """Files of the export that the folder ``source`` is; none where it is something else."""
    if not isinstance(source, (str, Path)) or not (names := _files_of_export(Path(source))):
        return frozenset()
    return frozenset(Path(source) / name for name in names | {MANIFEST})


def check_source_stays(outputs: Iterable[Path], files: Collection[Path]) -> None:
    """No output may replace a file of the source: a model is not read again once it is gone.

    Errors:
        InputError: an output is one of ``files``.
    """
    for output in outputs:
        for file in files:
            if output.exists() and file.exists() and output.samefile(file):
                raise InputError(
                    f"{output} is a file of the source; writing it would destroy what was given",
                    fix="choose another -o",
                )


def check_folder_keeps(out: Path, stems: Collection[str], files: Collection[Path]) -> None:
    """Neither graphs of these stems in ``out``, nor what goes with them, replace a source's files.

    Errors:
        InputError: one of them is one of ``files``, or an earlier export in ``out`` is the source.
    """
    names = {f"{stem}.onnx" for stem in stems} | {WEIGHTS, MANIFEST} | _files_of_export(out)
    check_source_stays([out / name for name in sorted(names)], files)


def _check_writable(out: Path, folder: Path) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {out}: {folder} is a file", fix="choose another -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {out}: no permission in {folder}", fix="choose a folder you may write"
        )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling of ``out`` that replaces its files when the block ends without error.

    What an export that was killed left beside ``out`` is removed.

    Errors:
        InputError: ``out`` is a file, or its parent cannot be written.
    """
    check_folder(out)
    _remove_abandoned(out)
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
        with _one_at_a_time(out.absolute().parent):
            _move_into_place(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move_into_place(stage: Path, out: Path) -> None:
    """Make ``out`` what ``stage`` is; other files in it stay.

    Into a folder that exists the files go one by one. Its manifest is removed first and comes
    last, so that whoever reads the folder meanwhile, or after a crash, sees no export in it
    rather than graphs of one export with weights of another.
    """
    if not out.exists():
        stage.rename(out)
        return
    stale = _files_of_export(out) - {path.name for path in stage.iterdir()}
    (out / MANIFEST).unlink(missing_ok=True)
    for name in sorted(stale):
        (out / name).unlink(missing_ok=True)
    for path in sorted(stage.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
        path.replace(out / path.name)


def _files_of_export(out: Path) -> set[str]:
    """Names of the graphs and weights that the export in ``out`` wrote; none without one."""
    try:
        variants = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["variants"]
        graphs = {Path(variant["file"]).name for variant in variants}
    except (OSError, ValueError, LookupError, TypeError):
        return set()
    return graphs | {f"{ORIGINAL}.onnx", WEIGHTS}


def _remove_abandoned(out: Path) -> None:
    for stage in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
        pid = stage.name.rpartition("-")[2].partition(".")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            if stage.is_dir():
                shutil.rmtree(stage, ignore_errors=True)
            else:
                stage.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process moves an export into ``folder``.

    The lock is on the folder itself: it leaves no file and ends with its process. Systems and file
    systems that have no such lock go without.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def staged_file(out: Path) -> Iterator[Path]:
    """A temporary sibling of ``out``, of the same suffix, that becomes it when the block ends.

    Errors:
        InputError: ``out`` is a folder, or lies in one that cannot be written.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; expected a file", fix="choose another -o")
    _remove_abandoned(out)
    stage = out.with_name(f".{out.name}.partial-{os.getpid()}{out.suffix}")
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
            whole = model.clone()
            ir.external_data.load_to_model(whole)  # a source may keep its weights in a file
            ir.save(whole, folder / f"{stem}.onnx")
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
