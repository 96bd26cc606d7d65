"""Compile, parity and latency of a model's variants on this machine."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from mha_export.jobs._budget import Budget
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._reach import LONGEST, every_row_has_keys, unseen, widest
from mha_export.jobs._result import CANNOT_RUN, FAILED, OK, JobResult, worst
from mha_export.jobs._results_file import ResultsFile, digest_of
from mha_export.jobs._settings import RunSettings, Workload
from mha_export.jobs._store import ORIGINAL, check_file
from mha_export.jobs._subject import Candidate, Subject, open_subject
from mha_export.jobs._trial import Trial, open_trials
from mha_export.jobs.probing import remembered
from mha_export.measure.latency import Contender, LatencySettings, Timing, measure_latency
from mha_export.measure.machine import machine_record
from mha_export.measure.model_inputs import (
    ModelCase,
    model_cases,
    ordinary_inputs,
)
from mha_export.measure.reference_run import ModelReference
from mha_export.measure.roofline import Ceilings, Work, ceilings_of, rates, work_of
from mha_export.recognise import recognise
from mha_export.report.records import ResultRecord, ResultsRecord

RAW = "raw"
_BAD = ("fail", "fallback", "error")


def run_models(
    model: str | Path,
    *,
    targets: Sequence[str] = (),
    output: str | Path | None = None,
    settings: RunSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Compile every candidate, judge it against the original, and time it.

    Args:
        model: an export folder, or one ``.onnx`` file (which is then its own original).
        targets: as ``-t``; none: the folder's own targets, or every target found here.
        output: results file to write; failing inputs are kept in ``<output stem>.failing/``.
        settings: workloads, inputs, baseline, length of measurement.
        progress: told of every step.

    The output is written as the results come, one target after the other. Where it is there from
    the same run, ended before it was done, that run goes on: what is finished is not run again.

    Returns:
        A document valid under the ``results`` schema. ``exit_code`` 1: a ``fail``, ``fallback`` or
        ``error``; 3: a target that was asked for cannot run here.

    Errors:
        InputError: bad folder, model, target, inputs or sizes.
    """
    settings = settings or RunSettings()
    if output is not None:
        check_file(Path(output), source=model)
    subject = open_subject(Path(model), targets)
    groups = by_request(subject.candidates)
    machine = machine_record()
    file = ResultsFile(
        None if output is None else Path(output),
        empty=ResultsRecord(
            machine=machine,
            exports=() if subject.export is None else (subject.export,),
            doctor=remembered([own[0].request for own in groups.values()]),
        ),
        run=digest_of(subject, settings, machine=machine.id),
        targets=list(groups),
    )
    if file.resumed:
        done = len(groups) - len(file.unfinished)
        progress(f"going on with {output}, where {done} of {len(groups)} targets are done")
    keep_in = None if output is None else Path(output).with_suffix(".failing")
    runner = _Runner(subject, settings, keep_in, progress)
    waiting = {name: groups[name] for name in file.unfinished}
    if any(own[0].request.runs_here for own in waiting.values()):
        runner.prepare()  # what is wrong with the inputs is said before anything is built
    for done, (name, own) in enumerate(waiting.items()):
        runner.budget.next_of(len(waiting) - done)
        file.add(name, runner.results(own))
    record = file.record()
    asked = bool(targets) and tuple(targets) != ("all",)
    return JobResult(
        document=record.to_json(),
        exit_code=_exit_code(record.results, asked=asked),
        notices=(*runner.notices, *_notices(record.results)),
        files=() if output is None else (Path(output),),
    )


