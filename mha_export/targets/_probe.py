"""Probing a target: every known-answer graph in a worker, judged by the oracle."""

from __future__ import annotations

import datetime
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mha_export.spec import DType
from mha_export.states import CapabilityState
from mha_export.targets._capabilities import (
    Capabilities,
    Capability,
    Unfinished,
    cache_file,
    read_cached,
    write_cached,
)
from mha_export.targets._features import FEATURES, QUICK, SECOND_DTYPE
from mha_export.targets._files import model_bytes
from mha_export.targets._operator_probes import operator_probes
from mha_export.targets._probe_cases import Probe, Run, form_probes
from mha_export.targets._registry import target_named
from mha_export.targets._target import (
    Available,
    CannotRun,
    CompileOptions,
    Placement,
    Program,
    Target,
)
from mha_export.targets._worker import Job, Limits, Outcome, Worker

COMPUTED_IN = {"f16": DType.FP16, "bf16": DType.BF16}
"""Precisions a runtime computes in whatever the graph says, as dtypes of the error bounds."""

NOISE = re.compile(
    r"Exception from src/|FrontEnd API failed|Model wasn't fully|While validating|Check 'false"
    r"|-- \S+ with a|Summary:"
)
"""Lines of a runtime's message that name its own machinery."""
WHERE = re.compile(
    r"Load model from \S+ failed: ?|(?m:^\d+: )|\x1b\[[\d;]*m"
    r"|[A-Z]:\\\S+!\w+: \(caller: \w+\) Exception\(\d+\) tid\(\w+\) "
)
"""Parts that change from run to run or decorate: paths of temporary files, numbering, colours,
addresses in a library of Windows."""

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one graph did in the worker.

    Attributes:
        stage: how far it came: refused at ``load`` or at ``run``, ``ran`` all, only ``built``, or
            the ``crash`` of a process that the target itself had started.
        outputs: of each set of inputs.
        unread: inputs that a built engine ignores.
    """

    stage: Literal["load", "run", "ran", "built", "crash"]
    message: str = ""
    outputs: tuple[Mapping[str, np.ndarray], ...] = ()
    placement: Placement | None = None
    unread: tuple[str, ...] = ()


def probe(
    target: Target,
    precision: str | None = None,
    *,
    quick: bool = False,
    fresh: bool = False,
    dtypes: Sequence[DType] = (DType.FP32, DType.FP16),
    progress: Callable[[str, int, int], None] | None = None,
) -> Capabilities:
    """Probe a target on this machine and remember the matrix.

    Args:
        target: which one; unavailable gives an empty matrix.
        precision: of a runtime that chooses its own.
        dtypes: of the graphs; fp32 alone where the runtime is told its precision.
        quick: the commonest features in fp32 only; the matrix is not remembered.
        fresh: probe even where the matrix of this runtime version and device is known.
            A probing that was ended is gone on with all the same.
        progress: told the cell, how many are done, and how many there are.
    """
    availability = target.availability()
    if not isinstance(availability.build, Available):
        return Capabilities(target=target.name, precision=precision)
    if not fresh and not quick:
        known = read_cached(target, precision, availability)
        if known is not None:
            return known
    wanted = (DType.FP32,) if quick or precision in COMPUTED_IN else tuple(dtypes)
    probes = sorted(
        _probes(target, precision, wanted, quick=quick), key=lambda one: _decides(target, one)
    )
    unfinished = Unfinished(cache_file(target, precision, availability))
    rows = []
    with Worker() as worker:
        for done, one in enumerate(probes):
            if progress is not None:
                progress(f"{one.form}/{one.feature}/{one.dtype.value}", done, len(probes))
            digest = _digest(one)
            row = unfinished.get(digest)
            if row is None:
                row = probe_one(worker, target.name, precision, one)
                if row.state != "crash":  # which another try may not see: a loaded machine
                    unfinished.add(digest, row)
            rows.append(row)
    found = Capabilities(
        target=target.name,
        precision=precision,
        runtime=availability.runtime,
        version=availability.version,
        device=availability.device,
        measured=datetime.date.today().isoformat(),
        source="probed here",
        rows=tuple(rows),
    )
    if not quick:
        write_cached(target, precision, availability, found)
        unfinished.remove()
    return found


def _digest(one: Probe) -> str:
    """Of what a probe asks: its graph, the spec it is judged by, and the cases it runs on."""
    asked = repr((one.form, one.feature, one.spec, one.computed_in, one.scenarios))
    return hashlib.sha256(model_bytes(one.model) + asked.encode()).hexdigest()[:16]


def _probes(
    target: Target, precision: str | None, dtypes: Sequence[DType], *, quick: bool
) -> Iterator[Probe]:
    computed_in = COMPUTED_IN.get(precision or "")
    for dtype in dtypes:
        first = dtype is dtypes[0]
        features = QUICK if quick else tuple(FEATURES) if first else SECOND_DTYPE
        if first and not quick:
            yield from operator_probes(dtype, max_opset=target.max_opset, computed_in=computed_in)
        yield from form_probes(
            dtype,
            max_opset=target.max_opset,
            computed_in=computed_in,
            features=features,
            told=target.form_options,
        )


def _decides(target: Target, one: Probe) -> int:
    """Sorts what decides most to the front: operators, and the forms the target is given first.

    ``primitive`` is used whatever its probes say.
    """
    if "." in one.form:
        return 0
    return 1 if one.form in target.default_forms and one.form != "primitive" else 2


def probe_one(worker: Worker, target: str, precision: str | None, one: Probe) -> Capability:
    """Run one graph in the worker and judge what came out."""
    runs = list(one.runs())
    if one.feature == "fixed_past":
        runs = runs[:1]  # its dimensions are those of the first case
    feeds = [run.feeds() for run in runs]
    job = Job(function=observe, args=(target, precision, model_bytes(one.model), feeds))
    outcome = worker.call(job, limits=Limits(seconds=target_named(target).probe_seconds))
    state, error, message = _judge(outcome, runs)
    findings = outcome.value if outcome.ok else None
    return Capability(
        form=one.form,
        feature=one.feature,
        dtype=one.dtype.value,
        state=state,
        max_err=error,
        placement=_where(findings),
        message=message,
    )


def _judge(
    outcome: Outcome[Findings], runs: Sequence[Run]
) -> tuple[CapabilityState, float | None, str | None]:
    if not outcome.ok or outcome.value is None:
        if outcome.kind == "error":
            return "unsupported-at-load", None, _first_line(outcome.message)
        return "crash", None, _first_line(outcome.reason)
    found = outcome.value
    if found.stage == "crash":
        return "crash", None, _first_line(found.message)
    if found.stage == "load":
        return "unsupported-at-load", None, _first_line(found.message)
    if found.stage == "run":
        return "unsupported-at-run", None, _first_line(found.message)
    if found.unread:
        return "wrong", None, f"the engine reads no input {', '.join(found.unread)}"
    state: CapabilityState = "ok"
    error, message = None, None
    for run, outputs in zip(runs, found.outputs, strict=False):
        verdict, run_error, reason = run.judge(outputs)
        error = max(error or 0.0, run_error)
        if verdict == "wrong":
            return "wrong", run_error if np.isfinite(run_error) else None, reason
        if verdict == "imprecise":
            state, message = "imprecise", reason
    if found.placement is not None and not found.placement.complete:
        return "fallback", error, "; ".join(found.placement.elsewhere)
    return state, error, message


def _first_line(text: str) -> str:
    """The line that says something: not where in the runtime's source the exception was thrown."""
    text = WHERE.sub("", text)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    said = [line for line in lines if not NOISE.match(line)]
    return (said or lines or [""])[0][:300]


