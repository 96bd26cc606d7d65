"""Values that the number of all tokens decides: they change for every token as more are read.

Positions do not: token 5 is token 5 in a text of any length. A factor ``log(T)``, rotary angles
stretched by ``T``, distances from the end do; what a cache holds was computed with another T. The
proof's texts are short and ``max(1, T / 4096)`` is 1 in them, so it is told by the graph: a value
that follows from sizes alone is followed from the shapes it is read off.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from mha_export.caches._look import Look
from mha_export.caches._refusal import Refused
from mha_export.recognise import Site
from mha_export.recognise._evaluate_contents import STEERING, attributes_of

_PICKED = {"Gather": (1,), "GatherND": (1,), "Slice": (1, 2, 3, 4)}
_UNREAD = {**STEERING, "Range": (1,), "Slice": (2,)}
"""Inputs that say how much of something there is, and not what."""

_AFFINE = frozenset(
    {
        "Add", "Cast", "Concat", "Gather", "Identity", "Neg", "Reshape", "Shape", "Slice",
        "Squeeze", "Sub", "Unsqueeze",
    }
)  # fmt: skip
"""Ops whose result is the same at every length if it is at two."""


class Counts:
    """Follows the number of tokens through what depends on no input."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._affine: dict[ir.Value, bool] = {}
        self._counted: dict[ir.Value, bool] = {}

    def check(self, nodes: Iterable[ir.Node], sites: Iterable[Site]) -> None:
        """Raise Refused where a token's values are computed with the number of all of them.

        Args:
            nodes: what a step computes outside the attentions.
            sites: the attentions.
        """
        for node in nodes:
            if not any(self._look.context.sources(value) for value in node.outputs):
                continue
            skipped = {*STEERING.get(node.op_type, ()), *_PICKED.get(node.op_type, ())}
            for place, value in enumerate(node.inputs):
                if place not in skipped and value is not None and self.decide(value):
                    raise _refused(value, node)
        for site in sites:
            for name, value in site.operands.values():
                if name in ("bias", "keep", "rotary.cos", "rotary.sin") and self.decide(value):
                    raise _refused(value, site.anchor)

    def decide(self, value: ir.Value) -> bool:
        """Whether an element of ``value`` is another one where there are more tokens."""
        if self._look.context.sources(value):
            return False
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._counted:
                stack.pop()
                continue
            missing = [v for v in _read(current) if v not in self._counted]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self._counted[current] = self._made(current)
        return self._counted[value]

    def _made(self, value: ir.Value) -> bool:
        node = value.producer()
        read = _read(value)
        if node is None or value.const_value is not None or node.op_type == "Constant":
            self._affine[value] = True
            return False
        op = node.op_type
        self._affine[value] = op in _AFFINE and all(self._affine[v] for v in read)
        if op == "Size" or self._affine[value]:
            found = self._look.arrays(value)
            if found is None or found[0].shape == found[1].shape:
                return found is None or not np.array_equal(*found)
        inside = any(self._counted[v] for v in read)
        return inside or self._is_from_end(node) or self._is_over_all(node)

    def _is_from_end(self, node: ir.Node) -> bool:
        """Whether a Slice counts tokens from the last one."""
        if node.op_type != "Slice" or not self._grows(node.inputs[0]):
            return False
        starts = self._look.arrays(node.inputs[1]) if node.inputs[1] is not None else None
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        stepped = None if steps is None else self._look.arrays(steps)
        return (starts is not None and bool((starts[0] < 0).any())) or (
            stepped is not None and bool((stepped[0] < 0).any())
        )

    def _is_over_all(self, node: ir.Node) -> bool:
        """Whether the op puts all tokens together: their number, their last one."""
        if node.op_type == "CumSum":
            return bool(attributes_of(node).get("reverse", 0)) and self._grows(node.inputs[0])
        if not node.op_type.startswith(("Reduce", "Arg", "MatMul")):
            return False
        before = [axis for v in node.inputs if v is not None for axis in self._look.growing(v)]
        return len(before) > len(self._look.growing(node.outputs[0]))

    def _grows(self, value: ir.Value | None) -> bool:
        return value is not None and bool(self._look.growing(value))


def _read(value: ir.Value) -> list[ir.Value]:
    """Inputs whose content is in the content of ``value``."""
    node = value.producer()
    if node is None or value.const_value is not None or node.op_type in ("Shape", "Size"):
        return []
    skipped = _UNREAD.get(node.op_type, ())
    return [v for place, v in enumerate(node.inputs) if place not in skipped and v is not None]


def _refused(value: ir.Value, node: ir.Node) -> Refused:
    return Refused(
        "length-as-number",
        f"{value.name!r} is computed from the number of all tokens: for the tokens in the cache it "
        "would change with every new one",
        value=value,
        nodes=[node],
    )
