"""A model with fewer key/value heads, or with one for every query head."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mha_export.heads import Regrouped, head_model, regroup
from mha_export.heads.checking import difference_from_original
from mha_export.heads.measures import Measure
from mha_export.heads.regrouping import Grouping
from mha_export.heads.scoring import Scorer
from mha_export.jobs._head_surgery import check_cases, check_output, require_equal, written
from mha_export.jobs._head_work import HeadOptions, Opened, gated_of, open_heads, scorers
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult
from mha_export.jobs._settings import SourceSettings
from mha_export.jobs.prune import fitting
from mha_export.recognise import recognise
from mha_export.report.records import SurgeryLayerRecord

Choice = Literal["auto", "similar", "contiguous"]


def regroup_model(
    source: Any,
    *,
    kv_heads: int,
    options: HeadOptions,
    output: str | Path,
    grouping: Choice = "auto",
    align: bool = True,
    settings: SourceSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Average (or repeat) key/value heads in every layer, and write the model and its record.

    With data both groupings are made and the quality of both is told; ``auto`` writes the better
    one. Without data ``auto`` is ``similar``, and a note says that nothing was compared. Repeated
    heads are proven equal to the original first.

    Args:
        source: a model, as for ``export``.
        kv_heads: how many key/value heads each layer is to have.
        options: the data and the loss.
        output: model to write; its record goes beside it.
        grouping: which heads are averaged together.
        align: turn the heads of a group towards one another first.
        settings: how the source is read.
        progress: told of every step.

    Errors:
        InputError: bad model or data, a layer that can't be changed, a number that doesn't divide.
        CheckFailedError: repeated heads are not equal (a bug).
    """
    output = Path(output)
    check_output(output, source)
    opened = open_heads(source, settings or SourceSettings(), options, progress)
    progress("regrouping")
    first: Grouping = "similar" if grouping == "auto" else grouping
    found = regroup(opened.heads, kv_heads, grouping=first, align=align)
    exact = all(len(groups) > _before(opened, number) for number, groups in found.groups.items())
    difference = _proven(opened, options, found) if exact else None
    judged: dict[Grouping, float] = {}
    measure: Measure | None = None
    if opened.samples is not None:
        progress("quality on the data")
        _, judge = scorers(opened, options, gated_of(opened, options))
        measure = judge.measure
        judged[first] = _quality(opened, judge, found)
        if not exact:
            second: Grouping = "contiguous" if first == "similar" else "similar"
            rival = regroup(opened.heads, kv_heads, grouping=second, align=align)
            judged[second] = _quality(opened, judge, rival)
            if grouping == "auto" and judged[second] > judged[first]:
                first, found = second, rival
    notes = tuple(opened.loaded.notes)
    if grouping == "auto" and not exact and not judged:
        notes += ("groups of similar weights were averaged; without --data no other was compared",)
    record, files = written(
        opened,
        options,
        found.model,
        head_model(recognise(found.model)),
        output,
        kind="regroup",
        how="repeated" if exact else f"averaged in {first} groups" + (", aligned" if align else ""),
        layers=tuple(_layers(opened, found)),
        heads_after=sum(layer.heads for layer in opened.heads.layers),
        loss=None if measure is None else measure.name,
        quality_name=None if measure is None else measure.quality_name,
        quality=judged.get(first),
        quality_other={} if exact else judged,
        check="the original" if exact else None,
        check_max_abs=difference,
        notes=notes,
    )
    return JobResult(document=record.to_json(), notices=record.notes, files=files)


def _proven(opened: Opened, options: HeadOptions, found: Regrouped) -> float:
    """How far a model with repeated heads is from the original, which is no more than rounding.

    Errors:
        CheckFailedError: it is more (a bug).
    """
    origins = {n: [group[0] for group in groups] for n, groups in found.groups.items()}
    difference = difference_from_original(
        opened.heads, found.model, origins, check_cases(opened, options), opened.evaluator
    )
    require_equal(difference, "the original")
    return difference


def _before(opened: Opened, number: int) -> int:
    return opened.heads.layers[number].spec.kv_heads


def _quality(opened: Opened, judge: Scorer, found: Regrouped) -> float:
    outputs = [
        opened.evaluator.run(found.model, fitting(found.model, batch.inputs))[judge.output].astype(
            "float64"
        )
        for batch in judge.batches
    ]
    return judge.quality_of(outputs)


def _layers(opened: Opened, found: Regrouped) -> list[SurgeryLayerRecord]:
    return [
        SurgeryLayerRecord(
            layer=layer.number,
            site=layer.id,
            q_heads_before=layer.heads,
            kv_heads_before=layer.spec.kv_heads,
            q_heads=layer.heads,
            kv_heads=len(found.groups.get(layer.number, ())) or layer.spec.kv_heads,
            groups=found.groups.get(layer.number, ()),
            spread=found.spread.get(layer.number),
        )
        for layer in opened.heads.layers
    ]
