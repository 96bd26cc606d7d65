"""One node of the walk: what its inputs hold, and what a rule may ask and note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from mha_export.caches._edits import Edit, Rows, TakeRows
from mha_export.caches._look import Look
from mha_export.caches._refusal import Refused
from mha_export.recognise._evaluate_contents import attributes_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A node some of whose inputs hold the new tokens alone (``states``, None: all of them)."""

    node: ir.Node
    states: tuple[Rows | None, ...]
    look: Look
    edits: list[Edit]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, node: ir.Node, states: Mapping[ir.Value, Rows], look: Look, edits: list[Edit]
    ) -> Step:
        found = tuple(None if value is None else states.get(value) for value in node.inputs)
        return cls(node=node, states=found, look=look, edits=edits, attributes=attributes_of(node))

    def value(self, index: int) -> ir.Value:
        value = self.node.inputs[index]
        assert value is not None, f"{self.node.op_type} {self.node.name} has no input {index}"
        return value

    def has(self, index: int) -> bool:
        return len(self.node.inputs) > index and self.node.inputs[index] is not None

    def rank(self, index: int) -> int:
        return self.look.rank(self.value(index))

    def shape(self, index: int) -> tuple[int, ...]:
        return self.look.shapes(self.value(index))[0]

    def only_first(self) -> Rows:
        """The state of input 0, no other input holding new tokens alone."""
        if any(state is not None for state in self.states[1:]) or self.states[0] is None:
            self.mixed("reads new tokens as something other than its data")
        assert self.states[0] is not None
        return self.states[0]

    def axis(self, name: str, default: int, rank: int) -> int:
        return int(self.attributes.get(name, default)) % rank

    def numbers(self, index: int) -> np.ndarray | None:
        """A constant input's numbers: the same at both lengths."""
        if not self.has(index):
            return None
        found = self.look.arrays(self.value(index))
        if found is None or not np.array_equal(found[0], found[1]):
            return None
        return found[0]

    def take_rows(self, index: int, axis: int) -> None:
        """Cut input ``index``, which speaks of all tokens along ``axis``, to the new ones."""
        self.edits.append(TakeRows(node=self.node, index=index, axis=axis))

    def mixed(self, what: str) -> NoReturn:
        """Refuse: a token's result depends on other tokens."""
        name = self.node.name or self.node.op_type
        raise Refused(
            "token-mixing",
            f"{self.node.op_type} {name!r} {what}: a step that sees the new tokens alone can't "
            "compute it",
            value=self.node.outputs[0],
            nodes=[self.node],
        )


def aligned(step: Step, indices: range | list[int], *, trailing: int = 0) -> Rows:
    """The state of a broadcast of ``indices``, whose last ``trailing`` axes do not broadcast.

    Inputs that hold all tokens along the axis of the new ones are noted to be cut. The axis is
    counted in the broadcast result.
    """
    here = [i for i in indices if step.has(i)]
    rank = max(step.rank(i) for i in here)
    found: Rows | None = None
    for i in here:
        state = step.states[i]
        if state is None:
            continue
        moved = Rows(axis=state.axis + rank - step.rank(i), inner=state.inner)
        if found is not None and moved != found:
            step.mixed("meets tokens of one axis with tokens of another")
        found = moved
    assert found is not None, "no input holds new tokens"
    if found.axis >= rank - trailing:
        step.mixed("meets tokens along an axis that does not broadcast")
    for i in here:
        if step.states[i] is not None:
            continue
        own = found.axis - (rank - step.rank(i))
        if own < 0 or step.shape(i)[own] == 1:
            continue
        if own not in step.look.growing(step.value(i)):
            step.mixed("meets each token with a fixed number of others")
        if found.inner != 1 or step.shape(i)[own] != step.look.lengths[0]:
            step.mixed("meets all tokens with the new ones along a merged axis")
        step.take_rows(i, own)
    return found
