"""What the three jobs on heads share: the model, the samples, and what scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.frontends import LoadedModel, open_source
from mha_export.heads import HeadModel, head_model
from mha_export.heads.data import Batch, Samples, read_samples
from mha_export.heads.gates import GatedModel, with_gates
from mha_export.heads.measures import Given, Measure
from mha_export.heads.scoring import Scorer
from mha_export.jobs._progress import Progress
from mha_export.jobs._settings import SourceSettings
from mha_export.recognise import recognise
from mha_export.targets import evaluator_of


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadOptions:
    """What the jobs on heads are asked for.

    Attributes:
        data: ``.npz``, ``.jsonl`` or text. tokenizer: folder of ``tokenizer.json``; None: the
            model's own folder.
        loss: name of a measure, ``auto``, or ``module.py:function`` (needs ``trust_code``).
        output: graph output that is measured; None: the first.
        search_on: how many samples a search looks at; the rest judge what it found.
    """

    data: Path | None = None
    tokenizer: Path | None = None
    loss: str = "auto"
    output: str | None = None
    search_on: int = 64
    seed: int = 0
    trust_code: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A model with its heads, and the samples for it (None where no data was given)."""

    loaded: LoadedModel
    heads: HeadModel
    samples: Samples | None
    evaluator: Evaluator


def open_heads(
    source: Any, settings: SourceSettings, options: HeadOptions, progress: Progress
) -> Opened:
    """Read, recognise, and find the projections of every layer.

    Errors:
        InputError: the model or the data can't be read, the model has no attention, or a
            precision is asked for: heads are looked at in the model's own.
    """
    if settings.dtype is not None:
        raise InputError(
            f"heads are not cast to {settings.dtype}: the model keeps its precision",
            fix="leave dtype out, and cast what is written with `mha-export export --dtype`",
        )
    if options.data is not None and not options.data.is_file():
        raise InputError(f"{options.data}: no such file", fix="check --data")
    progress("reading the model")
    loaded = open_source(source, settings.for_frontend())
    progress("recognising attention")
    heads = head_model(recognise(loaded.model))
    if not heads.layers:
        raise InputError(
            f"{loaded.name} has no attention", fix="see `mha-export inspect` for what it has"
        )
    samples = None
    if options.data is not None:
        tokenizer = options.tokenizer
        own = Path(str(source)) if isinstance(source, (str, Path)) else None
        if tokenizer is None and own is not None:
            folder = own if own.is_dir() else own.parent
            tokenizer = folder if (folder / "tokenizer.json").is_file() else None
        samples = read_samples(options.data, loaded.model, tokenizer=tokenizer)
    return Opened(loaded=loaded, heads=heads, samples=samples, evaluator=evaluator_of("cpu"))


def measured_output(model: ir.Model, options: HeadOptions) -> str:
    """The output that is measured.

    Errors:
        InputError: the model has no such output.
    """
    names = [str(value.name) for value in model.graph.outputs]
    if options.output is None:
        return names[0]
    if options.output not in names:
        raise InputError(
            f"the model has no output {options.output!r}", fix=f"it has {', '.join(names)}"
        )
    return options.output


def gated_of(opened: Opened, options: HeadOptions) -> GatedModel:
    """The model with gates, giving out what is measured."""
    return with_gates(opened.heads, outputs=[measured_output(opened.loaded.model, options)])


def scorers(opened: Opened, options: HeadOptions, gated: GatedModel) -> tuple[Scorer, Scorer]:
    """One for the search and one that judges it, on other samples where there are enough."""
    assert opened.samples is not None
    search, rest = split(opened.samples.batches, options.search_on, seed=options.seed)
    measure = _measure(options)
    everything = Scorer(gated, opened.evaluator, opened.samples.batches, measure)
    first = Scorer(gated, opened.evaluator, search, everything.measure)
    if not rest:
        return first, first
    return first, Scorer(gated, opened.evaluator, rest, everything.measure)


def _measure(options: HeadOptions) -> Measure | str:
    path, colon, name = options.loss.rpartition(":")
    if not colon or not path.endswith(".py"):
        return options.loss
    if not options.trust_code:
        raise InputError(
            f"{options.loss}: loading it runs the code in it; it is not run unasked",
            fix="read it, then allow it with --trust-code",
        )
    import runpy

    if not Path(path).is_file():
        raise InputError(f"{path}: no such file", fix="check --loss")
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise InputError(f"{path}: has no function {name!r}", fix="define it: (outputs, batch)")
    return Given(function=function, name=name)


def split(
    batches: Sequence[Batch], wanted: int, *, seed: int
) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """``wanted`` samples drawn from all batches, and the others."""
    total = sum(batch.samples for batch in batches)
    if wanted >= total - 1:
        return tuple(batches), ()
    drawn = np.zeros(total, bool)
    drawn[np.random.default_rng(seed).permutation(total)[:wanted]] = True
    first, second, start = [], [], 0
    for batch in batches:
        own = drawn[start : start + batch.samples]
        start += batch.samples
        first.append(_rows(batch, own))
        second.append(_rows(batch, ~own))
    return _joined(first), _joined(second)


def _joined(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Without those that have nothing left."""
    return tuple(batch for batch in batches if batch.samples)


def _rows(batch: Batch, own: np.ndarray) -> Batch:
    return Batch(
        inputs={name: array[own] for name, array in batch.inputs.items()},
        keep=batch.keep[own],
        labels=None if batch.labels is None else batch.labels[own],
        ids=None if batch.ids is None else batch.ids[own],
    )
