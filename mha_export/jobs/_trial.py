"""One candidate in its worker process: built, loaded, judged, placed, and kept for timing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.jobs._budget import Budget
from mha_export.jobs._located import in_words, located
from mha_export.jobs._progress import Progress
from mha_export.jobs._subject import Candidate, Subject
from mha_export.measure.failures import keep_failures, replay_of
from mha_export.measure.parity import check_parity, reason_of, status_of
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.report.records import PlacementRecord, ResultRecord, ResultStatus
from mha_export.targets import (
    CompileOptions,
    Limits,
    Outcome,
    Program,
    TargetWorker,
    Unavailable,
)

MOST_DEATHS = 3
"""Processes that may die in turn before the other inputs are left."""
LAST_LINES = 40
"""The stack of a crash, and what was printed before it."""


@dataclass(kw_only=True)
class Trial:
    """A candidate under way; each step adds to its findings and none raises for the runtime.

    ``status`` is None while nothing has gone wrong.
    """

    subject: Subject
    candidate: Candidate
    worker: TargetWorker
    status: ResultStatus | None = None
    reason: str | None = None
    found: dict[str, Any] = field(default_factory=dict)
    deaths: int = 0

    @property
    def alive(self) -> bool:
        """Whether there is a loaded program to run."""
        return self.status is None

    def build(self, workdir: Path) -> None:
        """Compile and load."""
        target = self.candidate.request.target
        availability = target.availability()
        self.found |= {
            "runtime": availability.runtime,
            "runtime_version": availability.version,
            "device": availability.device,
        }
        state = availability.build
        if isinstance(state, Unavailable) or self.candidate.file is None:
            missing = availability.run if not isinstance(state, Unavailable) else state
            self._stop("unavailable", _state_words(missing))
            return
        options = CompileOptions(precision=self.candidate.request.precision, workdir=workdir)
        program = Program(graphs={self.candidate.graph: self.candidate.file})
        compiled = self.worker.compile(program, options)
        if compiled.value is None:
            self._note_death(compiled)
            self._stop("error", f"build: {compiled.reason}")
            return
        self.found["compile_ms"] = compiled.value.compile_ms
        loaded = self.worker.load(self.candidate.graph)
        if loaded.value is None:
            self._note_death(loaded)
            self._stop("error", f"load: {loaded.reason}")
            return
        self.found["load_ms"] = loaded.value.load_ms
        cannot = loaded.value.cannot_run
        if cannot is not None:
            if cannot.placement is not None:
                self.found["placement"] = PlacementRecord.from_json(cannot.placement.to_json())
            self._stop("built", cannot.reason)

    def judge(
        self,
        reference: ModelReference,
        expected: Sequence[Expected],
        keep_in: Path | None,
        budget: Budget,
        progress: Progress,
    ) -> ResultRecord:
        """Run the battery, judge it, and say where the nodes ran."""
        parity = check_parity(
            reference,
            expected,
            self._run,
            time_is_up=lambda: budget.turn_is_over,
            progress=lambda done, total: progress(f"input {done + 1} of {total}"),
        )
        status: ResultStatus = status_of(parity)
        if status in ("fail", "error") and keep_in is not None:
            progress("the smallest input that fails")
            parity = keep_failures(
                parity,
                model=self.subject.original,
                reference=reference,
                expected=expected,
                run=self._run,
                folder=keep_in,
                stem=f"{self.subject.name}.{self.candidate.name}".translate(_FILE_NAME),
                command=self._replay,
            )
        reason = reason_of(parity)
        judged, wanted = len(parity.by_case), sum(item.problem is None for item in expected)
        if judged < wanted and status not in ("fail", "error"):
            left_out = f"judged on {judged} of {wanted} inputs: {budget.words}"
            reason = f"{reason}; {left_out}" if reason else left_out
        if status == "fail":
            progress("the attention that differs")
            parity = located(parity, self.subject, self.candidate, expected)
            reason = f"{reason}; {in_words(parity)}"
        record = self.record(status=status, reason=reason, parity=parity, replay=replay_of(parity))
        return record if status in ("fail", "error") else self._with_placement(record)

    def record(self, **more: Any) -> ResultRecord:
        """What is known so far."""
        status = more.pop("status", self.status)
        return ResultRecord(
            model=self.subject.name,
            model_sha256=self.subject.sha256,
            target=self.candidate.request.target.name,
            precision=self.candidate.request.precision,
            variant=self.candidate.variant,
            variant_sha256=self.candidate.sha256,
            graph=self.candidate.graph,
            forms=dict(self.candidate.forms),
            status="error" if status is None else status,
            **{"reason": self.reason, **self.found, **more},
        )

    def _stop(self, status: ResultStatus, reason: str) -> None:
        self.status, self.reason = status, reason

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.deaths >= MOST_DEATHS:
            raise RuntimeError("not run: the target died on earlier inputs")
        outcome: Outcome[dict[str, np.ndarray]] = self.worker.run(inputs, self.candidate.graph)
        self.found.setdefault("first_run_ms", outcome.seconds * 1e3)
        if outcome.value is None:
            self._note_death(outcome)
            raise RuntimeError(outcome.reason)
        return outcome.value

    def _note_death(self, outcome: Outcome[Any]) -> None:
        """Keep the signal and the last lines of a process that died, hung or took all memory.

        The first death says most. A crash may be one input's; after a hang or an exhausted memory,
        each of which costs the whole limit, no other input is tried.
        """
        if outcome.kind == "error":
            return
        self.deaths += 1 if outcome.kind == "crash" else MOST_DEATHS
        lines = [line.rstrip() for line in outcome.output_tail.splitlines() if line.strip()]
        self.found.setdefault("signal", outcome.signal)
        self.found.setdefault("last_output", tuple(lines[-LAST_LINES:]))

    def _with_placement(self, record: ResultRecord) -> ResultRecord:
        outcome = self.worker.placement(self.candidate.graph)
        if outcome.value is None:
            return dataclasses.replace(record, reason=f"placement unknown: {outcome.reason}")
        placement = outcome.value
        stated = PlacementRecord.from_json(placement.to_json())
        if placement.complete:
            return dataclasses.replace(record, placement=stated)
        return dataclasses.replace(
            record,
            placement=stated,
            status="fallback",
            reason=f"{len(placement.elsewhere)} nodes ran elsewhere: {placement.elsewhere[0]}",
        )

    def _replay(self, inputs: Path) -> str:
        """The command line that runs this candidate on kept inputs."""
        where = self.subject.original_file.parent
        source = where if self.subject.export is not None else self.candidate.file
        words = ["run", str(source), "-t", self.candidate.request.name, "--quick"]
        return shlex.join(["mha-export", *words, "--inputs", str(inputs)])


_FILE_NAME = str.maketrans({":": "-", " ": "-", "(": None, ")": None, "/": "-"})


def open_trials(
    stack: ExitStack, subject: Subject, candidates: Sequence[Candidate], *, limits: Limits
) -> list[Trial]:
    """A worker for each candidate; ``stack`` ends them all."""
    return [
        Trial(
            subject=subject,
            candidate=candidate,
            worker=stack.enter_context(TargetWorker(candidate.request.target.name, limits=limits)),
        )
        for candidate in candidates
    ]


def _state_words(state: object) -> str:
    if isinstance(state, Unavailable):
        return f"{state.reason}; {state.fix}"
    return "the export holds no graph for it"
