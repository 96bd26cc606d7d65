"""Quantised weights as the numbers they stand for, so that a quantised model has an exact answer.

    w[.., j] = scale[block of j] * (q[.., j] - zero[block of j])

The reference then computes in float64 what the quantised model states, and a runtime's kernel for
packed weights is judged like any other. Sources: com.microsoft MatMulNBits, ai.onnx
DequantizeLinear-21.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_PACKED = "MatMulNBits"
_ZEROS = "DequantizeLinear"


def with_plain_weights(model: ir.Model) -> ir.Model:
    """A copy whose constant quantised weights are floating point; ``model`` where there are none.

    A node that cannot be read so (an order of channels, weights that are computed) stays.
    """
    if not any(_weight(node) is not None for node in model.graph):
        return model
    copy = model.clone()
    for node in list(copy.graph):
        weight = _weight(node)
        if weight is None:
            continue
        value = ir.Value(
            name=f"{node.outputs[0].name}.weight",
            type=ir.TensorType(ir.DataType.from_numpy(weight.dtype)),
            shape=ir.Shape(weight.shape),
            const_value=ir.tensor(weight),
        )
        copy.graph.register_initializer(value)
        if node.op_type == _ZEROS:
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            copy.graph.remove(node, safe=True)
        else:
            _multiply(copy.graph, node, value)
    return copy


def _multiply(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    """A MatMulNBits as MatMul, and Add where it has a bias."""
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    made = [ir.node("MatMul", [node.inputs[0], weight], name=node.name)]
    if bias is not None:
        made.append(ir.node("Add", [made[0].outputs[0], bias]))
    graph.insert_before(node, made)
    old, new = node.outputs[0], made[-1].outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    made[0].outputs[0].type = old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _weight(node: ir.Node) -> np.ndarray | None:
    if node.op_type == _PACKED and node.domain == "com.microsoft":
        return _unpacked(node)
    if node.op_type == _ZEROS and node.domain == "":
        return _dequantised(node)
    return None


def _constants(node: ir.Node, first: int) -> list[np.ndarray | None] | None:
    """The inputs from ``first`` on as arrays; None where one is computed."""
    values = node.inputs[first:5]
    if any(value is not None and value.const_value is None for value in values):
        return None
    arrays = [None if v is None or v.const_value is None else v.const_value.numpy() for v in values]
    return [*arrays, *[None] * (4 - len(arrays))]


def _unpacked(node: ir.Node) -> np.ndarray | None:
    """[K, N] of a MatMulNBits: rows of N hold K numbers in blocks, the low bits first."""
    constants = _constants(node, 1)
    if constants is None:
        return None
    packed, scales, zeros, order = constants
    bits = node.attributes["bits"].as_int() if "bits" in node.attributes else 4
    n, k = node.attributes["N"].as_int(), node.attributes["K"].as_int()
    if packed is None or scales is None or order is not None or bits not in (4, 8):
        return None
    if zeros is not None and zeros.dtype != np.uint8:
        return None
    blocks = scales.size // n
    q = _numbers(packed.reshape(n, blocks, -1), bits)
    zero = np.full((n, blocks, 1), 1 << (bits - 1))
    if zeros is not None:
        zero = _numbers(zeros.reshape(n, -1), bits)[:, :blocks, None]
    weight = (q - zero).astype(scales.dtype) * scales.reshape(n, blocks, 1)
    return np.ascontiguousarray(weight.reshape(n, -1)[:, :k].T)


def _numbers(packed: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned numbers along the last axis, as int32."""
    if bits == 8:
        return packed.astype(np.int32)
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1).astype(np.int32)


def _dequantised(node: ir.Node) -> np.ndarray | None:
    constants = _constants(node, 0)
    if constants is None or constants[0] is None or constants[1] is None:
        return None
    q, scale, zero = constants[0].astype(np.int32), constants[1], constants[2]
    zero = np.zeros((), np.int32) if zero is None else zero.astype(np.int32)
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    steps = (q - _spread(zero, q, axis, block)).astype(scale.dtype)
    weight: np.ndarray = steps * _spread(scale, q, axis, block)
    return weight


def _spread(values: np.ndarray, q: np.ndarray, axis: int, block: int) -> np.ndarray:
    """One a tensor, one a channel of ``axis``, or one a block along it, as ``q`` reads them."""
    if block:
        return np.repeat(values, block, axis).take(range(q.shape[axis]), axis)
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    shape = [1] * q.ndim
    shape[axis] = values.size
    return values.reshape(shape)
