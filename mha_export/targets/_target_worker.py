"""A target in a worker process: compiled once, then run and timed as often as asked."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mha_export.targets._registry import target_named
from mha_export.targets._target import (
    Artifact,
    CannotRun,
    CompileOptions,
    Placement,
    Program,
    Session,
)
from mha_export.targets._worker import Job, Limits, Outcome, Worker


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What loading an artifact took, or why it cannot run here."""

    load_ms: float
    cannot_run: CannotRun | None = None


class TargetWorker:
    """One target in one process; every request comes back as an :class:`Outcome`.

    The process starts with the first request. When a request kills it, the next one starts another
    and loads the artifact again, so a crash on one input does not lose the others.

    Args:
        target: name, without precision.
        limits: for each request that states none.
    """

    def __init__(self, target: str, *, limits: Limits | None = None) -> None:
        self.target = target
        self.artifact: Artifact | None = None
        self._limits = limits or Limits()
        self._worker = Worker()
        self._folder: Path | None = None

    def __enter__(self) -> TargetWorker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def compile(
        self,
        program: Program,
        options: CompileOptions | None = None,
        *,
        limits: Limits | None = None,
    ) -> Outcome[Artifact]:
        """Build the program. Without ``options.workdir`` its files live until :meth:`close`."""
        options = options or CompileOptions()
        if options.workdir is None:
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="mha_export-"))
            options = replace(options, workdir=self._folder)
        job = Job(function=_compile, args=(self.target, program, options))
        outcome = self._worker.call(job, limits=limits or self._limits)
        self.artifact = outcome.value
        return outcome

    def load(self, graph: str = "main", *, limits: Limits | None = None) -> Outcome[Loaded]:
        """Load what :meth:`compile` built; :meth:`run` and the others do it by themselves."""
        job = Job(function=_load, args=(self._built(), graph))
        return self._worker.call(job, limits=limits or self._limits)

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        graph: str = "main",
        *,
        limits: Limits | None = None,
    ) -> Outcome[dict[str, np.ndarray]]:
        job = Job(function=_run, args=(self._built(), graph, dict(inputs)))
        return self._worker.call(job, limits=limits or self._limits)

    def time(
        self,
        inputs: Mapping[str, np.ndarray],
        graph: str = "main",
        *,
        repeats: int = 10,
        warmup: int = 3,
        limits: Limits | None = None,
    ) -> Outcome[Sequence[float]]:
        """Milliseconds of each run. Calls to several workers in turn interleave their rounds."""
        job = Job(function=_time, args=(self._built(), graph, dict(inputs), repeats, warmup))
        return self._worker.call(job, limits=limits or self._limits)

    def placement(self, graph: str = "main", *, limits: Limits | None = None) -> Outcome[Placement]:
        """Where the nodes of the last run went."""
        job = Job(function=_placement, args=(self._built(), graph))
        return self._worker.call(job, limits=limits or self._limits)

    def restart(self) -> None:
        """The next request gets a process without a history, and the artifact loaded in it."""
        self._worker.close()

    def close(self) -> None:
        """End the process and remove the files it compiled into a folder of ours."""
        self._worker.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _built(self) -> Artifact:
        if self.artifact is None:
            raise RuntimeError(
                f"target '{self.target}' has compiled nothing yet: call compile first"
            )
        return self.artifact


# What follows runs in the worker.

_sessions: dict[tuple[tuple[Path, ...], str], Session] = {}


def _compile(target: str, program: Program, options: CompileOptions) -> Artifact:
    _sessions.clear()
    return target_named(target).compile(program, options)


def _load(artifact: Artifact, graph: str) -> Loaded:
    _sessions.pop((artifact.files, graph), None)  # before another takes as much memory
    started = time.perf_counter()
    loaded = artifact.load(graph)
    load_ms = (time.perf_counter() - started) * 1e3
    if isinstance(loaded, CannotRun):
        return Loaded(load_ms=load_ms, cannot_run=loaded)
    _sessions[artifact.files, graph] = loaded
    return Loaded(load_ms=load_ms)


def _session(artifact: Artifact, graph: str) -> Session:
    key = (artifact.files, graph)
    if key not in _sessions:
        cannot = _load(artifact, graph).cannot_run
        if cannot is not None:
            from mha_export.errors import TargetUnavailableError

            raise TargetUnavailableError(cannot.reason, fix=cannot.fix)
    return _sessions[key]


def _run(artifact: Artifact, graph: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return _session(artifact, graph).run(inputs)


def _time(
    artifact: Artifact,
    graph: str,
    inputs: Mapping[str, np.ndarray],
    repeats: int,
    warmup: int,
) -> Sequence[float]:
    return list(_session(artifact, graph).time(inputs, repeats=repeats, warmup=warmup))


def _placement(artifact: Artifact, graph: str) -> Placement:
    return _session(artifact, graph).placement()
