"""What an exporter is told of a module, and the tidying of the graph it returns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

Axes = Mapping[int, str]
"""Axis number to name."""

_STALE_METADATA = ("pkg.torch.export.", "pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")


@dataclass(frozen=True, kw_only=True)
class Traceable:
    """A module with everything an exporter has to be told.

    Attributes:
        module: called as ``module(*args)``; in evaluation mode.
        args: one example per input.
        input_names, output_names: of the graph, in order.
        input_axes: per input, its symbolic axes; None: every axis the exporter can leave open.
        output_axes: names for the symbolic axes of outputs, where known.
    """

    module: Any
    args: tuple[Any, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...] = ()
    input_axes: tuple[Axes | None, ...]
    output_axes: Mapping[str, Axes] = field(default_factory=dict)


def cleaned(model: ir.Model) -> ir.Model:
    """Weights as numpy (sharing torch's memory), and no local paths in the metadata."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for value in graph.initializers.values():
            value.const_value = _numpy_tensor(value.const_value)
            _drop_stale(value.metadata_props)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            _drop_stale(node.metadata_props)
            for value in node.outputs:
                _drop_stale(value.metadata_props)
        _drop_stale(graph.metadata_props)
    _drop_stale(model.metadata_props)
    return model


def _numpy_tensor(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    if tensor is None or isinstance(tensor, (ir.Tensor, ir.TensorProtoTensor, ir.StringTensor)):
        raw = getattr(tensor, "raw", None)
        if not type(raw).__module__.startswith("torch"):
            return tensor
    assert tensor is not None
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


def _drop_stale(metadata: dict[str, str]) -> None:
    for key in [key for key in metadata if key.startswith(_STALE_METADATA)]:
        del metadata[key]


def name_outputs(model: ir.Model, traceable: Traceable) -> None:
    """Where nobody named the outputs: ``output``, or ``output.0`` and so on."""
    outputs = model.graph.outputs
    if traceable.output_names or any(value.is_graph_input() for value in outputs):
        return
    taken = {value.name for value in _every_value(model.graph)} | set(model.graph.initializers)
    for index, value in enumerate(outputs):
        name = "output" if len(outputs) == 1 else f"output.{index}"
        if name not in taken:
            value.name = name


def name_axes(model: ir.Model, traceable: Traceable) -> None:
    """Give symbolic axes the names that were asked for: exporters invent ``s53`` at times."""
    renamed: dict[str, str] = {}
    stated = dict(zip(traceable.input_names, traceable.input_axes, strict=True))
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, ir.SymbolicDim) or dim.value is None:
                continue
            axes = stated.get(value.name or "")
            wanted = _guessed_axis(renamed, axis) if axes is None else axes.get(axis)
            if wanted is not None:
                renamed.setdefault(str(dim.value), wanted)
    for value in _every_value(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, renamed) for dim in value.shape])
    for value in model.graph.inputs:
        _state_axes(value, stated.get(value.name or "") or {})
    for value in model.graph.outputs:
        _state_axes(value, traceable.output_axes.get(value.name or "", {}))


def _guessed_axis(renamed: Mapping[str, str], axis: int) -> str | None:
    name = {0: "batch", 1: "seq"}.get(axis)
    return None if name in renamed.values() else name


def _every_value(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _renamed(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), str(dim.value))


def _state_axes(value: ir.Value, axes: Axes) -> None:
    """Write the stated names, on axes that did stay symbolic."""
    if value.shape is None:
        return
    value.shape = ir.Shape(
        [
            axes.get(axis, dim) if isinstance(dim, ir.SymbolicDim) else dim
            for axis, dim in enumerate(value.shape)
        ]
    )
