"""An ONNX file: binary or text, weights inside or beside it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends._digest import model_digest
from mha_export.frontends._frontend import LoadedModel, SourceOptions

BINARY_SUFFIXES = frozenset({".onnx", ".pb"})
TEXT_SUFFIXES = frozenset(
    {".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".onnxjson"}
)
_WEIGHTS_ONLY = frozenset({".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth", ".safetensors"})

_OLDEST_IR_VERSION = 3
"""Older files state their weights and inputs by other rules (2017)."""


class OnnxFile:
    """Loads with ``onnx_ir``; external weights stay on disk until something reads them."""

    name = "onnx"
    summary = "an .onnx file (or ONNX text, .onnxtxt)"

    def accepts(self, source: object) -> bool:
        if isinstance(source, (ir.Model, onnx.ModelProto)):
            return True
        if not isinstance(source, (str, Path)):
            return False
        path = Path(source)
        suffix = path.suffix.lower()
        known = suffix in BINARY_SUFFIXES | TEXT_SUFFIXES | _WEIGHTS_ONLY | {".ort"}
        return (known and not path.is_dir()) or (not suffix and path.is_file())

    def load(self, source: object, options: SourceOptions) -> LoadedModel:
        if isinstance(source, ir.Model):
            model, name, origin = source, source.graph.name or "model", "onnx_ir.Model"
        elif isinstance(source, onnx.ModelProto):
            _check_versions(source, "the ModelProto")
            model = ir.from_proto(source)
            name, origin = source.graph.name or "model", "onnx.ModelProto"
        else:
            path = Path(str(source))
            model = _read(path)
            name, origin = path.stem, f"ONNX file {path}"
        _check_wiring(model, origin)
        return LoadedModel(model=model, name=name, sha256=model_digest(model), origin=origin)


def _read(path: Path) -> ir.Model:
    _check_file(path)
    proto = _parse(path)
    _check_versions(proto, str(path))
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx-ir raises bare exceptions, the cause holds the reason
        raise InputError(
            f"{path}: not a well-formed ONNX graph: {_root(error)}",
            fix="export the model anew, or run onnx.checker.check_model on it for details",
        ) from error
    _bind_external_data(model, path)
    return model


def _check_file(path: Path) -> None:
    if not path.exists():
        raise InputError(f"{path}: no such file", fix=_nearby(path))
    suffix = path.suffix.lower()
    if suffix in _WEIGHTS_ONLY:
        raise InputError(
            f"{path}: weights alone ({suffix}), expected a model",
            fix="give the Hugging Face folder that holds it, or export the model to .onnx first",
        )
    if suffix == ".ort":
        raise InputError(
            f"{path}: ONNX Runtime's own format, from which a graph can't be read back",
            fix="give the .onnx file it was made from",
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path}: empty file", fix="export or download it again")


def _nearby(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either: check the path"
    there = sorted(item.name for item in folder.glob("*.onnx"))
    if not there:
        return f"{folder.resolve()} holds no .onnx file: check the path"
    more = "" if len(there) <= 5 else f" and {len(there) - 5} more"
    return f"in {folder.resolve()} there is: {', '.join(there[:5])}{more}"


def _parse(path: Path) -> onnx.ModelProto:
    text = path.suffix.lower() in TEXT_SUFFIXES
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The onnxtxt format is experimental")
            proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error}", fix="check its permissions") from error
    except Exception as error:  # four parsers, each with its own kinds
        kind = "ONNX text" if text else "ONNX"
        raise InputError(
            f"{path}: not {kind}, or cut off ({path.stat().st_size:,} bytes; {_root(error)})",
            fix="compare its size with the original's, and export or download it again",
        ) from error
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise InputError(
            f"{path}: holds no graph: not ONNX, or cut off ({path.stat().st_size:,} bytes)",
            fix="compare its size with the original's, and export or download it again",
        )
    return proto


def _check_versions(proto: onnx.ModelProto, where: str) -> None:
    newest = int(onnx.IR_VERSION)
    if not _OLDEST_IR_VERSION <= proto.ir_version <= newest:
        raise InputError(
            f"{where}: ONNX IR version {proto.ir_version}; onnx {onnx.__version__} reads "
            f"{_OLDEST_IR_VERSION} to {newest}",
            fix="pip install --upgrade onnx"
            if proto.ir_version > newest
            else "open and save it with a newer onnx, or export the model anew",
        )
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    if not opsets:
        raise InputError(
            f"{where}: imports no operator set; the file is cut off or was never complete",
            fix="compare its size with the original's, and export or download it again",
        )
    known = onnx.defs.onnx_opset_version()
    if opsets.get("", 0) > known:
        raise InputError(
            f"{where}: ai.onnx opset {opsets['']}; onnx {onnx.__version__} knows up to {known}",
            fix="pip install --upgrade onnx, or export with a lower opset",
        )


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    said = error.args[0] if error.args else ""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = next((line for line in lines if not line.startswith("Error context")), None)
    return re.sub(r"\s+", " ", words or type(error).__name__)[:200]


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, its subgraphs, and those of every function."""
    for root in (model.graph, *(function.graph for function in model.functions.values())):
        yield root
        for node in ir.traversal.RecursiveGraphIterator(root):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                    yield attribute.as_graph()
                elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                    yield from attribute.as_graphs()


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if isinstance(attribute.value, ir.ExternalTensor):
                    yield attribute.value


def _bind_external_data(model: ir.Model, path: Path) -> None:
    """Point every external tensor at the model's folder, and see that its bytes are there."""
    folder = path.absolute().parent
    problems: dict[str, list[str]] = {}
    for tensor in _external_tensors(model):
        tensor.base_dir = folder
        problem = _external_problem(tensor, folder)
        if problem is not None:
            problems.setdefault(problem, []).append(tensor.name or "?")
    if problems:
        problem, names = next(iter(problems.items()))
        more = "" if len(names) == 1 else f" and {len(names) - 1} more tensors"
        raise InputError(
            f"{path}: weights {names[0]!r}{more} lie in another file: {problem}",
            fix=f"put the file with the weights itself into {folder}, complete",
        )


def _external_problem(tensor: ir.ExternalTensor, folder: Path) -> str | None:
    file = (folder / tensor.location).resolve()
    if not file.is_relative_to(folder.resolve()):
        through = " through a link" if (folder / tensor.location).is_symlink() else ""
        return f"{tensor.location} leads out of the model's folder{through}, which runtimes refuse"
    if not file.is_file():
        return f"{tensor.location} is missing"
    size, start = file.stat().st_size, tensor.offset or 0
    end = start + (tensor.nbytes if tensor.length is None else tensor.length)
    if end > size:
        return f"{tensor.location} is cut off ({size:,} bytes)"
    return None


def _check_wiring(model: ir.Model, origin: str) -> None:
    """Every value that a node or an output reads is made somewhere."""
    for graph in _graphs(model):
        for node in graph:
            for value in node.inputs:
                if value is not None and not _is_made(value):
                    raise InputError(
                        f"{origin}: node {node.name or node.op_type!r} ({node.op_type}) reads "
                        f"{value.name!r}, which nothing produces",
                        fix="the file is damaged: export the model anew",
                    )
        for value in graph.outputs:
            if not _is_made(value):
                raise InputError(
                    f"{origin}: output {value.name!r} is produced by no node",
                    fix="the file is damaged: export the model anew",
                )


def _is_made(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


FRONTEND = OnnxFile()
