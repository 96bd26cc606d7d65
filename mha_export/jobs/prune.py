"""A model without some of its heads: named ones, or those it misses least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.heads import Layer, head_model
from mha_export.heads import prune as without
from mha_export.heads.analysis import mean_contributions
from mha_export.heads.checking import difference_from_gated
from mha_export.heads.gates import Head, with_gates
from mha_export.heads.scoring import Scorer
from mha_export.heads.search import Order, Step, Unit, curve, greedy, one_shot
from mha_export.heads.surgery import Pruned, check_removal
from mha_export.jobs._head_surgery import check_cases, check_output, require_equal, written
from mha_export.jobs._head_timing import timed
from mha_export.jobs._head_work import HeadOptions, Opened, gated_of, open_heads, scorers
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult
from mha_export.jobs._settings import SourceSettings
from mha_export.jobs.heads import parse_head
from mha_export.recognise import recognise
from mha_export.report.records import CurvePointRecord, SurgeryLayerRecord

SHORTLIST = 12
"""Heads tried at each greedy step: the ones that cost least when last tried."""


@dataclass(frozen=True, kw_only=True)
class PruneGoal:
    """How much is to go; exactly one of the first four is stated.

    Attributes:
        heads: ``layer:head`` each. fraction: of all heads that can go. min_quality: as many as
            keep the quality at least this. max_latency_ms: as few as bring the median on cpu to
            this.
        order: ``greedy`` scores again after each head, ``one-shot`` scores once.
        unit: ``head``, or ``group``: all query heads of a key/value head; None: groups where
            keys are shared.
        compare: also follow the other order, for the curve.
        fold: the mean contribution of a layer that loses all heads goes into its bias.
        shortlist: heads tried at each greedy step; 0: all.
        time: also time the model as it was and as it is written, in turn, on cpu.
    """

    heads: tuple[str, ...] = ()
    fraction: float | None = None
    min_quality: float | None = None
    max_latency_ms: float | None = None
    order: Order = "greedy"
    unit: Literal["head", "group"] | None = None
    compare: bool = False
    fold: bool = True
    shortlist: int = SHORTLIST
    time: bool = False

    def __post_init__(self) -> None:
        stated = [
            bool(self.heads),
            self.fraction is not None,
            self.min_quality is not None,
            self.max_latency_ms is not None,
        ]
        if sum(stated) != 1:
            raise InputError(
                f"{sum(stated)} goals are stated; expected one",
                fix="give one of --heads, --fraction, --min-quality and --max-latency-ms",
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise InputError(f"--fraction is {self.fraction}; expected above 0, at most 1")


def prune_model(
    source: Any,
    *,
    goal: PruneGoal,
    options: HeadOptions,
    output: str | Path,
    settings: SourceSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Remove heads, prove the result equal to the model with those gates at zero, write it.

    Beside ``OUT.onnx`` lies ``OUT.json``: what went, quality, sizes and the curves.

    Args:
        source: a model, as for ``export``.
        goal: which heads go, or how many, or until when.
        options: the data and the loss.
        output: model to write.
        settings: how the source is read.
        progress: told of every step.

    Errors:
        InputError: bad model, data or goal; a layer or head that is not there or can't go; all
            heads of all layers.
        CheckFailedError: the new model is not equal (a bug).
    """
    output = Path(output)
    check_output(output, source)
    if options.data is None and (goal.min_quality is not None or goal.max_latency_ms is not None):
        raise InputError(
            "heads are searched for on real inputs, and there are none",
            fix="give a file of samples with --data",
        )
    opened = open_heads(source, settings or SourceSettings(), options, progress)
    search = _Search(opened, goal, options, progress)
    removed = search.removed()
    check_removal(opened.heads, removed)
    progress("removing heads")
    plain = without(opened.heads, removed)
    difference = _checked(opened, options, plain)
    pruned = _folded(opened, plain) if goal.fold else plain
    after = head_model(recognise(pruned.model))
    quality = search.quality_of(pruned)
    if goal.time:
        progress("timing")
        search.latency = timed(opened, pruned)
    record, files = written(
        opened,
        options,
        pruned.model,
        after,
        output,
        kind="prune",
        how=search.how,
        layers=tuple(_layers(pruned)),
        heads_after=sum(layer.heads for layer in opened.heads.layers) - len(pruned.removed),
        loss=None if search.scorer is None else search.scorer.measure.name,
        quality_name=None if search.judge is None else search.judge.measure.quality_name,
        quality=quality,
        quality_other=search.other_quality(len(pruned.removed)),
        curves=search.curves,
        check="the model with these gates at zero",
        check_max_abs=difference,
        latency_ms=search.latency,
        notes=(*opened.loaded.notes, *search.notes, *_notes(pruned)),
    )
    return JobResult(document=record.to_json(), notices=record.notes, files=files)


