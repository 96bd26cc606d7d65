"""Shapes of the ops without a law here (Conv, Resize, ...), from ONNX's own inference per op.

Slower than a law by far, so only what a law does not know comes here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference
import onnx_ir as ir

from mha_export.recognise._shape_laws import Shape


def inferred(
    node: ir.Node,
    shapes: Sequence[Shape | None],
    contents: Sequence[np.ndarray | None],
) -> Sequence[Shape | None]:
    """Output shapes as the op's schema infers them; empty where it can't."""
    if node.domain not in ("", "ai.onnx"):
        return ()
    try:
        return _inferred(node, shapes, contents)
    except Exception:  # the schema's own complaint: the shape stays unknown
        return ()


def _inferred(
    node: ir.Node,
    shapes: Sequence[Shape | None],
    contents: Sequence[np.ndarray | None],
) -> Sequence[Shape | None]:
    version = node.version or node.graph.opset_imports.get("", 0) if node.graph else node.version
    schema = onnx.defs.get_schema(node.op_type, version or onnx.defs.onnx_opset_version(), "")
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    names = [f"i{index}" if value is not None else "" for index, value in enumerate(node.inputs)]
    for name, value, shape, content in zip(names, node.inputs, shapes, contents, strict=True):
        if value is None:
            continue
        kind = value.dtype
        if kind is None:
            kind = ir.DataType.FLOAT
            if content is not None:
                kind = ir.DataType.from_numpy(content.dtype)
        proto = onnx.TypeProto()
        proto.tensor_type.elem_type = int(kind)
        if shape is not None:
            proto.tensor_type.shape.SetInParent()
            for dim in shape:
                entry = proto.tensor_type.shape.dim.add()
                if dim is not None:
                    entry.dim_value = dim
        types[name] = proto
        if content is not None:
            data[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(content))
    outputs = [f"o{index}" for index in range(len(node.outputs))]
    proto_node = onnx.NodeProto(op_type=node.op_type, input=names, output=outputs)
    for attribute in node.attributes.values():
        proto_node.attribute.append(ir.serde.serialize_attribute(attribute))
    result = onnx.shape_inference.infer_node_outputs(
        schema, proto_node, types, data, opset_imports=[onnx.OperatorSetIdProto(version=version)]
    )
    return [_dims(result.get(name)) for name in outputs]


def _dims(proto: onnx.TypeProto | None) -> Shape | None:
    if proto is None or not proto.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else None for dim in proto.tensor_type.shape.dim
    )
