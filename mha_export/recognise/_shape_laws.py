"""One law per op: the concrete shapes of its outputs from those of its inputs.

A law sees numbers, never symbols: the graph is looked at with a size chosen for every symbolic
dimension (:mod:`._shapes`). A dimension that depends on data is None, a shape of unknown rank is
None. A law that finds two sizes that cannot broadcast reports the pair: a size was chosen badly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int | None, ...]


@dataclass
class Facts:
    """What a law may look at: one node's attributes and its inputs' shapes and small contents."""

    shapes: Sequence[Shape | None]
    contents: Sequence[np.ndarray | None]
    attributes: dict[str, Any]
    outputs: int
    conflicts: list[tuple[int, int]]

    def content(self, index: int) -> list[int] | None:
        """Input ``index`` as a list of ints, or None where it is omitted or unknown."""
        array = self.contents[index] if index < len(self.contents) else None
        return None if array is None else [int(n) for n in np.ravel(array)]

    def given(self, index: int) -> bool:
        """Whether input ``index`` is there at all."""
        return index < len(self.shapes) and (
            self.shapes[index] is not None or self.contents[index] is not None
        )

    def steering(self, index: int, attribute: str) -> list[int] | None:
        """A list given as an input (newer opsets) or an attribute (older ones)."""
        if index < len(self.contents):
            found = self.content(index)
            if found is not None:
                return found
        value = self.attributes.get(attribute)
        return None if value is None else [int(n) for n in value]


Law = Callable[[Facts], Sequence[Shape | None]]


def broadcast(shapes: Sequence[Shape | None], conflicts: list[tuple[int, int]]) -> Shape | None:
    """The common shape; None in a place where only unknown dimensions meet."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes):
        return None
    if len(known) == 1 or (len(known) == 2 and known[0] == known[1]):
        return known[0]
    rank = max(map(len, known))
    result: list[int | None] = []
    for axis in range(-rank, 0):
        size: int | None = 1
        for shape in known:
            dim = shape[axis] if -axis <= len(shape) else 1
            if dim == 1 or dim == size:
                continue
            if size == 1 or size is None:
                size = dim if dim is not None or size == 1 else size
            elif dim is not None:
                conflicts.append((size, dim))
        result.append(size)
    return tuple(result)


def _elementwise(facts: Facts) -> Sequence[Shape | None]:
    return (broadcast(facts.shapes, facts.conflicts),)


def _same(facts: Facts) -> Sequence[Shape | None]:
    return (facts.shapes[0],) * max(1, facts.outputs)


def _of_content(facts: Facts) -> Sequence[Shape | None]:
    target = facts.content(0)
    return (None if target is None else tuple(target),)


def _range(facts: Facts) -> Sequence[Shape | None]:
    known = [content for content in facts.contents if content is not None]
    if len(known) != 3:
        return ((None,),)
    start, limit, delta = (np.ravel(content)[0] for content in known)
    return ((max(0, int(np.ceil((limit - start) / delta))),),)


def _reduce(facts: Facts) -> Sequence[Shape | None]:
    source, axes = facts.shapes[0], facts.steering(1, "axes")
    if source is None:
        return (None,)
    if axes is None and facts.given(1):
        return (None,)
    if not axes:
        if facts.attributes.get("noop_with_empty_axes", 0):
            return (source,)
        axes = list(range(len(source)))
    places = {axis % len(source) for axis in axes}
    if facts.attributes.get("keepdims", 1):
        return (tuple(1 if axis in places else dim for axis, dim in enumerate(source)),)
    return (tuple(dim for axis, dim in enumerate(source) if axis not in places),)


def _argument(facts: Facts) -> Sequence[Shape | None]:
    source = facts.shapes[0]
    if source is None:
        return (None,)
    place = facts.attributes.get("axis", 0) % len(source)
    lead, rest = source[:place], source[place + 1 :]
    return ((*lead, 1, *rest) if facts.attributes.get("keepdims", 1) else lead + rest,)


def _top_k(facts: Facts) -> Sequence[Shape | None]:
    source, count = facts.shapes[0], facts.content(1) if len(facts.shapes) > 1 else None
    if source is None:
        return (None, None)
    place = facts.attributes.get("axis", -1) % len(source)
    size = count[0] if count else facts.attributes.get("k")
    shape = (*source[:place], size, *source[place + 1 :])
    return (shape, shape)


def _one_hot(facts: Facts) -> Sequence[Shape | None]:
    source, depth = facts.shapes[0], facts.content(1)
    if source is None:
        return (None,)
    place = facts.attributes.get("axis", -1)
    place = place + len(source) + 1 if place < 0 else place
    return ((*source[:place], None if depth is None else depth[0], *source[place:]),)


_BROADCASTING = [
    "Add",
    "And",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Mean",
    "Min",
    "Mod",
    "Mul",
    "Or",
    "PRelu",
    "Pow",
    "Sub",
    "Sum",
    "Where",
    "Xor",
    "BiasGelu",
]
_SAME = [
    "Abs",
    "Acos",
    "Asin",
    "Atan",
    "BatchNormalization",
    "BitwiseNot",
    "Cast",
    "CastLike",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Cosh",
    "CumSum",
    "DequantizeLinear",
    "Elu",
    "Erf",
    "Exp",
    "FastGelu",
    "Floor",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "Hardmax",
    "Identity",
    "InstanceNormalization",
    "IsInf",
    "IsNaN",
    "LayerNormalization",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "LpNormalization",
    "LRN",
    "Mish",
    "Neg",
    "Not",
    "QuantizeLinear",
    "QuickGelu",
    "RMSNormalization",
    "Reciprocal",
    "Relu",
    "RotaryEmbedding",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Scatter",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "SimplifiedLayerNormalization",
    "Softmax",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tan",
    "Tanh",
    "TensorScatter",
    "ThresholdedRelu",
    "Trilu",
]
_REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]

LAWS: dict[str, Law] = {
    **dict.fromkeys(_BROADCASTING, _elementwise),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "ArgMax": _argument,
    "ArgMin": _argument,
    "ConstantOfShape": _of_content,
    "Dropout": _same,
    "OneHot": _one_hot,
    "Range": _range,
    "TopK": _top_k,
}
