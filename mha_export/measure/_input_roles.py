"""What each input of a model is, read off the graph: its dtype, its axes, and what it may hold."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.spec import Dim

Role = Literal[
    "ids", "positions", "mask", "bias", "past", "lengths", "prefix", "float", "bool", "integer"
]

_CARRIES = frozenset(
    (
        "Identity",
        "Cast",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Flatten",
        "Transpose",
        "Expand",
        "Slice",
    )
)
"""Ops after which a number is still the same number."""


@dataclass(frozen=True, kw_only=True)
class InputRole:
    """One graph input.

    Attributes:
        shape: sizes, and names of symbols; an axis without a name is called ``<input>.<axis>``.
        limit: integers are below this (rows of the smallest table they index); None: unknown.
    """

    name: str
    role: Role
    dtype: np.dtype
    shape: tuple[Dim, ...]
    limit: int | None = None


def input_roles(model: ir.Model) -> tuple[InputRole, ...]:
    """Every input without a default, in graph order.

    Errors:
        InputError: an input has no stated type or rank.
    """
    defaults = model.graph.initializers
    return tuple(_role(value) for value in model.graph.inputs if value.name not in defaults)


def _role(value: ir.Value) -> InputRole:
    name = value.name or ""
    if value.dtype is None or value.shape is None:
        raise InputError(
            f"input '{name}' states no {'type' if value.dtype is None else 'shape'}",
            fix="give real inputs with --inputs FILE.npz",
        )
    dtype = np.dtype(value.dtype.numpy())
    limit = _limit(value)
    return InputRole(
        name=name,
        role=_kind(name, dtype, len(value.shape), limit),
        dtype=dtype,
        shape=tuple(_axis(name, axis, dim) for axis, dim in enumerate(value.shape)),
        limit=limit,
    )


def _axis(name: str, axis: int, dim: int | ir.SymbolicDim) -> Dim:
    if isinstance(dim, int):
        return dim
    return str(dim.value) if dim.value else f"{name}.{axis}"


def _kind(name: str, dtype: np.dtype, rank: int, limit: int | None) -> Role:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if any("mask" in word for word in words) or words & {"padding", "keep"}:
        return "mask"
    if dtype.kind == "b":
        return "bool"
    if dtype.kind not in "iu":
        if "bias" in words and rank >= 2:
            return "bias"
        return "past" if words & {"past", "cache", "key", "value"} and rank >= 3 else "float"
    if any(word.startswith("position") for word in words):
        return "positions"
    if any("len" in word for word in words) and rank <= 1:
        return "prefix" if "prefix" in words else "lengths"
    return "ids" if limit is not None else "integer"


def _limit(value: ir.Value) -> int | None:
    """Rows of the smallest table that the numbers of ``value`` select from, offsets taken off."""
    found: list[int] = []
    seen: set[tuple[ir.Value, int]] = set()
    queue: deque[tuple[ir.Value, int]] = deque([(value, 0)])
    while queue:
        here, offset = queue.popleft()
        if (here, offset) in seen:
            continue
        seen.add((here, offset))
        for node, index in here.uses():
            if node.op_type in ("Gather", "GatherElements") and index == 1:
                found += _rows(node, offset)
            elif node.op_type in _CARRIES and index == 0 and node.domain == "":
                queue.append((node.outputs[0], offset))
            elif node.op_type == "Add" and node.domain == "":
                added = _constant(node.inputs[1 - index])
                if added is not None:
                    queue.append((node.outputs[0], offset + added))
    return min(found, default=None)


def _rows(node: ir.Node, offset: int) -> Iterable[int]:
    table = node.inputs[0]
    axis = node.attributes.get_int("axis", 0)
    if table is None or table.shape is None or table.dtype is None:
        return
    rows = table.shape[axis]
    if isinstance(rows, int) and table.dtype.is_floating_point():
        yield rows - offset


def _constant(value: ir.Value | None) -> int | None:
    if value is None:
        return None
    tensor = value.const_value
    if tensor is None:
        node = value.producer()
        attribute = None if node is None else node.attributes.get("value")
        if node is None or node.op_type != "Constant" or attribute is None:
            return None
        tensor = attribute.value
    array = tensor.numpy()
    return int(array.item()) if array.size == 1 and array.dtype.kind in "iu" else None
