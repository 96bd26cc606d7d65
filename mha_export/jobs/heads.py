"""What each head of a model does, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.errors import InputError
from mha_export.heads.analysis import LayerAnalysis, analyse, attention_maps
from mha_export.heads.data import Batch, Samples, completed
from mha_export.heads.gates import Head
from mha_export.heads.importance import METHODS, Importance, importance
from mha_export.heads.patterns import repeated_rows
from mha_export.jobs._head_work import HeadOptions, Opened, gated_of, open_heads, scorers
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult
from mha_export.jobs._settings import SourceSettings
from mha_export.jobs._store import check_file
from mha_export.jobs.inspect import model_record
from mha_export.measure._input_roles import input_roles
from mha_export.measure.machine import machine_record
from mha_export.report.records import (
    AttentionMapRecord,
    HeadRecord,
    HeadsRecord,
    LayerHeadsRecord,
    write_json,
)

MAPS = 6
"""Attention maps drawn where none are asked for."""


def analyse_heads(
    source: Any,
    *,
    options: HeadOptions,
    method: str | None = None,
    maps: Sequence[str] = (),
    sample: int = 0,
    output: str | Path | None = None,
    settings: SourceSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Patterns, spectra, contributions, redundancy and importance of every head.

    Args:
        source: a model, as for ``export``.
        options: the data and the loss.
        method: of importance (see :mod:`mha_export.heads.importance`), ``none``, or None for the
            one that fits the loss.
        maps: heads (``layer:head``) whose weights are kept for the report; none: the most
            important one of each layer.
        sample: which sample they are drawn for, counted in the order of length.
        output: JSON file to write; ``report`` makes a page of it.
        settings: how the source is read.
        progress: told of every step.

    Errors:
        InputError: bad model or data, no data, an unknown head, method or output.
    """
    if options.data is None:
        raise InputError(
            "heads are looked at on real inputs, and there are none",
            fix="give a file of samples with --data",
        )
    if method not in (None, "none", *METHODS):
        raise InputError(f"there is no importance {method!r}", fix=f"one of {', '.join(METHODS)}")
    if output is not None:
        check_file(Path(output), source=source)
    opened = open_heads(source, settings or SourceSettings(), options, progress)
    assert opened.samples is not None
    chosen = [parse_head(text, opened) for text in maps]
    progress("looking at every head on the data")
    found = analyse(
        opened.heads, opened.evaluator, opened.samples, repeated=_repeated(opened, options.seed)
    )
    worth, loss = None, None
    if method != "none":
        progress("importance of every head")
        scorer, _ = scorers(opened, options, gated_of(opened, options))
        worth, loss = importance(scorer, method), scorer.measure.name  # type: ignore[arg-type]
    record = HeadsRecord(
        machine=machine_record(),
        model=model_record(opened.loaded),
        data=options.data.name,
        samples=opened.samples.samples,
        tokens=int(sum(batch.keep.sum() for batch in opened.samples.batches)),
        loss=loss,
        importance_method=None if worth is None else worth.method,
        importance_by=None if worth is None else worth.by,
        layers=tuple(_layer_records(opened, found, worth)),
        maps=_maps(opened, chosen or _worthiest(found, worth), sample),
        notes=tuple(opened.loaded.notes),
    )
    if output is not None:
        write_json(output, record)
    return JobResult(
        document=record.to_json(),
        notices=tuple(
            f"layer {layer.number} ({layer.id}): {layer.note}" for layer in found if layer.note
        ),
        files=() if output is None else (Path(output),),
    )


def parse_head(text: str, opened: Opened) -> Head:
    """``layer:head``, the layer by number or id.

    Errors:
        InputError: no such layer or head, or a layer that was refused.
    """
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit():
        raise InputError(f"{text!r} is no head", fix="write layer:head, e.g. 0:1 or layer.0.self:1")
    layer = opened.heads.layer(name)
    if layer.site is None:
        assert layer.refusal is not None
        raise InputError(
            f"layer {layer.number} ({layer.id}) was refused: {layer.refusal.code}: "
            f"{layer.refusal.message}",
            fix="leave it out",
        )
    if int(number) >= layer.heads:
        raise InputError(
            f"layer {layer.number} ({layer.id}) has no head {number}",
            fix=f"its heads are 0 to {layer.heads - 1}",
        )
    return layer.number, int(number)


