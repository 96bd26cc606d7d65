"""Where queries and keys come from: one sequence, or two (cross attention)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._other import is_stored
from mha_export.recognise._product import product_of
from mha_export.recognise._scene import Scene

_STEPS = 16
_LINEAR = frozenset({"Gemm", "Conv", "MatMulNBits", "QLinearMatMul", "MatMulInteger"})
_PASSED = frozenset(
    {"Add", "Sub", "Mul", "Div", "Cast", "DequantizeLinear", "QuantizeLinear",
     "DynamicQuantizeLinear"}
)  # fmt: skip


_TURNING = frozenset(
    {"Concat", "LayerNormalization", "Neg", "RMSNormalization", "RotaryEmbedding",
     "SimplifiedLayerNormalization"}
)  # fmt: skip
_MOST = 64
"""Values looked at on the way up to the projections."""
_WRITERS = {"Pad": 0, "ScatterND": 2, "ScatterElements": 2, "TensorScatter": 1}
"""Ops that put tokens into something longer, and which input the tokens are."""


class Origins:
    """Which graph inputs each value depends on; one pass over a graph, kept."""

    def __init__(self) -> None:
        self._inputs: dict[ir.Value, frozenset[ir.Value]] = {}

    def inputs(self, value: ir.Value) -> frozenset[ir.Value]:
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._inputs:
                stack.pop()
                continue
            node = current.producer()
            if node is None:
                own = frozenset() if current.const_value is not None else frozenset({current})
                self._inputs[current] = own
                continue
            before = [] if node.op_type == "Shape" else [v for v in node.inputs if v is not None]
            missing = [v for v in before if v not in self._inputs]
            if missing:
                stack.extend(missing)
                continue
            self._inputs[current] = frozenset().union(*(self._inputs[v] for v in before))
        return self._inputs[value]


def is_cross(
    query: Heads, key: Heads, *, cached: bool, scenes: Sequence[Scene], origins: Origins
) -> bool:
    """Whether the keys come from another sequence than the queries.

    The same projection input decides at once. Else lengths that differ at some size, and, where
    lengths are fixed or equal by chance, the graph inputs that each depends on.
    """
    if cached or projections(query.value, scenes[0]) & projections(key.value, scenes[0]):
        return False
    sources = [projected(heads.value, scenes[0]) for heads in (query, key)]
    if sources[0] is sources[1]:
        return False
    lengths = [
        tuple((scene.dims(heads.value) or (0,) * 4)[_length_axis(heads)] for scene in scenes)
        for heads in (query, key)
    ]
    if lengths[0] == lengths[1] and len(set(lengths[0])) > 1:
        return False
    if lengths[0] != lengths[1] and not _cut_from(sources[0], sources[1], scenes[0]):
        return True
    return origins.inputs(sources[0]) != origins.inputs(sources[1])


def _appended(node: ir.Node, scene: Scene) -> ir.Value | None:
    """The new tokens of a Concat whose other parts come from outside, or are no data at all."""
    inputs = [value for value in node.inputs if value is not None]
    outside = [
        value
        for value in inputs
        if (source := scene.views.source(value)).is_graph_input()
        or source.const_value is not None
        or not scene.context.sources(value)
    ]
    inside = [value for value in inputs if value not in outside]
    return inside[0] if len(inside) == 1 and outside else None


def _cut_from(query: ir.Value, key: ir.Value, scene: Scene) -> bool:
    """Whether the queries are some rows of what the keys were projected from."""
    return scene.views.source(query) is scene.views.source(key)


def _length_axis(heads: Heads) -> int:
    return 2 if heads.layout is Layout.BHSD else 1


def projections(value: ir.Value, scene: Scene) -> set[ir.Value]:
    """What everything in a query or key was projected from, rotations and caches passed."""
    found: set[ir.Value] = set()
    pending, seen = [value], set[ir.Value]()
    while pending and len(seen) < _MOST:
        current = scene.views.source(pending.pop())
        node = current.producer()
        if current in seen or node is None:
            continue
        seen.add(current)
        inputs = [v for v in node.inputs if v is not None]
        moving = [v for v in inputs if not is_stored(scene.views.source(v))]
        if product_of(current, scene.views) is not None or node.op_type in _LINEAR:
            if len(moving) == 1 or (moving and node.op_type in _LINEAR):
                found.add(scene.views.source(moving[0]))
        elif node.op_type in _PASSED or node.op_type in _WRITERS or node.op_type in _TURNING:
            pending.extend(moving)
    return found


def projected(value: ir.Value, scene: Scene) -> ir.Value:
    """What a query, key or value was projected from: above the first product with a weight."""
    for _ in range(_STEPS):
        value = scene.views.source(value)
        node = value.producer()
        if node is None:
            return value
        written = _WRITERS.get(node.op_type)
        update = None if written is None else node.inputs[written]
        if update is None and node.op_type == "Concat":
            update = _appended(node, scene)
        if update is not None:
            value = update
            continue
        inputs = [v for v in node.inputs if v is not None]
        moving = [v for v in inputs if not is_stored(scene.views.source(v))]
        product = product_of(value, scene.views)
        if product is not None or node.op_type in _LINEAR:
            if len(moving) == 1 or node.op_type in _LINEAR:
                return scene.views.source(moving[0] if moving else inputs[0])
            return value
        if node.op_type not in _PASSED or len(moving) != 1:
            return value
        value = moving[0]
    return value
