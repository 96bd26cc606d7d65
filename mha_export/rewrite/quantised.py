"""Weights of linear layers in 4 or 8 bits, by ONNX Runtime's own quantiser; attention stays exact.

    w[i, j]  ~  scale[i // 32, j] * (q[i, j] - zero[i // 32, j])

``MatMulNBits`` (com.microsoft) keeps the numbers packed inside one op; ``int4-qdq`` says the same
with ai.onnx alone, DequantizeLinear in blocks before a MatMul, which needs opset 21. Every MatMul
by a constant matrix is such a layer: the projections, and the feed-forward layers beside them.
Products of two activations, so those of attention, have no weight and are not touched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.rewrite.opset import with_opset

BLOCK = 32
"""Rows of a weight that share a scale and a zero point."""

QDQ_OPSET = 21
"""The first in which DequantizeLinear takes blocks, and numbers of 4 bits."""


@dataclass(frozen=True, kw_only=True)
class WeightKind:
    """How weights are kept: ``bits`` each, inside the op or dequantised before it."""

    bits: int
    qdq: bool


WEIGHT_KINDS = {
    "int8": WeightKind(bits=8, qdq=False),
    "int4": WeightKind(bits=4, qdq=False),
    "int4-qdq": WeightKind(bits=4, qdq=True),
}
"""What the quantiser of ONNX Runtime 1.32 can write."""


def with_quantised_weights(model: ir.Model, name: str) -> ir.Model:
    """A copy of ``model`` whose linear layers have weights of the kind ``name``.

    Errors:
        InputError: an unknown kind, no ONNX Runtime here, or no MatMul by a constant matrix.
    """
    kind = WEIGHT_KINDS.get(name)
    if kind is None:
        raise InputError(f"weights is {name!r}; expected one of {', '.join(WEIGHT_KINDS)}")
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
        from onnxruntime.quantization.quant_utils import QuantFormat
    except ImportError as error:
        raise InputError(
            f"weights of kind {name} are made by ONNX Runtime's quantiser: {error}",
            fix="pip install 'mha-export[cpu]' onnx",
        ) from error
    if kind.qdq and int(model.graph.opset_imports.get("", 1)) < QDQ_OPSET:
        model = with_opset(model, QDQ_OPSET)
    before = _count(model, "MatMul")
    quantiser = MatMulNBitsQuantizer(
        ir.to_proto(model),
        bits=kind.bits,
        block_size=BLOCK,
        quant_format=QuantFormat.QDQ if kind.qdq else QuantFormat.QOperator,
    )
    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.ERROR)  # a line a node
    quantiser.process()
    made: ir.Model = ir.from_proto(_each_once(quantiser.model.model))
    done = _count(made, "DequantizeLinear") if kind.qdq else before - _count(made, "MatMul")
    if not done:
        raise InputError(
            "the model has no MatMul by a constant matrix: there is no weight to quantise",
            fix="leave --weights out",
        )
    return made


def _each_once(proto: Any) -> Any:
    """A weight that two layers share was quantised twice, to the same values of the same names."""
    graph = proto.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = {tuple(node.output): node for node in graph.node}
    for field, kept in ((graph.initializer, tensors), (graph.node, nodes)):
        if len(kept) < len(field):
            each = list(kept.values())
            del field[:]
            field.extend(each)
    return proto


def _count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)