def _where(found: Findings | None) -> str | None:
    if found is None or found.placement is None:
        return None
    placement = found.placement
    if found.stage == "built":
        return placement.evidence
    return f"{placement.on_target} of {placement.float_compute_nodes} on target"


def observe(target: str, precision: str | None, model: bytes, feeds: Sequence[Feeds]) -> Findings:
    """Compile, load, run on each feed, ask for the placement. The body of one worker request."""
    with tempfile.TemporaryDirectory(
        prefix="mha_export-probe-", ignore_cleanup_errors=True
    ) as name:
        path = Path(name) / "probe.onnx"
        path.write_bytes(model)
        chosen = target_named(target)
        options = CompileOptions(
            precision=precision,
            threads=1,
            workdir=Path(name) / "built",
            extra=chosen.probe_settings,
        )
        try:
            session = chosen.compile(Program(graphs={"main": path}), options).load()
        except Exception as error:
            return Findings(stage=_stage_of(error, "load"), message=str(error))
        if isinstance(session, CannotRun):
            return Findings(stage="built", placement=session.placement, unread=session.unread)
        outputs = []
        try:
            for one in feeds:
                outputs.append(session.run(one))
            placement = session.placement()
        except Exception as error:
            return Findings(stage=_stage_of(error, "run"), message=str(error))
        return Findings(stage="ran", outputs=tuple(outputs), placement=placement)


def _stage_of(error: Exception, refused: Literal["load", "run"]) -> Literal["load", "run", "crash"]:
    from mha_export.targets._node import NodeEndedError

    return "crash" if isinstance(error, NodeEndedError) else refused
