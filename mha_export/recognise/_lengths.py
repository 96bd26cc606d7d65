"""Which contents follow from lengths: what they are at small sizes, they need not be at large ones.

A window of 64 hides nothing from 7 tokens, ``max(1, log(n) / log(128))`` is 1 for all of 5. So a
content is taken for a number only where no length takes part in it. Lengths are told by comparing
the passes: an extent that differs between two choices of sizes follows from them, one that is the
same (a head's width, read off a tensor's shape) does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise._evaluate_contents import RULES, attributes_of
from mha_export.recognise._shapes import Shapes

Flags = NDArray[np.bool_]

_PICKED = {"Gather": (1,), "Slice": (1, 2, 3, 4)}
"""Ops that pick elements of their first input, and the inputs that say which."""

_MOVED = {
    "Expand": (1,),
    "Reshape": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Unsqueeze": (1,),
    **_PICKED,
}
"""Ops that move or repeat elements of their first input, and the inputs that say where to."""

_ALONE = frozenset({"Cast", "Concat", "Flatten", "Identity", "Transpose"})
"""Ops of which every input holds elements that are only moved."""

_MEASURING = frozenset({"CumSum", "MatMul"})
"""Besides reductions, ops whose result shows how long an axis of an input is."""


class Lengths:
    """Follows lengths through the small contents of one graph.

    Args:
        passes: the graph at one or two choices of sizes.
    """

    def __init__(self, passes: Sequence[Shapes]) -> None:
        self._first, self._last = passes[0], passes[-1]
        self._flags: dict[ir.Value, Flags] = {}

    def decide(self, value: ir.Value) -> bool:
        """Whether an element of the content of ``value`` follows from a length."""
        if self._first is self._last:
            return False
        return bool(self._of(value).any())

    def _of(self, value: ir.Value) -> Flags:
        """Elements of the content that follow from a length, in its shape."""
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._flags:
                stack.pop()
                continue
            node = current.producer()
            missing = [v for v in _contents_read(node) if v not in self._flags]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self._flags[current] = self._made(current, node)
        return self._flags[value]

    def _made(self, value: ir.Value, node: ir.Node | None) -> Flags:
        content = self._first.content(value)
        if content is None or node is None or value.const_value is not None:
            return np.zeros((), np.bool_)
        if node.op_type in ("Shape", "Size"):
            other = self._last.content(value)
            same = other is not None and other.shape == content.shape
            return np.asarray(content != other) if same else np.ones(content.shape, np.bool_)
        if node.op_type == "ConstantOfShape":
            return np.zeros(content.shape, np.bool_)
        flags = [None if v is None else self._whole(v) for v in node.inputs]
        moved = self._moved(node, flags)
        if moved is not None and moved.shape == content.shape:
            return moved
        follows = any(bool(self._flags[v].any()) for v in _contents_read(node))
        return np.full(content.shape, follows or self._measures(node), np.bool_)

    def _whole(self, value: ir.Value) -> Flags:
        content, flags = self._first.content(value), self._flags[value]
        return flags if content is None else np.broadcast_to(flags, content.shape)

    def _moved(self, node: ir.Node, flags: Sequence[Flags | None]) -> Flags | None:
        """Flags moved as the elements are; None where the op makes elements of its own."""
        op = node.op_type
        if op not in _MOVED and op not in _ALONE:
            return None
        inputs: list[NDArray[np.generic] | None] = list(flags)
        for place in _MOVED.get(op, ()):
            if place < len(inputs) and (steering := node.inputs[place]) is not None:
                inputs[place] = self._first.content(steering)
                picking = flags[place]
                if op in _PICKED and picking is not None and picking.any():
                    return self._picked(node)
        attributes = attributes_of(node)
        if op == "Cast":
            return flags[0]
        try:
            (result,) = RULES[op](inputs, attributes)
        except Exception:  # a rule that does not fit says nothing of single elements
            return None
        return np.asarray(result, np.bool_)

    def _picked(self, node: ir.Node) -> Flags | None:
        """A length says which elements: all the same where there is nothing to choose from."""
        data, value = node.inputs[0], node.outputs[0]
        assert data is not None
        given, content = self._first.content(data), self._first.content(value)
        if given is None or content is None:
            return None
        even = given.size > 0 and bool(np.all(given == given.reshape(-1)[0]))
        return np.full(content.shape, not even or bool(self._flags[data].any()), np.bool_)

    def _measures(self, node: ir.Node) -> bool:
        """Whether the op sums along an axis whose extent is a length."""
        if not node.op_type.startswith("Reduce") and node.op_type not in _MEASURING:
            return False
        data = node.inputs[0]
        if data is None:
            return False
        first, last = self._first.dims(data), self._last.dims(data)
        return first is None or last is None or math.prod(first) != math.prod(last)


def _contents_read(node: ir.Node | None) -> list[ir.Value]:
    """Values whose contents make those of the node's outputs."""
    if node is None or node.op_type in ("Shape", "Size", "ConstantOfShape"):
        return []
    branches = [
        value
        for attribute in node.attributes.values()
        if attribute.type is ir.AttributeType.GRAPH
        for value in attribute.as_graph().outputs
    ]
    return [value for value in (*node.inputs, *branches) if value is not None]
