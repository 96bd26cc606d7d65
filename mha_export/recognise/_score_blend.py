"""Scores multiplied by flags, with a number added where a flag is zero: ``x m + (1 - m) fill``.

It is ``Where(m, x, fill)`` written in numbers (old GPT-2, many TensorFlow models). Told by looking:
``m`` and what is added are evaluated together on flags of every kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from mha_export.recognise._axes import composed
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import State, Term

_LOOKS = 4


def blended(state: State, node: ir.Node, scene: Scene) -> State | None:
    """The state above the product by flags, its addition turned into a step that hides.

    None where the product is no such one, or the last addition does not go with it.
    """
    if node.op_type != "Mul" or not state.terms or state.softcap is not None:
        return None
    added = state.terms[-1]
    if added.kind != "additive" or added.level is not state.value:
        return None
    for inner, flags in (node.inputs, node.inputs[::-1]):
        if inner is None or flags is None or scene.dims(inner) != scene.dims(state.value):
            continue
        fill = _fill_of(flags, added, scene)
        dims = scene.dims(state.value)
        if fill is None or dims is None:
            continue
        (keep,) = scene.context.derive("Cast", [flags], {"to": int(ir.DataType.BOOL)}, before=node)
        keep.type = ir.TensorType(ir.DataType.BOOL)
        maker = keep.producer()
        assert maker is not None
        scene.shapes.learn(maker)
        spread = scene.spread(keep, dims)
        view = None if spread is None else composed(state.outer, spread)
        if view is None:
            return None
        made = Term(
            value=keep,
            kind="keep",
            view=view,
            level=inner,
            level_view=state.outer,
            node=node,
            fill=fill,
        )
        terms = (*state.terms[:-1], made)
        return dataclasses.replace(state, terms=terms).at(inner, state.outer, node)
    return None


def _fill_of(flags: ir.Value, added: Term, scene: Scene) -> float | None:
    """The number added where a flag is zero, nothing elsewhere; None where it differs."""
    fills: set[float] = set()
    for seed in range(_LOOKS):
        contents = _contents((flags, added.value), scene, seed)
        if contents is None:
            return None
        view = scene.context.sized(scene.shapes.sizes, contents)
        kept, number = view.array(flags), view.array(added.value)
        if kept is None or number is None or kept.dtype.kind not in "fV":
            return None
        kept, number = np.broadcast_arrays(kept, number * added.factor)
        if not np.all((kept == 0) | (kept == 1)) or np.any(number[kept == 1] != 0):
            return None
        fills |= {float(n) for n in np.unique(number[kept == 0])}
    return fills.pop() if len(fills) == 1 else None


def _contents(
    values: tuple[ir.Value, ir.Value], scene: Scene, seed: int
) -> Mapping[ir.Value, np.ndarray] | None:
    """Flags for everything the two are computed from."""
    random = np.random.default_rng(seed)
    found: dict[ir.Value, np.ndarray] = {}
    sources = frozenset[ir.Value]().union(*(scene.context.sources(value) for value in values))
    for value in sorted(sources, key=lambda v: v.name or ""):
        dims, kind = scene.dims(value), scene.dtype(value)
        if dims is None or kind is None or not value.is_graph_input():
            return None
        found[value] = (random.random(dims) < 0.5).astype(kind.numpy())
    return found
