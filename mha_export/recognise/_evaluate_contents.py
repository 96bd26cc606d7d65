"""One numpy rule per op, for the small integer, boolean and mask arithmetic of a graph.

A rule takes the input arrays (None: omitted) and a node's attributes, and returns its outputs.
Floating point follows numpy in the dtype of the arrays: a caller that wants no rounding feeds
float64 and asks for wide casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray
Inputs = Sequence[Any]
Attributes = Mapping[str, Any]
Rule = Callable[[Inputs, Attributes], Sequence[Array]]


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Attributes as plain values; references inside function bodies are left out."""
    return {
        name: attribute.value
        for name, attribute in node.attributes.items()
        if not attribute.is_ref()
    }


def _pure(function: Callable[..., Any]) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
        return (np.asarray(function(*inputs)),)

    return rule


def _fold(function: Callable[[Array, Array], Array]) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
        result = inputs[0]
        for other in inputs[1:]:
            result = function(result, other)
        return (np.asarray(result),)

    return rule


def _axes(inputs: Inputs, attributes: Attributes, position: int = 1) -> tuple[int, ...] | None:
    """Axes given as an input (newer opsets) or an attribute (older ones)."""
    if len(inputs) > position and inputs[position] is not None:
        return tuple(int(axis) for axis in np.ravel(inputs[position]))
    axes = attributes.get("axes")
    return None if axes is None else tuple(axes)