class _Search:
    """From a goal to the heads that go."""

    def __init__(
        self, opened: Opened, goal: PruneGoal, options: HeadOptions, progress: Progress
    ) -> None:
        self.opened, self.goal, self.options, self._progress = opened, goal, options, progress
        self.scorer: Scorer | None = None
        self.judge: Scorer | None = None
        self.curves: dict[str, tuple[CurvePointRecord, ...]] = {}
        self.latency: dict[str, float] = {}
        self.notes: list[str] = []
        self.how = "heads as named"
        if opened.samples is not None:
            self.scorer, self.judge = scorers(opened, options, gated_of(opened, options))

    def removed(self) -> list[Head]:
        if self.goal.heads:
            return [parse_head(text, self.opened) for text in self.goal.heads]
        units = self._units()
        total = sum(len(unit) for unit in units)
        if self.scorer is None:
            return self._by_norm(units, total)
        wanted = total if self.goal.fraction is None else round(total * self.goal.fraction)
        if self.goal.fraction == 1.0:
            return [head for unit in units for head in unit]
        count = _units_for(units, wanted, total)
        order = self._order(self.goal.order, units, count)
        if self.goal.compare:
            other: Order = "one-shot" if self.goal.order == "greedy" else "greedy"
            self._order(other, units, count)
        self.how = f"{self.goal.order}, by {self.scorer.measure.name} on the data"
        if self.goal.min_quality is not None:
            return self._above(order, self.goal.min_quality)
        if self.goal.max_latency_ms is not None:
            return self._below(order, self.goal.max_latency_ms)
        return [head for unit in order for head in unit]

    def _units(self) -> list[Unit]:
        units: list[Unit] = []
        for layer in self.opened.heads.layers:
            if layer.refusal is not None:
                self.notes.append(
                    f"layer {layer.number} ({layer.id}) keeps all its heads: "
                    f"{layer.refusal.code}: {layer.refusal.message}"
                )
                continue
            units += _units_of(layer, self.goal.unit)
        if not units:
            raise InputError(
                "heads can be removed from no layer of this model: " + "; ".join(self.notes),
                fix="see `mha-export heads` for what each layer is",
            )
        return units

    def _order(self, order: Order, units: Sequence[Unit], count: int) -> list[Unit]:
        assert self.scorer is not None
        self._progress(f"{order}: scoring {len(units)} heads")
        if order == "greedy":
            found = greedy(
                self.scorer,
                units,
                count=count,
                shortlist=self.goal.shortlist or None,
                told=self._progress,
            )
        else:
            scores = [self.scorer.loss(unit) for unit in units]
            found = one_shot(units, scores)[:count]
        judged = None if self.judge is self.scorer else self.judge
        self._progress(f"{order}: quality along the way")
        steps = curve(self.scorer, found, judge=judged or self.scorer)
        self.curves[order] = tuple(_point(step) for step in steps)
        return found

    def _above(self, order: Sequence[Unit], least: float) -> list[Head]:
        """The longest beginning of the order with the quality asked for."""
        points = self.curves[self.goal.order]
        kept = 0
        for index, point in enumerate(points, start=1):
            if point.quality is not None and point.quality >= least:
                kept = index
        if not kept:
            raise InputError(
                f"no head can go: the best first one leaves a quality of {points[0].quality:.4g}, "
                f"and {least} is asked for",
                fix="ask for less, or keep the model as it is",
            )
        self.how += f", to a quality of at least {least:g}"
        return [head for unit in order[:kept] for head in unit]

    def _below(self, order: Sequence[Unit], most_ms: float) -> list[Head]:
        """The shortest beginning of the order that runs as fast as asked for, by halving."""
        low, high = 0, len(order)
        best: dict[int, float] = {}
        while high - low > 1:
            middle = (low + high) // 2
            best[middle] = self._median(order[:middle])
            low, high = (low, middle) if best[middle] <= most_ms else (middle, high)
        best[high] = best.get(high, self._median(order[:high]))
        if best[high] > most_ms:
            raise InputError(
                f"with {sum(len(unit) for unit in order)} heads gone the model still takes "
                f"{best[high]:.3g} ms; {most_ms:g} ms is asked for",
                fix="allow more time: the rest of the model is not attention",
            )
        self.how += f", to a median of {most_ms:g} ms on cpu"
        self.latency["pruned"] = best[high]
        return [head for unit in order[:high] for head in unit]

    def _median(self, units: Sequence[Unit]) -> float:
        removed = [head for unit in units for head in unit]
        self._progress(f"timing: {len(removed)} heads gone")
        found = timed(self.opened, without(self.opened.heads, removed))
        self.latency.setdefault("original", found["original"])
        return found["pruned"]

    def _by_norm(self, units: Sequence[Unit], total: int) -> list[Head]:
        """Without data: by the size of what a head can add at most, its W_V W_O."""
        norms = {
            (layer.number, head): _weight_norm(layer, head)
            for layer in self.opened.heads.layers
            if layer.refusal is None
            for head in range(layer.heads)
        }
        scores = [float(np.mean([norms[head] for head in unit])) for unit in units]
        assert self.goal.fraction is not None
        wanted = round(total * self.goal.fraction)
        chosen = one_shot(units, scores)[: _units_for(units, wanted, total)]
        self.how = "by the norm of each head's W_V W_O: there are no data"
        self.notes.append(
            "heads are ranked by the norm of W_V W_O, which says little of what they are worth; "
            "give --data to rank them by what the model does without them"
        )
        return [head for unit in chosen for head in unit]

    def quality_of(self, pruned: Pruned) -> float | None:
        """Of the written model itself, by the samples that judge."""
        if self.judge is None:
            return None
        outputs = [
            self.opened.evaluator.run(pruned.model, fitting(pruned.model, batch.inputs))[
                self.judge.output
            ].astype("float64")
            for batch in self.judge.batches
        ]
        return self.judge.quality_of(outputs)

    def other_quality(self, removed: int) -> dict[str, float]:
        """The quality of each order on the way at the same number of heads."""
        return {
            name: point.quality
            for name, points in self.curves.items()
            for point in points
            if point.removed == removed and point.quality is not None
        }


