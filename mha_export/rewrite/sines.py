r"""Sines and cosines of single precision as sums and products, for targets whose own are coarse.

WGSL allows a sine to be off by :math:`2^{-11}` on :math:`[-\pi, \pi]` and says nothing beyond; a
rotary angle is as large as the position. With :math:`k = \lfloor 2x/\pi + 1/2 \rfloor` and
:math:`r = x - k\pi/2` (the constant in three parts of few bits, so that the products are exact;
Cody and Waite 1980) the sine of :math:`x` is :math:`\pm\sin r` or :math:`\pm\cos r` by
:math:`k \bmod 4`, and Taylor's polynomials of degree 9 and 8 are exact to float32 on
:math:`[-\pi/4, \pi/4]`. A cosine is the sine of one quarter more. Off by no more than 2e-7 up to
100 000 radians, beside the rounding of the angle itself.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from mha_export.rewrite._splice import Names

OPS = ("Sin", "Cos")
BITS = 8
"""Of each part of pi/2 but the last: 24 bits less those of the quarters up to 100 000 radians."""
SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(1, 5))
COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(1, 5))


def with_own_sines(model: ir.Model) -> tuple[ir.Model, int]:
    """A copy in which ``Sin`` and ``Cos`` of float32 are written out, and how many there were."""
    copy = model.clone()
    ShapeInferencePass()(copy)
    found = [
        node
        for node in copy.graph
        if node.op_type in OPS and not node.domain and node.outputs[0].dtype is ir.DataType.FLOAT
    ]
    if not found:
        return model, 0
    names = Names(copy)
    for node in found:
        _write_out(node, names.prefix(f"{node.name or node.op_type}.written"))
    return copy, len(found)


class _Writer:
    """Float32 arithmetic before a node, with scalars as initializers."""

    def __init__(self, before: ir.Node, prefix: str) -> None:
        self._before = before
        self._prefix = prefix
        self._count = 0

    def op(self, kind: str, *inputs: ir.Value | float) -> ir.Value:
        graph = self._before.graph
        assert isinstance(graph, ir.Graph)
        values = [value if isinstance(value, ir.Value) else self._scalar(value) for value in inputs]
        self._count += 1
        name = f"{self._prefix}.{kind}_{self._count}"
        node = ir.node(kind, values, name=name)
        node.outputs[0].name = name
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(self._before, node)
        return node.outputs[0]

    def _scalar(self, number: float) -> ir.Value:
        graph = self._before.graph
        assert isinstance(graph, ir.Graph)
        self._count += 1
        name = f"{self._prefix}.const_{self._count}"
        value = ir.val(name, const_value=ir.tensor(np.float32(number), name=name))
        graph.register_initializer(value)
        return value

    def polynomial(self, square: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
        """``c0 z + c1 z^2 + ...`` by Horner's rule."""
        total = self.op("Mul", square, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = self.op("Mul", square, self.op("Add", total, coefficient))
        return total

    def modulo(self, value: ir.Value, divisor: float) -> ir.Value:
        whole = self.op("Floor", self.op("Mul", value, 1.0 / divisor))
        return self.op("Sub", value, self.op("Mul", whole, divisor))


def _write_out(node: ir.Node, prefix: str) -> None:
    angle = node.inputs[0]
    assert angle is not None
    write = _Writer(node, prefix)
    quarters = write.op("Floor", write.op("Add", write.op("Mul", angle, 2.0 / math.pi), 0.5))
    rest = angle
    for part in parts_of_half_pi():
        rest = write.op("Sub", rest, write.op("Mul", quarters, part))
    square = write.op("Mul", rest, rest)
    sine = write.op("Add", rest, write.op("Mul", rest, write.polynomial(square, SINE)))
    cosine = write.op("Add", write.polynomial(square, COSINE), 1.0)
    if node.op_type == "Cos":
        quarters = write.op("Add", quarters, 1.0)
    quadrant = write.modulo(quarters, 4.0)
    odd = write.modulo(quadrant, 2.0)
    even = write.op("Sub", 1.0, odd)
    size = write.op("Add", write.op("Mul", sine, even), write.op("Mul", cosine, odd))
    below = write.op("Sub", quadrant, odd)  # 0 or 2
    new = write.op("Mul", size, write.op("Sub", 1.0, below))
    old = node.outputs[0]
    new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if new.is_graph_output():
        new.name = old.name
    graph.remove(node, safe=True)


def parts_of_half_pi() -> tuple[float, float, float]:
    """``pi/2`` as a sum of float32 numbers, all but the last of :data:`BITS` bits."""
    parts, rest = [], math.pi / 2
    for _ in range(2):
        step = 2.0 ** (math.floor(math.log2(rest)) - BITS + 1)
        parts.append(math.floor(rest / step) * step)
        rest -= parts[-1]
    return parts[0], parts[1], float(np.float32(rest))
