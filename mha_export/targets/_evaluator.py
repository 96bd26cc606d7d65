"""Evaluators: what recognition and proof run small graphs on.

Hundreds of tiny models go through one, so the dependable runtimes (ONNX Runtime CPU, onnx's
reference) run in this process; every other target runs in one worker that all its models share.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mha_export.errors import MhaExportError
from mha_export.evaluator import Arrays, Evaluator
from mha_export.targets._files import model_bytes
from mha_export.targets._registry import target_named
from mha_export.targets._target import CannotRun, CompileOptions, Program, Target
from mha_export.targets._worker import Job, Limits, Worker

if TYPE_CHECKING:
    import onnx_ir as ir

LIMITS = Limits(seconds=60.0)


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

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        from mha_export.targets._ort import from_ort_value, open_session, quiet_run, to_ort_value

        try:
            session = open_session(model_bytes(model), self._setup)
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

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        from mha_export.targets.reference import ReferenceSession

        try:
            return ReferenceSession(model).run(inputs)
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
        weakref.finalize(self, self._worker.close)

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        args = (self._target, self._precision, model_bytes(model), dict(inputs))
        outcome = self._worker.call(Job(function=evaluate, args=args), limits=self._limits)
        if not outcome.ok or outcome.value is None:
            raise EvaluationError(f"{self.name}: {outcome.reason}", fix=outcome.fix)
        return outcome.value

    def close(self) -> None:
        self._worker.close()


def evaluate(
    target: str, precision: str | None, model: bytes, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Compile, load and run once; the body of one worker request."""
    with tempfile.TemporaryDirectory(prefix="mha_export-eval-", ignore_cleanup_errors=True) as name:
        path = Path(name) / "model.onnx"
        path.write_bytes(model)
        options = CompileOptions(precision=precision, threads=1, workdir=Path(name) / "built")
        artifact = target_named(target).compile(Program(graphs={"main": path}), options)
        session = artifact.load()
        if isinstance(session, CannotRun):
            raise EvaluationError(session.reason, fix=session.fix)
        return session.run(inputs)


def _input(inputs: Arrays, name: str) -> np.ndarray:
    try:
        return np.asarray(inputs[name])
    except KeyError:
        raise ValueError(f"no array for input '{name}'; got {sorted(inputs)}") from None


def _words(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {error}"