def by_request(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates by the target they are for, in order: what is built, judged and timed together."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.request.name, []).append(candidate)
    return groups


class _Runner:
    """The steps of one target, over all its candidates and workloads."""

    def __init__(
        self, subject: Subject, settings: RunSettings, keep_in: Path | None, progress: Progress
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._keep_in = keep_in
        self._progress = progress
        self._references: dict[str | None, ModelReference] = {}
        self._drawn: dict[int, tuple[tuple[ModelCase, ...], ModelCase]] = {}
        self.budget = Budget(settings.most_seconds)
        self.notices: list[str] = []
        """What is to be said of the inputs."""

    @cached_property
    def _judged_at(self) -> tuple[int, bool]:
        """Tokens beyond every window and block of the model; whether it may have more queries than
        keys. Nothing is asked for where it is to be quick."""
        if self._settings.quick:
            return 0, False
        recognition = recognise(self._subject.original)
        return widest(recognition), every_row_has_keys(recognition)

    def prepare(self) -> None:
        """Draw the inputs of every workload.

        Errors:
            InputError: sizes or inputs that the model does not have.
        """
        for workload in self._settings.workloads:
            self._inputs(workload)

    def results(self, candidates: Sequence[Candidate]) -> list[ResultRecord]:
        """Everything about one target. Its processes have ended when this returns."""
        with ExitStack() as stack:
            workdir = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="mha_export-", ignore_cleanup_errors=True)
                )
            )
            trials = self._built(stack, candidates, workdir)
            baselines: dict[str, Trial] = {}
            if self._settings.vs == RAW:
                raw = [self._raw(trial.candidate) for trial in trials if trial.alive]
                built = self._built(stack, raw, workdir / RAW)
                baselines = {trial.candidate.request.name: trial for trial in built if trial.alive}
            records = [trial.record() for trial in trials if not trial.alive]
            for workload in self._settings.workloads:
                records += self._workload(
                    workload, [trial for trial in trials if trial.alive], baselines
                )
        return records

    def _raw(self, candidate: Candidate) -> Candidate:
        return dataclasses.replace(
            candidate, variant=ORIGINAL, file=self._subject.original_file, forms={}
        )

    def _built(
        self, stack: ExitStack, candidates: Sequence[Candidate], workdir: Path
    ) -> list[Trial]:
        distinct = list({candidate.name: candidate for candidate in candidates}.values())
        trials = open_trials(stack, self._subject, distinct, limits=self._settings.limits)
        for index, trial in enumerate(trials):
            self._progress(f"building for {trial.candidate.name}")
            folder = workdir / str(index)
            folder.mkdir(parents=True)
            trial.build(folder)
        return trials

    def _workload(
        self, workload: Workload, trials: Sequence[Trial], baselines: Mapping[str, Trial]
    ) -> list[ResultRecord]:
        if not trials:
            return []
        cases, timed = self._inputs(workload)
        judged = [self._judged(trial, cases) for trial in trials]
        if self.budget.used_up:
            return [self._not_timed(record, timed) for record in judged]
        sound = [trial for trial, record in zip(trials, judged, strict=True) if _runs(record)]
        timings = self._timings(sound, baselines, timed) if sound else {}
        work = None if self._settings.quick else work_of(self._subject.original, timed.inputs)
        return [
            self._measured(record, trial, timings.get(trial.candidate.name), timed, work)
            for record, trial in zip(judged, trials, strict=True)
        ]

    def _judged(self, trial: Trial, cases: Sequence[ModelCase]) -> ResultRecord:
        step = f"parity on {trial.candidate.name}"
        reference = self._reference(trial.candidate.request.precision)
        expected = reference.expected_battery(
            cases,
            progress=lambda done, total: self._progress(
                f"{step}: the exact answer to input {done + 1} of {total}"
            ),
        )
        return trial.judge(
            reference,
            expected,
            self._keep_in,
            self.budget,
            lambda words: self._progress(f"{step}: {words}"),
        )

    def _not_timed(self, record: ResultRecord, timed: ModelCase) -> ResultRecord:
        record = dataclasses.replace(record, workload=dict(timed.dims))
        if record.status in _BAD:
            return record
        why = f"not timed: {self.budget.words}"
        return dataclasses.replace(
            record, reason=f"{record.reason}; {why}" if record.reason else why
        )

    def _inputs(self, workload: Workload) -> tuple[tuple[ModelCase, ...], ModelCase]:
        key = id(workload)
        if key not in self._drawn:
            self._drawn[key] = self._draw(workload)
        return self._drawn[key]

    def _draw(self, workload: Workload) -> tuple[tuple[ModelCase, ...], ModelCase]:
        original = self._subject.original
        if self._settings.inputs is not None:
            case = self._reference(None).own_case(self._settings.inputs)
            return (case,), case
        seed = self._settings.seed
        reach, many_queries = self._judged_at
        cases = model_cases(
            original,
            seed=seed,
            dims=workload.dims,
            shapes=workload.shapes,
            quick=self._settings.quick,
            reach=min(reach, LONGEST),
            many_queries=many_queries,
        )
        self.notices += [text for text in unseen(reach, cases) if text not in self.notices]
        reference = self._reference(None)
        timed = ordinary_inputs(
            original,
            seed=seed,
            dims=workload.dims,
            shapes=workload.shapes,
            runs=reference.runs,
        )
        return cases, timed

    def _reference(self, precision: str | None) -> ModelReference:
        if precision not in self._references:
            self._references[precision] = ModelReference(
                self._subject.original, precision=precision
            )
        return self._references[precision]

    def _timings(
        self, trials: Sequence[Trial], baselines: Mapping[str, Trial], timed: ModelCase
    ) -> dict[str, Timing]:
        settings = dataclasses.replace(
            LatencySettings.quick() if self._settings.quick else LatencySettings(),
            seed=self._settings.seed,
            limits=self._settings.limits,
            most_s=self.budget.for_timing(1),
        )
        if not baselines:
            step = f"timing {', '.join(trial.candidate.name for trial in trials)}"
            return self._timed([_contender(t, timed) for t in trials], settings, step)
        timings: dict[str, Timing] = {}
        for done, trial in enumerate(trials):
            share = self.budget.for_timing(len(trials) - done)
            settings = dataclasses.replace(settings, most_s=share)
            step = f"timing {trial.candidate.name} against the unmodified model"
            contenders = [_contender(trial, timed)]
            base = baselines.get(trial.candidate.request.name)
            if base is not None:
                contenders.append(_contender(base, timed, name=RAW))
            timings.update(self._timed(contenders, settings, step, against=base))
        return timings

    def _timed(
        self,
        contenders: Sequence[Contender],
        settings: LatencySettings,
        step: str,
        against: Trial | None = None,
    ) -> dict[str, Timing]:
        self._progress(f"{step}: warming up")
        return measure_latency(
            contenders,
            baseline=None if against is None else RAW,
            settings=settings,
            progress=lambda done, most: self._progress(
                f"{step}: round {done + 1} of at most {most}"
            ),
        )

    def _measured(
        self,
        record: ResultRecord,
        trial: Trial,
        timing: Timing | None,
        timed: ModelCase,
        work: Work | None,
    ) -> ResultRecord:
        record = dataclasses.replace(record, workload=dict(timed.dims))
        if timing is None or timing.latency is None:
            return record
        record = dataclasses.replace(
            record, latency_ms=timing.latency, vs=timing.vs, peak_rss_mb=timing.peak_rss_mb
        )
        if work is None:
            return record
        achieved = rates(work, timing.latency.p50, self._ceilings(trial))
        return dataclasses.replace(
            record,
            gflops=achieved.gflops,
            gbytes_s=achieved.gbytes_s,
            roofline_fraction=achieved.fraction,
        )

    def _ceilings(self, trial: Trial) -> Ceilings:
        request = trial.candidate.request
        self._progress(f"ceilings of {request.name}")
        return ceilings_of(request.target.name, precision=request.precision)


def _runs(record: ResultRecord) -> bool:
    """Whether there is something to time: not where an input crashed the target or hung it."""
    return record.status != "error"


def _contender(trial: Trial, timed: ModelCase, *, name: str | None = None) -> Contender:
    return Contender(
        name=name or trial.candidate.name,
        worker=trial.worker,
        inputs=timed.inputs,
        graph=trial.candidate.graph,
    )


def _exit_code(results: Sequence[ResultRecord], *, asked: bool) -> int:
    codes = [FAILED for result in results if result.status in _BAD]
    if asked:
        codes += [CANNOT_RUN for result in results if result.status in ("unavailable", "built")]
    return worst(codes) if codes else OK


def _notices(results: Sequence[ResultRecord]) -> list[str]:
    lines = []
    for result in results:
        if result.status != "pass" and result.reason:
            lines.append(f"{result.model} on {result.target}: {result.status}: {result.reason}")
        if result.replay:
            lines.append(f"  replay: {result.replay}")
    return lines
