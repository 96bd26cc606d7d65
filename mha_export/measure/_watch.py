"""The values of every attention of a model, computed by a copy: the model itself is left alone.

Extra outputs would break the fusion they are to look into, so they are added to a copy that runs on
a plain engine: onnx's reference in float64 where it can, else ONNX Runtime with optimisation off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise import Recognition, Site, Verdict


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One value of one site. ``stage`` is what it is the result of; ``heads`` how to read it."""

    site: str
    stage: str
    label: str
    value: str
    heads: Heads | None = None


def watched_values(recognition: Recognition) -> dict[str, tuple[Watched, ...]]:
    """By site id, what to look at, in the order of computation. Sites in subgraphs have none."""
    main = recognition.model.graph
    return {v.id: tuple(_of(v, main)) for v in recognition.verdicts}


def _of(verdict: Verdict, main: ir.Graph) -> Iterator[Watched]:
    if verdict.anchor.graph is not main:
        return
    if isinstance(verdict, Site):
        operands = verdict.operands
        for name in ("query", "key", "value"):
            heads: Heads = getattr(operands, name)
            yield Watched(
                site=verdict.id,
                stage="projection",
                label=name,
                value=heads.value.name or "",
                heads=heads,
            )
        rotary = operands.rotary
        if rotary is not None:
            yield Watched(site=verdict.id, stage="rotary", label="cos", value=rotary.cos.name or "")
            yield Watched(site=verdict.id, stage="rotary", label="sin", value=rotary.sin.name or "")
    scores = verdict.anchor.inputs[0] if verdict.anchor.op_type == "Softmax" else None
    if scores is not None:
        softmax, name = verdict.anchor, scores.name or ""
        yield Watched(site=verdict.id, stage="mask", label="masked scores", value=name)
        weights = softmax.outputs[0].name or ""
        yield Watched(site=verdict.id, stage="softmax", label="probabilities", value=weights)
    if isinstance(verdict, Site):
        output = verdict.output
        yield Watched(
            site=verdict.id,
            stage="output",
            label="output",
            value=output.value.name or "",
            heads=output,
        )


def with_watched(recognition: Recognition, watched: Mapping[str, tuple[Watched, ...]]) -> ir.Model:
    """A copy of the recognised model whose graph outputs are the watched values, after its own."""
    model = recognition.model.clone()
    present = {value.name for value in model.graph.outputs}
    wanted = {w.value for values in watched.values() for w in values} - present
    known = {v.name: v for node in model.graph for v in node.outputs if v.name in wanted}
    for name in sorted(known):
        model.graph.outputs.append(known[name])
    return model


def in_layout_of(array: np.ndarray, own: Heads | None, other: Heads | None) -> np.ndarray:
    """``array``, read as ``own``, in the axis order of ``other``."""
    if own is None or other is None or own.layout is other.layout:
        return array
    return _from_bhsd(_to_bhsd(array, own), other)


def _to_bhsd(array: np.ndarray, heads: Heads) -> np.ndarray:
    if heads.layout is Layout.BSM:
        array = array.reshape(*array.shape[:2], heads.heads, heads.dim)
    return array if heads.layout is Layout.BHSD else array.swapaxes(1, 2)


def _from_bhsd(array: np.ndarray, heads: Heads) -> np.ndarray:
    if heads.layout is Layout.BHSD:
        return array
    array = array.swapaxes(1, 2)
    return array if heads.layout is Layout.BSHD else array.reshape(*array.shape[:2], -1)
