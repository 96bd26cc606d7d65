"""Evaluators: what recognition and proof run small graphs on.

Hundreds of tiny models go through one, so the dependable runtimes (ONNX Runtime CPU, onnx's
reference) run in this process; every other target runs in one worker that all its models share.
"""

from __future__ import annotations

import hashlib
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from mha_export.errors import MhaExportError
from mha_export.evaluator import Arrays, Evaluator
from mha_export.targets._files import model_bytes
from mha_export.targets._registry import target_named
from mha_export.targets._target import CannotRun, CompileOptions, Program, Session, Target
from mha_export.targets._worker import Job, Limits, Worker

if TYPE_CHECKING:
    import onnx_ir as ir

LIMITS = Limits(seconds=60.0)
S = TypeVar("S")


class _Recent(Generic[S]):
    """The sessions of the last few models: a proof runs the same two on every case."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._kept: OrderedDict[object, tuple[object, S]] = OrderedDict()

    def get(self, key: object, owner: object, make: Callable[[], S]) -> S:
        """The session under ``key``. ``owner`` is kept alive with it, so that an id stays its."""
        if key not in self._kept:
            self._kept[key] = (owner, make())
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]


class EvaluationError(MhaExportError):
    """A small graph could not be loaded or run; the message is the runtime's own."""


def evaluator_of(target: Target | str, precision: str | None = None) -> Evaluator:
    """The evaluator that runs models as ``target`` does.

    Errors:
        mha_export.errors.InputError: no target has that name.
    """
    chosen = target_named(target) if isinstance(target, str) else target
    if chosen.name == "cpu":
        return _OrtCpuEvaluator()
    if chosen.name == "reference":
        return _ReferenceEvaluator()
    return WorkerEvaluator(chosen, precision)


class _OrtCpuEvaluator:
    """ONNX Runtime CPU, in this process, one thread, optimised as the ``cpu`` target does."""

    def __init__(self) -> None:
        import onnxruntime

        from mha_export.targets._ort import SessionSetup

        self.name = f"cpu (onnxruntime {onnxruntime.__version__})"
        self._setup = SessionSetup(threads=1)
        self._recent: _Recent[onnxruntime.InferenceSession] = _Recent()

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        from mha_export.targets._ort import from_ort_value, open_session, quiet_run, to_ort_value

        try:
            session = self._recent.get(
                id(model), model, lambda: open_session(model_bytes(model), self._setup)
            )
            names = [output.name for output in session.get_outputs()]
            feeds = {
                value.name: to_ort_value(_input(inputs, value.name))
                for value in session.get_inputs()
            }
            results = session.run_with_ort_values(names, feeds, quiet_run())
        except Exception as error:
            raise EvaluationError(_words(self.name, error)) from error
        return {name: from_ort_value(value) for name, value in zip(names, results, strict=True)}


class _ReferenceEvaluator:
    """onnx's reference implementation, in this process."""

    def __init__(self) -> None:
        import onnx

        self.name = f"reference (onnx {onnx.__version__})"
        self._recent: _Recent[Session] = _Recent()

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        from mha_export.targets.reference import ReferenceSession

        try:
            session = self._recent.get(id(model), model, lambda: ReferenceSession(model))
            return session.run(inputs)
        except Exception as error:
            raise EvaluationError(_words(self.name, error)) from error


class WorkerEvaluator:
    """Any target, in one worker process: a crash is an :class:`EvaluationError` of one model."""

    def __init__(
        self, target: Target, precision: str | None = None, *, limits: Limits = LIMITS
    ) -> None:
        availability = target.availability()
        label = target.name if precision is None else f"{target.name}:{precision}"
        self.name = f"{label} ({availability.runtime} {availability.version})"
        self._target = target.name
        self._precision = precision
        self._limits = limits
        self._worker = Worker()
        # Here and not in the worker, which may die, and which leaves without cleaning up.
        self._folder = tempfile.TemporaryDirectory(
            prefix="mha_export-eval-", ignore_cleanup_errors=True
        )
        weakref.finalize(self, _end, self._worker, self._folder)

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        folder = self._folder.name
        args = (self._target, self._precision, model_bytes(model), dict(inputs), folder)
        outcome = self._worker.call(Job(function=evaluate, args=args), limits=self._limits)
        if not outcome.ok or outcome.value is None:
            raise EvaluationError(f"{self.name}: {outcome.reason}", fix=outcome.fix)
        return outcome.value

    def close(self) -> None:
        self._worker.close()


def _end(worker: Worker, folder: tempfile.TemporaryDirectory[str]) -> None:
    worker.close()
    folder.cleanup()


def evaluate(
    target: str, precision: str | None, model: bytes, inputs: Mapping[str, np.ndarray], folder: str
) -> dict[str, np.ndarray]:
    """Compile and load, or take the session of an equal recent model, and run once.

    The body of one worker request.
    """
    key = (target, precision, hashlib.sha256(model).hexdigest())
    _, session = _in_worker.get(key, None, lambda: _opened(target, precision, model, folder))
    return session.run(inputs)


_in_worker: _Recent[tuple[tempfile.TemporaryDirectory[str], Session]] = _Recent()


def _opened(
    target: str, precision: str | None, model: bytes, within: str
) -> tuple[tempfile.TemporaryDirectory[str], Session]:
    """A session, and the folder it may still read from."""
    folder = tempfile.TemporaryDirectory(dir=within, ignore_cleanup_errors=True)
    path = Path(folder.name) / "model.onnx"
    path.write_bytes(model)
    options = CompileOptions(precision=precision, threads=1, workdir=Path(folder.name) / "built")
    artifact = target_named(target).compile(Program(graphs={"main": path}), options)
    session = artifact.load()
    if isinstance(session, CannotRun):
        raise EvaluationError(session.reason, fix=session.fix)
    return folder, session


def _input(inputs: Arrays, name: str) -> np.ndarray:
    try:
        return np.asarray(inputs[name])
    except KeyError:
        raise ValueError(f"no array for input '{name}'; got {sorted(inputs)}") from None


def _words(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {error}"
