"""tract: a small pure-Rust inference engine, on the CPU.

Facts this file rests on (tract 0.23): contrib ops are partly honoured (``unidirectional`` of
MultiHeadAttention is ignored, a past with ``is_causal`` is wrong), so the probes decide. Plans made
for symbolic dimensions fail at the first run where plans for numbers do not: the session plans once
for each set of shapes. It has no format of its own that its Python package writes; the artifact is
the ONNX file in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mha_export.errors import TargetUnavailableError
from mha_export.targets._files import float_nodes, graph_names, pack, work_folder
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Placement,
    Program,
    Target,
    Unavailable,
)

FIX = "pip install tract"
KEPT_PLANS = 8
KINDS = {
    "bool": "bool",
    **{f"float{size}": f"f{size}" for size in (16, 32, 64)},
    **{f"int{size}": f"i{size}" for size in (8, 16, 32, 64)},
    **{f"uint{size}": f"u{size}" for size in (8, 16, 32, 64)},
}
"""numpy's element types in tract's words."""

T = TypeVar("T")


class TractSession:
    """A model, and a plan for each of the latest sets of input shapes."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._inputs, self._outputs = graph_names(model)
        self._plans: dict[tuple[str, ...], Any] = {}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        feeds = self._feeds(inputs)
        results = _told(self._plan(feeds).run, feeds)
        return {
            name: result.to_numpy() for name, result in zip(self._outputs, results, strict=True)
        }

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        feeds = self._feeds(inputs)
        plan = self._plan(feeds)
        times = []
        for turn in range(warmup + repeats):
            started = time.perf_counter()
            _told(plan.run, feeds)
            if turn >= warmup:
                times.append((time.perf_counter() - started) * 1e3)
        return times

    def placement(self) -> Placement:
        count = float_nodes(self._model)
        return Placement(
            float_compute_nodes=count, on_target=count, evidence="tract has no other device"
        )

    def _feeds(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        missing = set(self._inputs) - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        return [np.asarray(inputs[name]) for name in self._inputs]

    def _plan(self, feeds: list[np.ndarray]) -> Any:
        facts = tuple(_fact(array) for array in feeds)
        if facts not in self._plans:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[facts] = _told(_planned, self._model, facts)
        return self._plans[facts]


def _fact(array: np.ndarray) -> str:
    """Shape and element type as tract writes them: ``2,5,64,f32``."""
    try:
        kind = KINDS[array.dtype.name]
    except KeyError:
        raise RuntimeError(f"tract's Python package has no element type {array.dtype}") from None
    return ",".join([*map(str, array.shape), kind])


def _planned(model: Path, facts: tuple[str, ...]) -> Any:
    parsed = _parsed(model)
    for index, fact in enumerate(facts):
        parsed.set_input_fact(index, fact)
    for index in range(parsed.output_count()):
        parsed.set_output_fact(index, None)  # the file's symbols would contradict the numbers
    return parsed.into_model().into_runnable()


def _parsed(model: Path) -> Any:
    import tract

    return tract.onnx().load(str(model))


def _told(call: Callable[..., T], *args: Any) -> T:
    """Make a call of tract.

    Errors:
        RuntimeError: tract refused; the message is the innermost of its reasons first.
    """
    import tract

    try:
        return call(*args)
    except tract.TractError as error:
        reasons = str(error).partition("Stack backtrace:")[0].splitlines()
        said = [line.strip() for line in reasons if line.strip() not in ("", "Caused by:")]
        raise RuntimeError("\n".join(reversed(said))) from error


@dataclass(frozen=True, kw_only=True)
class TractArtifact:
    """Each graph in one ``.onnx`` file with its weights."""

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]

    def load(self, graph: str = "main") -> TractSession:
        return TractSession(self.models[graph])


class TractTarget(Target):
    """tract on the CPU."""

    name = "tract"
    summary = "tract (Rust, CPU)"
    default_forms = ("onnx", "primitive")
    max_opset = 24

    def availability(self) -> Availability:
        try:
            version = metadata.version("tract")
        except metadata.PackageNotFoundError:
            gone = Unavailable(reason="tract is not installed", fix=FIX)
            return Availability(build=gone, run=gone, runtime="tract")
        state = Available(detail=f"tract {version}")
        return Availability(build=state, run=state, runtime="tract", version=version, device="CPU")

    def compile(self, program: Program, options: CompileOptions) -> TractArtifact:
        """Pack each graph into one file and parse it, so that a refusal of a node comes now."""
        try:
            import tract  # noqa: F401
        except ImportError as error:
            raise TargetUnavailableError(f"target 'tract': {error}", fix=FIX) from error
        folder = work_folder(options)
        started = time.perf_counter()
        models = {}
        for role, source in program.graphs.items():
            models[role] = pack(source, folder / f"{role}.tract.onnx", keep_shapes=False)
            _told(_parsed, models[role])
        return TractArtifact(
            files=tuple(models.values()),
            compile_ms=(time.perf_counter() - started) * 1e3,
            models=models,
        )


TARGET = TractTarget()