def _cast(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (inputs[0].astype(ir.DataType(attributes["to"]).numpy()),)


def _divide(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    left, right = inputs
    if left.dtype.kind in "iu":  # ONNX integer division truncates towards zero
        quotient = np.abs(left) // np.abs(right) if left.dtype.kind == "i" else left // right
        if left.dtype.kind == "i":
            quotient = quotient * np.sign(left) * np.sign(right)
        return (quotient.astype(left.dtype),)
    return (left / right,)


def _modulo(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return ((np.fmod if attributes.get("fmod") else np.mod)(*inputs),)


def _power(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.power(inputs[0], inputs[1]).astype(inputs[0].dtype),)


def _constant_of_shape(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    value = attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else value.numpy()
    return (np.full(tuple(int(n) for n in inputs[0]), fill.reshape(-1)[0], fill.dtype),)


def _range(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    start, limit, delta = (np.ravel(x)[0] for x in inputs)
    return (np.arange(start, limit, delta, dtype=inputs[0].dtype),)


def _gather(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.take(inputs[0], inputs[1], axis=attributes.get("axis", 0)),)


def _gather_elements(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.take_along_axis(inputs[0], inputs[1], axis=attributes.get("axis", 0)),)


def _gather_nd(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data, indices = inputs
    if attributes.get("batch_dims", 0):
        raise NotImplementedError("GatherND with batch_dims")
    return (data[tuple(np.moveaxis(indices, -1, 0))],)


def _scatter_nd(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data, indices, updates = inputs
    if attributes.get("reduction", "none") != "none":
        raise NotImplementedError("ScatterND with a reduction")
    # looked at without rounding, a buffer of constants is as wide as what is written into it
    result = data.astype(np.result_type(data, updates))
    result[tuple(np.moveaxis(indices, -1, 0))] = updates
    return (result,)


def _concat(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.concatenate(inputs, axis=attributes["axis"]),)


def _unsqueeze(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.expand_dims(inputs[0], _axes(inputs, attributes) or ()),)


def _squeeze(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.squeeze(inputs[0], _axes(inputs, attributes)),)


def _reshape(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data, target = inputs
    shape = [int(n) for n in target]
    if not attributes.get("allowzero", 0):
        shape = [data.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return (data.reshape(shape),)


def _flatten(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    axis = attributes.get("axis", 1) % (inputs[0].ndim + 1)
    lead = int(np.prod(inputs[0].shape[:axis], dtype=np.int64))
    return (inputs[0].reshape(lead, -1),)


def _transpose(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.transpose(inputs[0], attributes.get("perm")),)


def _slice(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data = inputs[0]
    given = [None if x is None else [int(n) for n in np.ravel(x)] for x in inputs[1:]]
    given += [None] * (4 - len(given))
    starts = given[0] if given[0] is not None else list(attributes["starts"])
    ends = given[1] if given[1] is not None else list(attributes["ends"])
    axes = given[2] if given[2] is not None else attributes.get("axes", range(len(starts)))
    steps = given[3] if given[3] is not None else [1] * len(starts)
    index: list[slice] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = data.shape[axis]
        # numpy reads a negative end of a backward slice as "from the end"; ONNX clamps it first
        stop = None if step < 0 and end < -size else end
        index[axis] = slice(start, stop, step)
    return (data[tuple(index)],)


def _split(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data, axis = inputs[0], attributes.get("axis", 0)
    sizes = inputs[1] if len(inputs) > 1 and inputs[1] is not None else attributes.get("split")
    if sizes is None:
        parts = attributes["num_outputs"]
        chunk = -(-data.shape[axis] // parts)
        cuts = [chunk * i for i in range(1, parts)]
    else:
        cuts = [int(n) for n in np.cumsum(sizes)[:-1]]
    return np.split(data, cuts, axis=axis)


def _expand(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    target = tuple(int(n) for n in inputs[1])
    return (np.broadcast_to(inputs[0], np.broadcast_shapes(inputs[0].shape, target)),)


def _tile(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.tile(inputs[0], [int(n) for n in inputs[1]]),)


def _pad(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    if attributes.get("mode", "constant") != "constant":
        raise NotImplementedError("Pad other than constant")
    data = inputs[0]
    pads = [int(n) for n in (inputs[1] if len(inputs) > 1 else attributes["pads"])]
    fill = inputs[2] if len(inputs) > 2 and inputs[2] is not None else attributes.get("value", 0)
    axes = _axes(inputs, {}, 3) or range(data.ndim)
    widths = [(0, 0)] * data.ndim
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (before, after)
    return (np.pad(data, widths, constant_values=np.ravel(fill)[0]),)


def _trilu(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    k = int(np.ravel(inputs[1])[0]) if len(inputs) > 1 and inputs[1] is not None else 0
    return ((np.triu if attributes.get("upper", 1) else np.tril)(inputs[0], k),)


def _eye_like(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    dtype = ir.DataType(attributes["dtype"]).numpy() if "dtype" in attributes else inputs[0].dtype
    rows, columns = inputs[0].shape
    return (np.eye(rows, columns, attributes.get("k", 0)).astype(dtype),)


def _clip(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    low = inputs[1] if len(inputs) > 1 else attributes.get("min")
    high = inputs[2] if len(inputs) > 2 else attributes.get("max")
    result = inputs[0] if low is None else np.maximum(inputs[0], low)
    result = result if high is None else np.minimum(result, high)
    return (result.astype(inputs[0].dtype),)


def _cumulative_sum(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    if attributes.get("exclusive") or attributes.get("reverse"):
        raise NotImplementedError("CumSum exclusive or reverse")
    axis = int(np.ravel(inputs[1])[0])
    return (np.cumsum(inputs[0], axis=axis, dtype=inputs[0].dtype),)


def _reduce(function: Callable[..., Array]) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
        axes = _axes(inputs, attributes)
        if not axes:
            if attributes.get("noop_with_empty_axes", 0):
                return (inputs[0],)
            axes = tuple(range(inputs[0].ndim))
        kept = bool(attributes.get("keepdims", 1))
        return (np.asarray(function(inputs[0], axis=axes, keepdims=kept)),)

    return rule


def _norm2(data: Array, *, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.asarray(np.sqrt(np.sum(np.square(data), axis=axis, keepdims=keepdims)))


def _norm1(data: Array, *, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.asarray(np.sum(np.abs(data), axis=axis, keepdims=keepdims))


def _sum_square(data: Array, *, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.asarray(np.sum(np.square(data), axis=axis, keepdims=keepdims))


def _argument(function: Callable[..., Array]) -> Rule:
    def rule(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
        axis = attributes.get("axis", 0)
        result = np.asarray(function(inputs[0], axis=axis)).astype(np.int64)
        return (np.expand_dims(result, axis) if attributes.get("keepdims", 1) else result,)

    return rule


def _lp_normalization(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    axis, p = attributes.get("axis", -1), attributes.get("p", 2)
    return (inputs[0] / np.linalg.norm(inputs[0], ord=p, axis=axis, keepdims=True),)


def _rms_normalization(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data = inputs[0]
    axes = tuple(range(attributes.get("axis", -1) % data.ndim, data.ndim))
    mean = np.mean(np.square(data), axis=axes, keepdims=True)
    return (data / np.sqrt(mean + attributes.get("epsilon", 1e-5)) * inputs[1],)


def _layer_normalization(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    data = inputs[0]
    axes = tuple(range(attributes.get("axis", -1) % data.ndim, data.ndim))
    centred = data - np.mean(data, axis=axes, keepdims=True)
    variance = np.mean(np.square(centred), axis=axes, keepdims=True)
    result = centred / np.sqrt(variance + attributes.get("epsilon", 1e-5)) * inputs[1]
    return (result if len(inputs) < 3 or inputs[2] is None else result + inputs[2],)


def _rotary_embedding(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    """``ai.onnx`` RotaryEmbedding over [b, h, s, d] with tables [b, s, r/2]."""
    data, cos, sin = inputs[:3]
    if len(inputs) > 3 or data.ndim != 4:
        raise NotImplementedError("RotaryEmbedding with position ids or three axes")
    cos, sin = cos[:, None], sin[:, None]
    width = attributes.get("rotary_embedding_dim", 0) or data.shape[-1]
    part, rest = data[..., :width], data[..., width:]
    if attributes.get("interleaved", 0):
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part[..., : width // 2], part[..., width // 2 :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if attributes.get("interleaved", 0):
        done = np.stack(turned, axis=-1).reshape(part.shape)
    else:
        done = np.concatenate(turned, axis=-1)
    return (np.concatenate((done, rest), axis=-1),)


def _einsum(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    return (np.einsum(attributes["equation"], *inputs),)


def _gemm(inputs: Inputs, attributes: Attributes) -> Sequence[Array]:
    a, b, c = (*inputs, None)[:3]
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    product = attributes.get("alpha", 1.0) * (a @ b)
    return (product if c is None else product + attributes.get("beta", 1.0) * c,)


_PLAIN: dict[str, Callable[..., Any]] = {
    "Abs": np.abs, "Add": np.add, "And": np.logical_and, "BitwiseAnd": np.bitwise_and,
    "BitwiseNot": np.bitwise_not, "BitwiseOr": np.bitwise_or, "Ceil": np.ceil,
    "Cos": np.cos, "Equal": np.equal, "Exp": np.exp, "Floor": np.floor,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Identity": np.asarray,
    "IsInf": np.isinf, "IsNaN": np.isnan, "Less": np.less, "LessOrEqual": np.less_equal,
    "Log": np.log, "Mul": np.multiply, "Neg": np.negative, "Not": np.logical_not,
    "Or": np.logical_or, "Reciprocal": np.reciprocal, "Round": np.rint, "Sign": np.sign,
    "Sin": np.sin, "Sqrt": np.sqrt, "Sub": np.subtract, "Tanh": np.tanh,
    "Where": np.where, "Xor": np.logical_xor,
}  # fmt: skip

ELEMENTWISE: dict[str, Rule] = {
    "Max": _fold(np.maximum),
    "Min": _fold(np.minimum),
    "Sum": _fold(np.add),
    **{
        op: _pure(f)
        for op, f in _PLAIN.items()
    },
    "Cast": _cast,
    "Clip": _clip,
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
}  # fmt: skip
"""Rules whose output shape is the broadcast of the inputs'."""

STRUCTURAL: dict[str, Rule] = {
    "ArgMax": _argument(np.argmax),
    "ArgMin": _argument(np.argmin),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumulative_sum,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Range": _range,
    "ReduceL1": _reduce(_norm1),
    "ReduceL2": _reduce(_norm2),
    "ReduceMax": _reduce(np.max),
    "ReduceMean": _reduce(np.mean),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceSumSquare": _reduce(_sum_square),
    "Reshape": _reshape,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
"""Rules that may also be run on zeros to learn the output's shape."""

ARITHMETIC: dict[str, Rule] = {
    "Einsum": _einsum,
    "Gemm": _gemm,
    "LayerNormalization": _layer_normalization,
    "LpNormalization": _lp_normalization,
    "MatMul": _pure(np.matmul),
    "RMSNormalization": _rms_normalization,
    "RotaryEmbedding": _rotary_embedding,
    "SimplifiedLayerNormalization": _rms_normalization,
}

CONTRIBUTED = frozenset({"SimplifiedLayerNormalization"})
"""Ops outside the default domain that the rules hold for."""

RULES: dict[str, Rule] = {**ELEMENTWISE, **STRUCTURAL, **ARITHMETIC}

STEERING: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "Expand": (1,), "Pad": (1, 3), "Range": (0, 1, 2), "ReduceL1": (1,),
    "ReduceL2": (1,), "ReduceMax": (1,), "ReduceMean": (1,), "ReduceMin": (1,), "ReduceProd": (1,),
    "ReduceSum": (1,), "ReduceSumSquare": (1,), "Reshape": (1,), "Slice": (1, 2, 3, 4),
    "Split": (1,), "Squeeze": (1,), "Tile": (1,), "Trilu": (1,), "Unsqueeze": (1,), "CumSum": (1,),
}  # fmt: skip
"""Inputs whose content, not only shape, decides the shape of the output."""
