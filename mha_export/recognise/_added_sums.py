"""Something added to the sum that exponentials are divided by: one more key, of no value.

``e / (c + sum(e))`` with ``e = exp(x)`` is what softmax gives ``x`` beside one more column
``log c``, which is cut off again: a sink. Where each row of ``x`` was shifted by a number ``m`` of
its own, the column is ``a`` for ``c = exp(a - m)`` and 0 for ``c = exp(-m)``. A number that is lost
in rounding beside a sum of at least one (``m`` is the row's maximum) is nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._adapt import Deriver, ints
from mha_export.recognise._movement import moved_inputs
from mha_export.recognise._scene import Scene

_LOST = 2.0**-25
"""Half of what tells one from the next number in fp32."""
_BETWEEN = frozenset({"Cast", "Expand", "Identity", "Pow", "Reciprocal"})
_FAR = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Addition:
    """What is added to a sum of exponentials; ``number`` where it is one number."""

    value: ir.Value
    number: float | None


def addition(total: ir.Value, sums: ir.Node, scene: Scene) -> Addition | None:
    """What is added between the contraction ``sums`` and the denominator ``total``, if anything."""
    value = total
    for _ in range(_FAR):
        node = value.producer()
        if node is None or node is sums:
            return None
        if node.op_type in ("Add", "Sum") and len(node.inputs) == 2:
            left, right = node.inputs
            for inner, other in ((left, right), (right, left)):
                if inner is not None and other is not None and _is_made_by(inner, sums):
                    return Addition(value=other, number=scene.uniform(other))
            return None
        if node.inputs[0] is None or not (node.op_type in _BETWEEN or _moves(value)):
            return None
        value = node.inputs[0]
    return None


def with_column(
    powers: ir.Value, axis: int, added: Addition, place: ir.Node, scenes: Sequence[Scene]
) -> ir.Value | None:
    """The normalised exponentials as a softmax over one more column; None where it is no sink."""
    derive = Deriver(scenes, place)
    exponent = _above(powers, "Exp")
    if exponent is None:
        return None
    logits, shift = _unshifted(exponent, axis, scenes[0])
    column: ir.Value | np.ndarray | None
    if added.number is not None:
        column = _of_number(added.number, shift)
    else:
        above = _above(added.value, "Exp")
        column = None if above is None else _of_exponent(above, shift)
    dims, kind = scenes[0].dims(logits), scenes[0].dtype(logits)
    if column is None or dims is None or kind is None:
        return None
    last = axis == len(dims) - 1
    if scenes[0].context.opset < 13 and not last:
        return None
    if isinstance(column, np.ndarray):
        column = column.astype(kind.numpy()).reshape([1] * len(dims))
    elif scenes[0].dtype(column) != kind:
        column = derive("Cast", [column], {"to": int(kind)})
        column.dtype = kind
    one = derive("Slice", [logits, ints(0), ints(1), ints(axis)])
    column = derive("Expand", [column, derive("Shape", [one])])
    wide = derive("Concat", [logits, column], {"axis": axis})
    made = derive("Softmax", [wide], {"axis": axis})
    kept = derive("Slice", [made, ints(0), ints(-1), ints(axis)])
    for value in (one, column, wide, made, kept):
        value.dtype = kind
    return kept


def is_lost(powers: ir.Value, axis: int, added: Addition, scene: Scene) -> bool:
    """Whether the sum is one or more, and what is added too small to change it."""
    if added.number is None or not 0.0 <= added.number <= _LOST:
        return False
    exponent = _above(powers, "Exp")
    if exponent is None:
        return False
    logits, shift = _unshifted(exponent, axis, scene)
    node = None if shift is None else shift.producer()
    return node is not None and node.op_type == "ReduceMax" and node.inputs[0] is logits


def _of_number(number: float, shift: ir.Value | None) -> np.ndarray | None:
    return np.array(math.log(number)) if number > 0.0 and shift is None else None


def _of_exponent(exponent: ir.Value, shift: ir.Value | None) -> ir.Value | np.ndarray | None:
    """The column whose exponential is added, the shift of the rows taken off."""
    if shift is None:
        return exponent
    node = exponent.producer()
    if node is None:
        return None
    if node.op_type == "Neg" and node.inputs[0] is shift:
        return np.zeros(())
    if node.op_type == "Sub" and node.inputs[1] is shift:
        return node.inputs[0]
    return None


def _unshifted(exponent: ir.Value, axis: int, scene: Scene) -> tuple[ir.Value, ir.Value | None]:
    """What is exponentiated without the number that was taken off each row, and that number."""
    node = exponent.producer()
    if node is None or node.op_type != "Sub" or node.inputs[0] is None or node.inputs[1] is None:
        return exponent, None
    shift, dims = scene.dims(node.inputs[1]), scene.dims(exponent)
    if shift is None or dims is None or len(shift) != len(dims) or shift[axis] != 1:
        return exponent, None
    return node.inputs[0], node.inputs[1]


def _above(value: ir.Value, op_type: str) -> ir.Value | None:
    """The input of the ``op_type`` that makes the value, casts taken off."""
    for _ in range(_FAR):
        node = value.producer()
        if node is None or node.inputs[0] is None:
            return None
        if node.op_type == op_type:
            return node.inputs[0]
        if node.op_type not in ("Cast", "Identity"):
            return None
        value = node.inputs[0]
    return None


def _is_made_by(value: ir.Value, sums: ir.Node) -> bool:
    """Whether the value is the contraction's own output, moved at most."""
    for _ in range(_FAR):
        node = value.producer()
        if node is sums:
            return True
        if node is None or not (_moves(value) or node.op_type in ("Cast", "Identity")):
            return False
        if node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False


def _moves(value: ir.Value) -> bool:
    return bool(moved_inputs(value))