def fitting(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs, empty caches with as many heads as the model has now."""
    found = {}
    for value in model.graph.inputs:
        array = inputs[str(value.name)]
        shape = value.shape
        if array.ndim == 4 and 0 in array.shape and shape is not None:
            fixed = [
                d if isinstance(d, int) else n for d, n in zip(shape, array.shape, strict=True)
            ]
            array = np.zeros(fixed, array.dtype)
        found[str(value.name)] = array
    return found


def _units_of(layer: Layer, unit: str | None) -> list[Unit]:
    group = layer.spec.group
    if unit == "head" or (unit is None and group == 1):
        return [((layer.number, head),) for head in range(layer.heads)]
    return [
        tuple((layer.number, kv * group + i) for i in range(group))
        for kv in range(layer.spec.kv_heads)
    ]


def _units_for(units: Sequence[Unit], wanted: int, total: int) -> int:
    """How many units make ``wanted`` heads, at least one, never all."""
    if wanted < 1:
        raise InputError(f"that is less than one of {total} heads", fix="ask for a larger fraction")
    each = total / len(units)
    return max(1, min(round(wanted / each), len(units) - 1))


def _weight_norm(layer: Layer, head: int) -> float:
    assert layer.value is not None
    assert layer.output is not None
    value = layer.value.weight[:, head // layer.spec.group]
    return float(np.linalg.norm(value @ layer.output.weight[head]))


def _point(step: Step) -> CurvePointRecord:
    return CurvePointRecord(
        removed=step.removed,
        heads=tuple(f"{layer}:{head}" for layer, head in step.unit),
        loss=step.loss,
        quality=step.quality,
    )


def _checked(opened: Opened, options: HeadOptions, plain: Pruned) -> float:
    gated = with_gates(opened.heads)
    origins = {layer.layer: layer.kv_kept for layer in plain.layers}
    difference = difference_from_gated(
        opened.heads,
        gated,
        plain.removed,
        plain.model,
        origins,
        check_cases(opened, options),
        opened.evaluator,
    )
    require_equal(difference, "the model with these gates at zero")
    return difference


def _folded(opened: Opened, plain: Pruned) -> Pruned:
    """Again, with the mean contribution in the bias of layers that lost all their heads."""
    empty = [layer.layer for layer in plain.layers if not layer.kept]
    if not empty or opened.samples is None:
        return plain
    means = mean_contributions(opened.heads, opened.evaluator, opened.samples.batches, empty)
    return without(opened.heads, plain.removed, means=means)


def _layers(pruned: Pruned) -> list[SurgeryLayerRecord]:
    return [
        SurgeryLayerRecord(
            layer=layer.layer,
            site=layer.id,
            q_heads_before=layer.before,
            kv_heads_before=layer.kv_before,
            q_heads=len(layer.kept) + layer.padded,
            kv_heads=len(layer.kv_kept),
            removed=tuple(head for number, head in pruned.removed if number == layer.layer),
            padded=layer.padded,
        )
        for layer in pruned.layers
    ]


def _notes(pruned: Pruned) -> list[str]:
    notes = []
    for layer in pruned.layers:
        if layer.padded:
            notes.append(
                f"layer {layer.layer} ({layer.id}): {layer.padded} heads of zeros keep its groups "
                "of one size; remove whole groups (--unit group) to save their time too"
            )
        if not layer.kept:
            size = pruned.folded.get(layer.layer, 0.0)
            what = f"a mean contribution of norm {size:.3g}" if size else "its output bias alone"
            notes.append(f"layer {layer.layer} ({layer.id}) has no heads left: it adds {what}")
    return notes
