"""That a model with other heads computes what it must: run side by side on the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.heads._layers import HeadModel
from mha_export.heads.gates import GatedModel, Head
from mha_export.operands import Heads, Layout

TOLERANCE = 1e-5
"""Largest difference allowed, relative to the largest output (absolutely below one)."""

Arrays = Mapping[str, np.ndarray]


def runnable(model: ir.Model, cases: Iterable[Arrays], evaluator: Evaluator) -> list[Arrays]:
    """The cases the model itself runs on: tracing may have baked its own sizes in."""
    found = []
    for case in cases:
        try:
            evaluator.run(model, case)
        except MhaExportError:
            continue
        found.append(case)
    return found


def cache_inputs(
    heads: HeadModel, origins: Mapping[int, Sequence[int]], arrays: Arrays
) -> dict[str, np.ndarray]:
    """Inputs of the changed model: its caches hold the old heads ``origins`` says, by layer."""
    found = dict(arrays)
    for layer in heads.layers:
        if layer.site is None or layer.number not in origins:
            continue
        operands = layer.site.operands
        for part in (operands.past_key, operands.past_value):
            name = None if part is None else str(part.value.name)
            if part is not None and name in found:
                found[name] = _heads_of(found[name], part, origins[layer.number])
    return found


def _heads_of(array: np.ndarray, part: Heads, origin: Sequence[int]) -> np.ndarray:
    if part.layout is Layout.BHSD:
        return np.ascontiguousarray(array[:, list(origin)])
    if part.layout is Layout.BSHD:
        return np.ascontiguousarray(array[:, :, list(origin)])
    split = array.reshape(*array.shape[:2], part.heads, part.dim)[:, :, list(origin)]
    return np.ascontiguousarray(split).reshape(*array.shape[:2], -1)


def difference_from_gated(
    heads: HeadModel,
    gated: GatedModel,
    removed: Iterable[Head],
    changed: ir.Model,
    origins: Mapping[int, Sequence[int]],
    cases: Sequence[Arrays],
    evaluator: Evaluator,
) -> float:
    """Largest difference of a pruned model's outputs from the gated model's, as ``TOLERANCE`` is
    meant. Caches are compared on the heads that are left.
    """
    gates = gated.gates(tuple(removed))
    return _difference(heads, gated.model, gates, changed, origins, cases, evaluator)


def difference_from_original(
    heads: HeadModel,
    changed: ir.Model,
    origins: Mapping[int, Sequence[int]],
    cases: Sequence[Arrays],
    evaluator: Evaluator,
) -> float:
    """Likewise, from the model itself: for a regrouping that repeats heads."""
    return _difference(heads, heads.model, {}, changed, origins, cases, evaluator)


def _difference(
    heads: HeadModel,
    before: ir.Model,
    gates: Arrays,
    after: ir.Model,
    origins: Mapping[int, Sequence[int]],
    cases: Sequence[Arrays],
    evaluator: Evaluator,
) -> float:
    presents = {
        str(part.value.name): (part, layer.number)
        for layer in heads.layers
        if layer.site is not None
        for part in (layer.site.present_key, layer.site.present_value)
        if part is not None
    }
    names = {value.name for value in after.graph.inputs}
    worst = 0.0
    for case in cases:
        expected = evaluator.run(before, {**case, **gates})
        changed = cache_inputs(heads, origins, case)
        actual = evaluator.run(after, {n: a for n, a in changed.items() if n in names})
        for name, array in actual.items():
            want = expected[name]
            if name in presents:
                part, number = presents[name]
                if number in origins:
                    want = _heads_of(want, part, origins[number])
            worst = max(worst, _apart(array, want))
    return worst


def _apart(actual: np.ndarray, wanted: np.ndarray) -> float:
    a, w = actual.astype(np.float64), wanted.astype(np.float64)
    if a.shape != w.shape or np.any(np.isnan(a) != np.isnan(w)):
        return float("inf")
    kept = ~np.isnan(w)
    if not kept.any():
        return 0.0
    same = a[kept] == w[kept]
    apart = np.where(same, 0.0, np.abs(a[kept] - w[kept]))
    finite = np.abs(w[kept][np.isfinite(w[kept])])
    return float(apart.max()) / max(1.0, float(finite.max(initial=0.0)))
