"""What stands between Q Kᵀ and softmax: terms, weightings, a sink, and how far a walk has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from mha_export.recognise._axes import View
from mha_export.recognise._product import Product
from mha_export.recognise._site import Reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Term:
    """One step between the capped scores and softmax.

    Attributes:
        value: the operand of the Add or Where, as it stands in the graph.
        kind: ``additive``: ``factor * value`` is added; ``keep``: the score becomes ``fill`` where
            False; ``hide``: where True; ``floor``: the score becomes ``fill`` where it is below.
        view: the operand over the axes of the scores space.
        level: the scores before this step, and the space's axes as a view of them.
    """

    value: ir.Value
    kind: Literal["additive", "keep", "hide", "floor"]
    view: View
    level: ir.Value
    level_view: View
    node: ir.Node
    factor: float = 1.0
    fill: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighting:
    """A factor on the scores that is not one number: a learned scale per head, a temperature.

    It does not vary over the keys, so it can stand on the queries as well. ``level`` and
    ``level_view`` are those of a :class:`Term`.
    """

    value: ir.Value
    view: View
    level: ir.Value
    level_view: View
    inverse: bool
    node: ir.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Sink:
    """A column joined to the scores before softmax and cut off after it."""

    value: ir.Value
    view: View
    first: bool
    node: ir.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """The scores at one value on the way from the product to softmax.

    Attributes:
        view: the space's axes as a view of the value.
        factor: what the value is still multiplied by below (up to the softcap, where it is above).
        capped_below: the softcap comes below. terms_below: how many terms do.
        shifted: a number for each row was taken off above, which softmax does not see.
    """

    view: View
    factor: float
    capped_below: bool
    terms_below: int
    shifted: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The normal form of what one softmax reads.

    ``space`` are the sizes of the scores as softmax sees them (without a sink column), ``axis`` the
    place of the keys among them. ``query`` and ``key`` are views over the space's axes followed by
    the contracted ones.
    """

    product: Product
    space: tuple[int, ...]
    axis: int
    query: View
    key: View
    scale: float
    softcap: float | None
    terms: tuple[Term, ...]
    weightings: tuple[Weighting, ...]
    sink: Sink | None
    steps: tuple[tuple[ir.Node, ir.Value], ...]
    summed: int
    start: ir.Value
    levels: Mapping[ir.Value, Level]
    """Every value from the product to the space."""

    @property
    def path(self) -> list[ir.Node]:
        """Every node from the product to the space."""
        found = [self.product.node]
        for value in self.levels:
            node = value.producer()
            if node is not None:
                found.append(node)
        return [*found, *(node for node, _ in self.steps)]


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    value: ir.Value
    outer: View
    space: tuple[int, ...]
    axis: int
    factor: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    weightings: tuple[Weighting, ...] = ()
    sink: Sink | None = None
    steps: tuple[tuple[ir.Node, ir.Value], ...] = ()
    start: ir.Value
    levels: tuple[tuple[ir.Value, Level], ...] = ()

    def at(self, value: ir.Value, outer: View, node: ir.Node, **changes: object) -> State:
        return dataclasses.replace(
            self,
            value=value,
            outer=outer,
            steps=(*self.steps, (node, value)),
            **changes,  # type: ignore[arg-type]
        ).noted()

    def shifted(self) -> State:
        """With every level so far below a shift of the rows."""
        levels = tuple((v, dataclasses.replace(level, shifted=True)) for v, level in self.levels)
        return dataclasses.replace(self, levels=levels)

    def noted(self) -> State:
        """With the level it stands at remembered."""
        level = Level(
            view=self.outer,
            factor=self.factor,
            capped_below=self.softcap is not None,
            terms_below=len(self.terms),
        )
        return dataclasses.replace(self, levels=(*self.levels, (self.value, level)))


def refused(state: State, code: str, message: str, *nodes: ir.Node) -> Reason:
    """Why the walk ends at the value it has come to."""
    node = state.value.producer()
    shown = nodes or (() if node is None else (node,))
    return Reason(
        code=code,
        message=message,
        value=state.value.name,
        nodes=tuple(n.name or n.op_type for n in shown),
    )
