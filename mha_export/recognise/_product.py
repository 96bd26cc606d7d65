"""Products of two tensors (MatMul, FusedMatMul, Einsum) stated alike: which axis meets which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise._axes import Axis, View, axis_size
from mha_export.recognise._contraction_laws import einsum_terms
from mha_export.recognise._movement import Views


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One operand: which output axis each axis becomes; -1 - k for the k-th contracted pair."""

    value: ir.Value
    view: View
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """``out = factor * sum over contracted axes of left * right``.

    Attributes:
        out: the value, with sizes ``dims``.
        contracted: how many axis pairs are summed over.
        factor: a constant the op itself multiplies by (FusedMatMul's alpha).
    """

    node: ir.Node
    out: ir.Value
    dims: tuple[int, ...]
    left: Side
    right: Side
    contracted: int
    factor: float = 1.0

    def swapped(self) -> Product:
        return Product(
            node=self.node,
            out=self.out,
            dims=self.dims,
            left=self.right,
            right=self.left,
            contracted=self.contracted,
            factor=self.factor,
        )

    def across(self, side: Side) -> View | None:
        """The operand as a view over the output's axes, stride 0 along those it lacks."""
        axes: list[Axis] = []
        for place, size in enumerate(self.dims):
            axis = side.view.axes[side.places.index(place)] if place in side.places else ()
            if axis_size(axis) != size:
                if axis_size(axis) != 1:
                    return None
                axis = ((size, 0),) if size > 1 else ()
            axes.append(axis)
        return View(side.view.source, side.view.offset, tuple(axes))

    def summed(self, side: Side) -> tuple[Axis, ...]:
        """The operand's contracted axes, in the order of the pairs."""
        return tuple(
            side.view.axes[side.places.index(-1 - pair)] for pair in range(self.contracted)
        )

    def own(self, side: Side) -> list[int]:
        """Output axes that only this operand has (a unit axis that broadcasts is not had)."""
        other = self.right if side is self.left else self.left
        return [
            place
            for place in range(len(self.dims))
            if self._has(side, place) and not self._has(other, place)
        ]

    def _has(self, side: Side, place: int) -> bool:
        if place not in side.places:
            return False
        return self.dims[place] == 1 or axis_size(side.view.axes[side.places.index(place)]) > 1


def product_of(value: ir.Value, views: Views) -> Product | None:
    """The product that makes ``value``, or None where it is made otherwise."""
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "MatMul" and node.domain in ("", "ai.onnx"):
        return _matmul(node, views, transposed=(False, False), factor=1.0)
    if node.op_type in ("FusedMatMul", "TransposeMatMul") and node.domain == "com.microsoft":
        if node.attributes.get_int("transBatchA", 0) or node.attributes.get_int("transBatchB", 0):
            return None
        swaps = (
            bool(node.attributes.get_int("transA", 0)),
            bool(node.attributes.get_int("transB", 0)),
        )
        return _matmul(
            node, views, transposed=swaps, factor=node.attributes.get_float("alpha", 1.0)
        )
    if node.op_type == "Einsum" and len(node.inputs) == 2:
        return _einsum(node, views)
    return None


def _side(value: ir.Value | None, views: Views, places: Sequence[int]) -> Side | None:
    view = None if value is None else views.of(value)
    if value is None or view is None or len(view.axes) != len(places):
        return None
    return Side(value=value, view=view, places=tuple(places))


def _matmul(
    node: ir.Node, views: Views, *, transposed: tuple[bool, bool], factor: float
) -> Product | None:
    out = node.outputs[0]
    dims = views.shapes.dims(out)
    shapes = [None if value is None else views.shapes.dims(value) for value in node.inputs[:2]]
    if dims is None or any(shape is None or len(shape) < 2 for shape in shapes):
        return None
    rank = len(dims)
    ends = [[rank - 2, -1], [-1, rank - 1]]
    sides = []
    for value, shape, swap, end in zip(node.inputs, shapes, transposed, ends, strict=False):
        lead = len(shape or ()) - 2
        tail = end[::-1] if swap else end
        sides.append(_side(value, views, [*range(rank - 2 - lead, rank - 2), *tail]))
    if sides[0] is None or sides[1] is None:
        return None
    return Product(
        node=node, out=out, dims=dims, left=sides[0], right=sides[1], contracted=1, factor=factor
    )


def _einsum(node: ir.Node, views: Views) -> Product | None:
    out = node.outputs[0]
    dims = views.shapes.dims(out)
    shapes = [None if value is None else views.shapes.dims(value) for value in node.inputs]
    ranks = [len(shape) for shape in shapes if shape is not None]
    if dims is None or len(ranks) != 2:
        return None
    terms = einsum_terms(node.attributes["equation"].as_string(), ranks)
    if terms is None or any(len(set(term)) != len(term) for term in (*terms[0], terms[1])):
        return None
    (left, right), result = terms
    pairs = [label for label in left if label not in result]
    if sorted(pairs) != sorted(label for label in right if label not in result):
        return None
    place = {label: index for index, label in enumerate(result)}
    place.update({label: -1 - index for index, label in enumerate(pairs)})
    sides = [
        _side(value, views, [place[label] for label in term])
        for value, term in zip(node.inputs, (left, right), strict=True)
    ]
    if sides[0] is None or sides[1] is None:
        return None
    return Product(
        node=node, out=out, dims=dims, left=sides[0], right=sides[1], contracted=len(pairs)
    )
