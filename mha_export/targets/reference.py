"""The ONNX project's own reference implementation of the operators, in numpy.

It is slow and has no contrib domain: functions of the model (the ``portable`` file's bodies) are
inlined first, which also fills in the omitted inputs and default attributes that the evaluator
itself does not (onnx 1.23). ``GatherElements`` of onnx 1.23 fails on some shapes whose first axis
is 1; numpy says it in a line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_export.targets._files import embed_external
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Placement,
    Program,
    Target,
)

if TYPE_CHECKING:
    import onnx_ir as ir


class ReferenceSession:
    """A model in a ``ReferenceEvaluator``."""

    def __init__(self, model: ir.Model) -> None:
        self._evaluator = evaluator_for(model)
        self._nodes = sum(1 for node in model.graph if node.op_type != "Constant")

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = self._evaluator.output_names
        missing = set(self._evaluator.input_names) - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        feeds = {name: inputs[name] for name in self._evaluator.input_names}
        with np.errstate(all="ignore"):
            results = self._evaluator.run(None, feeds)
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        times = []
        for turn in range(warmup + repeats):
            started = time.perf_counter()
            self.run(inputs)
            if turn >= warmup:
                times.append((time.perf_counter() - started) * 1e3)
        return times

    def placement(self) -> Placement:
        return Placement(
            float_compute_nodes=self._nodes,
            on_target=self._nodes,
            evidence="numpy: there is no other device",
        )


def evaluator_for(model: ir.Model) -> Any:
    """A ``ReferenceEvaluator`` of a model whose functions have been inlined into it.

    The evaluator ignores ``overload`` and refuses omitted trailing inputs of a function; inlining
    keeps to the standard on both. Its ``rt_nodes_`` may be wrapped further.
    """
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator
    from onnx_ir.passes.common import InlinePass

    if model.functions:
        model = model.clone()
        InlinePass()(model)
    proto = ir.to_proto(model)
    embed_external(model, proto)
    evaluator = ReferenceEvaluator(proto)
    for node in evaluator.rt_nodes_:
        if node.op_type == "GatherElements" and node.onnx_node.domain == "":
            axis = next((a.i for a in node.onnx_node.attribute if a.name == "axis"), 0)
            node.run = partial(_gather_elements, axis=axis)
    return evaluator


def _gather_elements(
    data: np.ndarray, indices: np.ndarray, *, axis: int, **_: Any
) -> tuple[np.ndarray]:
    """``out[i, j] = data[i, indices[i, j]]`` along ``axis``; ``data`` may be longer elsewhere."""
    axis %= data.ndim
    limits = [slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape)]
    wrapped = np.where(indices < 0, indices + data.shape[axis], indices)
    return (np.take_along_axis(data[tuple(limits)], wrapped, axis=axis),)


@dataclass(frozen=True, kw_only=True)
class ReferenceArtifact:
    """The exported files themselves: there is nothing to compile."""

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]

    def load(self, graph: str = "main") -> ReferenceSession:
        import onnx_ir as ir

        return ReferenceSession(ir.load(self.models[graph]))


class ReferenceTarget(Target):
    """onnx's ``ReferenceEvaluator``."""

    name = "reference"
    summary = "the ONNX project's reference implementation (numpy)"
    default_forms = ("onnx", "primitive")
    max_opset = 26

    def availability(self) -> Availability:
        version = metadata.version("onnx")
        state = Available(detail=f"onnx {version} ReferenceEvaluator")
        return Availability(build=state, run=state, runtime="onnx", version=version, device="numpy")

    def compile(self, program: Program, options: CompileOptions) -> ReferenceArtifact:
        """Load each graph once, so that one it cannot read is refused here and not later."""
        import onnx_ir as ir

        started = time.perf_counter()
        for path in program.graphs.values():
            ReferenceSession(ir.load(path))
        return ReferenceArtifact(
            files=tuple(program.graphs.values()),
            compile_ms=(time.perf_counter() - started) * 1e3,
            models=dict(program.graphs),
        )


TARGET = ReferenceTarget()
