"""All the ways one attention can be stated on one target, timed against each other.

A candidate is a form with its parameters, built as the canonical graph of the site's spec with the
site's own (perhaps symbolic) lengths, compiled by the target in a process of its own and fed one
ordinary case at the sizes of a workload, real masks included. Before anything is timed its output
is compared with the primitive form's: a fast wrong form is no candidate.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from mha_export.cases import sized_case
from mha_export.errors import InputError
from mha_export.feeds import feeds
from mha_export.forms import FormParams, Unsupported, all_forms, build_model, form_named
from mha_export.measure.latency import Contender, LatencySettings, Timing, measure_latency
from mha_export.spec import AttentionSpec, Dim, DType
from mha_export.targets import CompileOptions, Limits, Program, TargetWorker

BASELINE = "primitive"
TILES = (4, 8, 16, 32, 64, 128)
LEAST_ROWS = 32
"""Queries that a tile should have; shorter tiles are not tried."""
FEW_QUERIES = 16
"""Up to so many queries ``grouped`` is tried, above it ``tiled``."""
LARGEST_ERROR, HALF_ERROR = 1e-3, 5e-2
"""Of the largest output, against the first way that runs on the same target: the primitive form."""
HALF, FAST = (DType.FP16, DType.BF16), ("f16", "bf16")
DEFAULT_LENGTH = 128
SPENT = "the budget was spent; run it again to go on"

Veto = Callable[[str, AttentionSpec], str | None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to state an attention: a form and what steers it."""

    form: str
    options: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.form, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A way and what became of it at one workload. ``problem``: why it has no timing."""

    way: Way
    timing: Timing | None = None
    problem: str | None = None


def lengths_at(spec: AttentionSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """``batch``, ``q_len`` and ``kv_len`` of a spec where its symbols have ``sizes``.

    A length may be a sum of symbols (``past + seq``). A symbol without a size is 1 in the batch and
    :data:`DEFAULT_LENGTH` elsewhere.
    """
    found = {"batch": _size(spec.batch, sizes, 1)}
    for name, dim in (("q_len", spec.q_len), ("kv_len", spec.kv_len)):
        found[name] = _size(dim, sizes, DEFAULT_LENGTH)
    return found


def _size(dim: Dim, sizes: Mapping[str, int], default: int) -> int:
    if isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    terms = [term.strip() for term in re.split(r"\+", dim)]
    if len(terms) == 1:
        return default
    return sum(int(term) if term.isdigit() else sizes.get(term, default) for term in terms)


def ways(
    spec: AttentionSpec,
    *,
    opset: int,
    q_len: int,
    veto: Veto,
    told: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> list[Way]:
    """Every legal form with every parameter worth a try, the baseline first.

    ``told``: the target's ``form_options``.
    """
    found = []
    for name, form in all_forms().items():
        if name == "portable" or opset < form.min_opset or veto(name, spec) is not None:
            continue
        for options in ({**told.get(name, {}), **more} for more in _grid(name, q_len)):
            params = FormParams(opset=opset, options=options)
            if not isinstance(form.supports(spec, params), Unsupported):
                found.append(Way(form=name, options=options))
    return sorted(found, key=lambda way: way.form != BASELINE)


def _grid(form: str, q_len: int) -> list[dict[str, str | int]]:
    if form == "grouped":
        return [{}] if q_len <= FEW_QUERIES else []
    if form != "tiled":
        return [{}]
    products: list[dict[str, str | int]] = [
        {"tiles": tiles, "mask": mask}
        for tiles in TILES
        if q_len >= tiles * LEAST_ROWS
        for mask in ("diagonal", "tile")
    ]
    ops: list[dict[str, str | int]] = [
        {"tiles": tiles, "product": "attention"} for tiles in TILES if q_len >= tiles * LEAST_ROWS
    ]
    return products + ops


def try_ways(
    spec: AttentionSpec,
    wanted: Sequence[Way],
    *,
    target: str,
    precision: str | None,
    opset: int,
    lengths: Mapping[str, int],
    seconds: float | None,
    quick: bool,
    seed: int,
) -> list[Tried]:
    """Time every way at one workload, interleaved, in at most about ``seconds`` in all.

    Building and checking count too; a way that found no time has :data:`SPENT` as its problem.

    Errors:
        InputError: the spec has no inputs of these lengths.
    """
    started = time.monotonic()
    case = sized_case(spec, dims=lengths, seed=seed)
    if case is None:
        raise InputError(
            f"no inputs of {dict(lengths)} fit this attention",
            fix="choose sizes with --dim NAME=N that the model itself can be run at",
        )
    arrays = feeds(spec, case.inputs)
    limits = Limits(seconds=60.0 if quick else 300.0)
    problems: dict[str, str] = {}
    first: tuple[str, np.ndarray] | None = None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mha_export-")))
        contenders = []
        for index, way in enumerate(wanted):
            if seconds is not None and time.monotonic() - started > seconds:
                problems[way.name] = SPENT
                continue
            worker = stack.enter_context(TargetWorker(target, limits=limits))
            answer = _ready(spec, way, worker, folder / str(index), opset, precision, arrays)
            if isinstance(answer, str):
                problems[way.name] = answer
                continue
            first = first or (way.name, answer)
            wrong = _difference(answer, first, half=spec.io_dtype in HALF or precision in FAST)
            if wrong is not None:
                problems[way.name] = wrong
                continue
            contenders.append(Contender(name=way.name, worker=worker, inputs=arrays))
        left = None if seconds is None else seconds - (time.monotonic() - started)
        if left is not None and left <= 0:
            problems |= {contender.name: SPENT for contender in contenders}
            contenders = []
        settings = latency_settings(len(contenders), seconds=left, quick=quick, seed=seed)
        baseline = contenders[0].name if contenders else None
        timings = measure_latency(contenders, baseline=baseline, settings=settings)
    return [
        Tried(
            way=way,
            timing=timings.get(way.name),
            problem=problems.get(way.name) or _problem(timings.get(way.name)),
        )
        for way in wanted
    ]


def latency_settings(
    contenders: int, *, seconds: float | None, quick: bool, seed: int
) -> LatencySettings:
    """The default settings, or quick ones, cut so that all contenders share ``seconds``."""
    settings = LatencySettings.quick(seed=seed) if quick else LatencySettings(seed=seed)
    if seconds is None or not contenders:
        return settings
    each_ms = seconds * 1e3 / contenders
    return dataclasses.replace(
        settings,
        turn_ms=min(settings.turn_ms, each_ms / 12),
        warmup_ms=min(settings.warmup_ms, each_ms / 8),
        most_ms=min(settings.most_ms, each_ms / 2),
    )


def _ready(
    spec: AttentionSpec,
    way: Way,
    worker: TargetWorker,
    folder: Path,
    opset: int,
    precision: str | None,
    arrays: Mapping[str, np.ndarray],
) -> np.ndarray | str:
    """The output of a compiled way, or why there is none."""
    folder.mkdir()
    file = folder / "site.onnx"
    params = FormParams(opset=opset, options=dict(way.options))
    ir.save(build_model(form_named(way.form), spec, params), file)
    options = CompileOptions(precision=precision, workdir=folder)
    built = worker.compile(Program(graphs={"main": file}), options)
    if built.value is None:
        return f"build: {built.reason}"
    loaded = worker.load()
    if loaded.value is None:
        return f"load: {loaded.reason}"
    if loaded.value.cannot_run is not None:
        return f"cannot run: {loaded.value.cannot_run.reason}"
    outcome = worker.run(arrays)
    return f"run: {outcome.reason}" if outcome.value is None else outcome.value["output"]


def _difference(found: np.ndarray, first: tuple[str, np.ndarray], *, half: bool) -> str | None:
    """What is wrong with an output, beside that of the first way that ran, if anything.

    Judged roughly: an export proves it exactly.
    """
    name, expected = first
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if a.shape != b.shape:
        return f"wrong: output {list(a.shape)}, expected {list(b.shape)}"
    worst = float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(b).max(initial=0.0)), 1e-6)
    limit = HALF_ERROR if half else LARGEST_ERROR
    return None if worst <= limit else f"wrong: differs from {name} by {worst:.1e}"


def _problem(timing: Timing | None) -> str | None:
    if timing is None:
        return "not timed"
    return timing.problem if timing.latency is None else None