def _repeated(opened: Opened, seed: int) -> Batch | None:
    """Random tokens said twice, where the model takes tokens."""
    model = opened.loaded.model
    roles = [role for role in input_roles(model) if role.name == "input_ids" and role.limit]
    if not roles:
        return None
    ids = repeated_rows(int(roles[0].limit or 2), seed=seed)
    keep = np.ones(ids.shape, bool)
    inputs = completed({"input_ids": ids}, keep, model, where="a repeated sequence")
    return Batch(inputs=inputs, keep=keep, ids=ids)


def _layer_records(
    opened: Opened, found: Sequence[LayerAnalysis], worth: Importance | None
) -> list[LayerHeadsRecord]:
    by_number = {layer.number: layer for layer in found}
    rows = []
    for layer in opened.heads.layers:
        refused = (
            None if layer.refusal is None else f"{layer.refusal.code}: {layer.refusal.message}"
        )
        own = by_number.get(layer.number)
        if own is None:
            rows.append(
                LayerHeadsRecord(
                    layer=layer.number, site=layer.id, q_heads=0, kv_heads=0, refused=refused
                )
            )
            continue
        values: Mapping[Head, float] = {} if worth is None else worth.values
        rows.append(
            LayerHeadsRecord(
                layer=layer.number,
                site=layer.id,
                q_heads=layer.heads,
                kv_heads=layer.spec.kv_heads,
                heads=tuple(_head(own, head, values) for head in range(layer.heads)),
                similarity=()
                if own.similarity is None
                else tuple(tuple(round(float(x), 4) for x in row) for row in own.similarity),
                refused=refused,
            )
        )
    return rows


def _head(own: LayerAnalysis, head: int, values: Mapping[Head, float]) -> HeadRecord:
    pattern = {} if not own.patterns else asdict(own.patterns[head])
    spectra: dict[str, Any] = {}
    for name, found in (("qk", own.query_key), ("vo", own.value_output)):
        if found:
            spectra[f"{name}_rank"] = found[head].rank
            spectra[f"{name}_effective_rank"] = found[head].effective
            spectra[f"{name}_spectrum"] = found[head].values
    return HeadRecord(
        head=head,
        importance=values.get((own.number, head)),
        norm=own.norms[head] if own.norms else None,
        **pattern,
        **spectra,
    )


def _worthiest(found: Sequence[LayerAnalysis], worth: Importance | None) -> list[Head]:
    """The head of each layer that is worth most (or adds most), for the first few layers."""
    chosen = []
    for layer in found:
        if not layer.patterns:
            continue
        heads = range(len(layer.patterns))
        values = {} if worth is None else worth.values
        best = max(
            heads,
            key=lambda head: values.get(
                (layer.number, head), layer.norms[head] if layer.norms else 0.0
            ),
        )
        chosen.append((layer.number, best))
    return chosen[:MAPS]


def _maps(opened: Opened, chosen: Sequence[Head], sample: int) -> tuple[AttentionMapRecord, ...]:
    assert opened.samples is not None
    batch, words = _sample(opened.samples, sample)
    maps = attention_maps(opened.heads, opened.evaluator, batch, chosen, words)
    return tuple(
        AttentionMapRecord(
            layer=drawn.head[0],
            head=drawn.head[1],
            words=drawn.words,
            weights=tuple(tuple(round(float(x), 4) for x in row) for row in drawn.weights),
        )
        for drawn in maps
    )


def _sample(samples: Samples, index: int) -> tuple[Batch, list[str]]:
    """One sample as a batch of its own, and its words."""
    if not 0 <= index < samples.samples:
        raise InputError(
            f"there is no sample {index}", fix=f"samples are 0 to {samples.samples - 1}"
        )
    for batch in samples.batches:
        if index < batch.samples:
            own = slice(index, index + 1)
            one = Batch(
                inputs={name: array[own] for name, array in batch.inputs.items()},
                keep=batch.keep[own],
                ids=None if batch.ids is None else batch.ids[own],
            )
            break
        index -= batch.samples
    if one.ids is None:
        return one, [str(position) for position in range(one.keep.shape[1])]
    return one, [samples.tokens.get(int(number), str(number)) for number in one.ids[0]]
