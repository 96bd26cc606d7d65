"""Where a compile puts its files, and models as bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha_export.targets._target import CompileOptions

if TYPE_CHECKING:
    import onnx_ir as ir


def work_folder(options: CompileOptions) -> Path:
    """The caller's folder (made if need be), or a new temporary one that stays until removed."""
    if options.workdir is not None:
        options.workdir.mkdir(parents=True, exist_ok=True)
        return options.workdir
    return Path(tempfile.mkdtemp(prefix="mha_export-"))


def model_bytes(model: ir.Model) -> bytes:
    """The model in one piece: external weights are embedded. The model itself is not changed."""
    import onnx_ir as ir

    proto = ir.to_proto(model)
    embed_external(model, proto)
    return bytes(proto.SerializeToString())


def embed_external(model: ir.Model, proto: Any) -> None:
    """Give the initializers of ``proto`` the data that ``model`` keeps in external files."""
    import onnx_ir as ir

    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    for initializer in proto.graph.initializer:
        if initializer.name in tensors:
            initializer.ClearField("external_data")
            initializer.ClearField("data_location")
            initializer.raw_data = tensors[initializer.name].tobytes()


def pack(source: Path, destination: Path, *, keep_shapes: bool = True) -> Path:
    """Write a model and its external weights as one file.

    Args:
        source: the exported file.
        destination: the file to write.
        keep_shapes: keep the annotations of intermediate values; some readers take a symbol in
            them for a contradiction of the numbers they were given for the inputs.

    Errors:
        RuntimeError: one file would be over the 2 GiB that protobuf can hold.
    """
    import onnx_ir as ir

    model = ir.load(source)
    size = sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None
    )
    if size >= 2**31 - 2**20:
        raise RuntimeError(f"{source.name} holds {size / 2**30:.1f} GiB; one file can hold 2 GiB")
    proto = ir.to_proto(model)
    embed_external(model, proto)
    if not keep_shapes:
        proto.graph.ClearField("value_info")
    destination.write_bytes(proto.SerializeToString())
    return destination


NOT_COMPUTE = frozenset(
    {
        *("Constant", "ConstantOfShape", "Identity", "Shape", "Size"),
        *("Reshape", "Squeeze", "Unsqueeze", "Flatten"),
        *("MemcpyToHost", "MemcpyFromHost"),
    }
)
"""Ops that move or describe tensors without reading a number: no evidence about a device."""


def float_nodes(path: Path) -> int:
    """How many nodes of a file compute in floating point, as far as its types can be inferred."""
    return sum(computes for _, computes in nodes_of(path))


def nodes_of(path: Path) -> list[tuple[str, bool]]:
    """Name, and whether it computes in floating point, of each node, as far as types are known."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    if path.stat().st_size < 2**30:
        model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    known = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    floats = {0, 1, 10, 11, 16}  # undefined counts: contrib ops have no inference, and are floats
    return [
        (
            node.name,
            node.op_type not in NOT_COMPUTE
            and any(known.get(name, 0) in floats for name in node.output if name),
        )
        for node in graph.node
    ]


def graph_names(source: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a file's inputs (weights left out) and outputs, in graph order."""
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    weights = {initializer.name for initializer in graph.initializer}
    return (
        tuple(value.name for value in graph.input if value.name not in weights),
        tuple(value.name for value in graph.output),
    )
