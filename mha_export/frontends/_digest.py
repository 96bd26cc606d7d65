"""A fingerprint of a model's content, blind to how it is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def model_digest(model: ir.Model) -> str:
    """SHA-256 over graph, functions, opsets and weights.

    Names of values count, since they are the model's interface and what tools refer to. Names of
    nodes, metadata, documentation, the producer, and whether a weight lies in the file or beside
    it do not. Weights are read once, straight from their memory or mapped file.
    """
    digest = hashlib.sha256()
    _text(digest, "opsets", sorted(model.opset_imports.items()))
    _graph(digest, model.graph)
    for identifier in sorted(model.functions):
        function = model.functions[identifier]
        _text(digest, "function", identifier, sorted(function.opset_imports.items()))
        _text(digest, "attributes", sorted(function.attributes))
        _graph(digest, function.graph)
    return digest.hexdigest()


def _text(digest: _Hash, *parts: object) -> None:
    digest.update(repr(parts).encode())


def _graph(digest: _Hash, graph: ir.Graph) -> None:
    _values(digest, "inputs", graph.inputs)
    _values(digest, "outputs", graph.outputs)
    for name in sorted(graph.initializers):
        _tensor(digest, name, graph.initializers[name].const_value)
    for node in graph:
        _text(
            digest,
            *(node.domain, node.op_type, node.overload),
            [None if value is None else value.name for value in node.inputs],
            [value.name for value in node.outputs],
        )
        for name in sorted(node.attributes):
            _attribute(digest, node.attributes[name])


def _values(digest: _Hash, what: str, values: Iterable[ir.Value]) -> None:
    for value in values:
        shape = None if value.shape is None else [_dim(dim) for dim in value.shape]
        _text(digest, what, value.name, str(value.type), shape)


def _dim(dim: object) -> object:
    return dim.value if isinstance(dim, ir.SymbolicDim) else dim


def _attribute(digest: _Hash, attribute: ir.Attr) -> None:
    if attribute.ref_attr_name is not None:
        _text(digest, attribute.name, "ref", attribute.ref_attr_name)
    elif attribute.type == ir.AttributeType.GRAPH:
        _text(digest, attribute.name, "graph")
        _graph(digest, attribute.as_graph())
    elif attribute.type == ir.AttributeType.GRAPHS:
        for graph in attribute.as_graphs():
            _text(digest, attribute.name, "graphs")
            _graph(digest, graph)
    elif attribute.type == ir.AttributeType.TENSOR:
        _tensor(digest, attribute.name, attribute.value)
    elif attribute.type == ir.AttributeType.TENSORS:
        for tensor in attribute.as_tensors():
            _tensor(digest, attribute.name, tensor)
    else:
        value = attribute.value
        plain = list(value) if isinstance(value, (list, tuple)) else value
        _text(digest, attribute.name, str(attribute.type), plain)


def _tensor(digest: _Hash, name: str, tensor: ir.TensorProtocol | None) -> None:
    if tensor is None:
        _text(digest, "no data", name)
        return
    _text(digest, name, str(tensor.dtype), tuple(tensor.shape))
    if tensor.dtype == ir.DataType.STRING:
        _text(digest, [bytes(item) for item in np.asarray(tensor.numpy()).reshape(-1)])
        return
    array = tensor.numpy()
    if tensor.dtype.bitwidth >= 8 and array.flags.c_contiguous and array.size:
        digest.update(array.reshape(-1).view(np.uint8).data)
    else:
        digest.update(tensor.tobytes())
