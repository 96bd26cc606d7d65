"""tract: a small pure-Rust inference engine, on the CPU.

Facts this file rests on (tract 0.23): contrib ops are partly honoured (``unidirectional`` of
MultiHeadAttention is ignored, a past with ``is_causal`` is wrong), so the probes decide. It has no
format of its own that its Python package writes; the artifact is the ONNX file in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.errors import TargetUnavailableError
from mha_export.targets._files import float_nodes, graph_names, pack, work_folder
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Placement,
    Program,
    Unavailable,
)

FIX = "pip install tract"


class TractSession:
    """A runnable plan."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._inputs, self._outputs = graph_names(model)
        self._runnable = runnable(model)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = self._runnable.run(self._feeds(inputs))
        return {
            name: result.to_numpy() for name, result in zip(self._outputs, results, strict=True)
        }

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        feeds = self._feeds(inputs)
        times = []
        for turn in range(warmup + repeats):
            started = time.perf_counter()
            self._runnable.run(feeds)
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


def runnable(model: Path) -> Any:
    """Parse, infer, optimise.

    Errors:
        RuntimeError: tract refused the model; the message is its own.
    """
    import tract

    try:
        return tract.onnx().load(str(model)).into_model().into_runnable()
    except tract.TractError as error:
        raise RuntimeError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class TractArtifact:
    """Each graph in one ``.onnx`` file with its weights."""

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]

    def load(self, graph: str = "main") -> TractSession:
        return TractSession(self.models[graph])


class TractTarget:
    """tract on the CPU."""

    name = "tract"
    summary = "tract (Rust, CPU)"
    precisions: tuple[str, ...] = ()
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
        """Pack each graph into one file and plan it once, so that a refusal comes now."""
        try:
            import tract  # noqa: F401
        except ImportError as error:
            raise TargetUnavailableError(f"target 'tract': {error}", fix=FIX) from error
        folder = work_folder(options)
        started = time.perf_counter()
        models = {}
        for role, source in program.graphs.items():
            models[role] = pack(source, folder / f"{role}.tract.onnx")
            runnable(models[role])
        return TractArtifact(
            files=tuple(models.values()),
            compile_ms=(time.perf_counter() - started) * 1e3,
            models=models,
        )


TARGET = TractTarget()
