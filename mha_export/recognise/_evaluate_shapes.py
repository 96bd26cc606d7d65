"""Shapes of the outputs of heavy nodes from the shapes of their inputs.

Structural ops are not listed: running them on zeros gives their shape
(:mod:`mha_export.recognise._evaluate_contents`). Anything else falls back to the shape inference
of onnx for that one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]
ShapeRule = Callable[[Shapes, Mapping[str, Any]], Shape | None]

SAME_AS_FIRST = frozenset(
    {
        "BatchNormalization", "BiasGelu", "BitShift", "Celu", "DequantizeLinear", "Dropout", "Elu",
        "Erf", "FastGelu", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax",
        "InstanceNormalization", "LayerNormalization", "LeakyRelu", "LogSoftmax",
        "LpNormalization", "Mish", "PRelu", "QuantizeLinear", "QuickGelu", "RMSNormalization",
        "Relu", "RotaryEmbedding", "ScatterElements", "ScatterND", "Selu", "Sigmoid",
        "SimplifiedLayerNormalization", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "Softmax", "Softplus", "Softsign", "Swish",
        "TensorScatter", "ThresholdedRelu", "Acos", "Asin", "Atan", "Cosh", "Sinh", "Tan",
        "CastLike",
    }
)  # fmt: skip


def _matmul(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    left, right = shapes[0], shapes[1]
    if left is None or right is None or not left or not right:
        return None
    if len(left) > 1 and attributes.get("transA"):
        left = (*left[:-2], left[-1], left[-2])
    if len(right) > 1 and attributes.get("transB"):
        right = (*right[:-2], right[-1], right[-2])
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    return (*np.broadcast_shapes(left[:-2], right[:-2]), *rows, *columns)


def _matmul_nbits(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    """By a weight of K rows and N columns, which is packed."""
    left = shapes[0]
    return None if not left else (*left[:-1], attributes["N"])


def _gemm(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    left, right = shapes[0], shapes[1]
    if left is None or right is None:
        return None
    rows = left[1] if attributes.get("transA") else left[0]
    columns = right[0] if attributes.get("transB") else right[1]
    return (rows, columns)


def _attention(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    if "num_heads" in attributes:  # com.microsoft: hidden states and the weights of all three
        hidden, weights = shapes[0], shapes[1]
        if hidden is None or weights is None:
            return None
        sizes = attributes.get("qkv_hidden_sizes")
        return (*hidden[:2], sizes[2] if sizes else weights[1] // 3)
    query, value = shapes[0], shapes[2]
    if query is None or value is None:
        return None
    if len(query) == 4:
        return (*query[:3], value[3])
    heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    if heads is None or kv_heads is None:
        return None
    return (*query[:2], heads * (value[2] // kv_heads))


def _first_three_d(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    """com.microsoft attention: [b, s, hidden] like the query, or of the value's width."""
    query = shapes[0]
    if query is None or len(query) != 3:
        return None
    value = shapes[2] if len(shapes) > 2 else None
    if value is not None and len(value) == 3 and attributes.get("kv_num_heads") is None:
        return (*query[:2], value[2])
    return query


def _group_query_attention(shapes: Shapes, attributes: Mapping[str, Any]) -> Shape | None:
    """[b, s, h * d], the query packed with key and value or not."""
    query = shapes[0]
    if query is None or len(query) != 3:
        return None
    if len(shapes) > 1 and shapes[1] is not None:
        return query
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    return (*query[:2], query[2] // (heads + 2 * kv_heads) * heads)


RULES: dict[str, ShapeRule] = {
    "Attention": _attention,
    "FusedMatMul": _matmul,
    "Gemm": _gemm,
    "GroupQueryAttention": _group_query_attention,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MatMulNBits": _matmul_nbits,
    "MultiHeadAttention": _first_three_d,
}


def infer(
    node: ir.Node, shapes: Shapes, contents: Sequence[np.ndarray | None], opset: int
) -> list[Shape | None]:
    """Shapes of all outputs of one ``ai.onnx`` node by onnx's own inference; None where unknown."""
    import onnx
    from onnx import defs, numpy_helper, shape_inference

    unknown: list[Shape | None] = [None] * len(node.outputs)
    if node.domain not in ("", "ai.onnx") or any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attribute in node.attributes.values()
    ):
        return unknown
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value, shape, content in zip(node.inputs, shapes, contents, strict=True):
        if value is None or value.name is None:
            continue
        if shape is None:
            return unknown
        proto = onnx.TypeProto()
        dtype = value.dtype if value.dtype is not None else ir.DataType.FLOAT
        if content is not None:
            dtype = ir.DataType.from_numpy(content.dtype)
        proto.tensor_type.elem_type = int(dtype)
        proto.tensor_type.shape.SetInParent()
        for size in shape:
            proto.tensor_type.shape.dim.add().dim_value = size
        types[value.name] = proto
        if content is not None and content.size <= 64:
            data[value.name] = numpy_helper.from_array(content, value.name)
    try:
        schema = defs.get_schema(node.op_type, opset, "")
        inferred = shape_inference.infer_node_outputs(
            schema,
            ir.to_proto(node),
            types,
            data,
            opset_imports=[onnx.OperatorSetIdProto(domain="", version=opset)],
        )
    except (
        RuntimeError, ValueError, KeyError, TypeError, defs.SchemaError,
        shape_inference.InferenceError, onnx.checker.ValidationError,
    ):  # fmt: skip
        return unknown
    result: list[Shape | None] = []
    for output in node.outputs:
        found = inferred.get(output.name or "")
        if found is None or not all(
            dim.HasField("dim_value") for dim in found.tensor_type.shape.dim
        ):
            result.append(None)
        else:
            result.append(tuple(dim.dim_value for dim in found.tensor_type.shape.dim))
    return result
