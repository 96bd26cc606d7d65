"""OpenVINO's own runtime on the CPU.

Facts this file rests on (OpenVINO 2026.4):

* on a processor with AMX it computes f32 models in bf16 unless told otherwise (errors of 1e-2):
  ``INFERENCE_PRECISION_HINT`` is always set and recorded; ``f32``, ``f16`` and ``bf16`` are three
  columns of a report;
* told f16 on a processor that has bf16 and no f16 arithmetic it computes in bf16: such a node is
  not where it was asked to be (``fallback``);
* a blob that holds a fused ``RoPE`` node computes garbage once it is imported, while the model it
  was exported from is right: such a graph is kept as OpenVINO's IR, and compiled when it is loaded;
* it can crash on a legal graph (an exact-size static past): it runs in a worker process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _platform
from mha_export.targets._files import graph_names, work_folder
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Placement,
    Program,
    State,
    Target,
    Unavailable,
)

FIX = "pip install 'mha-export[openvino]'"
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
HALVES = frozenset({"f16", "bf16"})
"""A processor that has one of them is given it where the other was asked for."""
NOT_COMPUTE = frozenset({"Input", "Output", "Const", "Constant", "Reorder", "Reshape", "ShapeOf"})
"""Layer types of an executed graph that move or describe tensors."""
NOT_IN_A_BLOB = frozenset({"RoPE"})
"""Layer types that an exported blob loses the meaning of (seen with 2026.4)."""


class OpenVinoSession:
    """A compiled model, imported from its blob, or compiled from its IR."""

    def __init__(self, artifact: OpenVinoArtifact, graph: str) -> None:
        import openvino

        core, file = openvino.Core(), artifact.models[graph]
        settings = dict(artifact.settings)
        if file.suffix == ".xml":
            self._compiled = core.compile_model(str(file), "CPU", settings)
        else:
            self._compiled = core.import_model(file.read_bytes(), "CPU", settings)
        self._request = self._compiled.create_infer_request()
        self._inputs = artifact.inputs[graph]
        self._outputs = artifact.outputs[graph]
        self._precision = artifact.settings["INFERENCE_PRECISION_HINT"]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._feed(inputs)
        self._request.infer()
        return {
            name: _array(self._request.get_output_tensor(index))
            for index, name in enumerate(self._outputs)
        }

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        self._feed(inputs)
        for _ in range(warmup):
            self._request.infer()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self._request.infer()
            times.append((time.perf_counter() - started) * 1e3)
        return times

    def placement(self) -> Placement:
        """Nodes of the executed graph by the precision they ran in: all are the CPU plugin's."""
        ran = [
            (layer, precision)
            for layer, precision in _executed(self._compiled)
            if precision in FLOATS and layer not in NOT_COMPUTE
        ]
        counts = sorted(Counter(precision for _, precision in ran).items())
        seen = ", ".join(f"{count} in {name}" for name, count in counts)
        other = tuple(
            f"{layer} in {precision}, not {self._precision}"
            for layer, precision in ran
            if {precision, self._precision} == HALVES
        )
        return Placement(
            float_compute_nodes=len(ran),
            on_target=len(ran) - len(other),
            elsewhere=other,
            evidence=f"openvino executed graph, hint {self._precision}: {seen or 'none'}",
        )

    def _feed(self, inputs: Mapping[str, np.ndarray]) -> None:
        missing = set(self._inputs) - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        for index, name in enumerate(self._inputs):
            self._request.set_input_tensor(index, _tensor(np.asarray(inputs[name])))


@dataclass(frozen=True, kw_only=True)
class OpenVinoArtifact:
    """Blobs of compiled models, or IR files where a blob would be wrong.

    Attributes:
        models: role to ``.blob`` or ``.xml``.
        inputs, outputs: ONNX names in graph order; a blob may lose them.
        settings: properties given to the plugin, at compiling and at loading.
    """

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)

    def load(self, graph: str = "main") -> OpenVinoSession:
        return OpenVinoSession(self, graph)


class OpenVinoTarget(Target):
    """OpenVINO on the CPU, in the precision asked for (default f32)."""

    name = "openvino"
    summary = "OpenVINO on the CPU"
    precisions: tuple[str, ...] = ("f32", "f16", "bf16")
    default_forms = ("onnx", "ort-mha", "ort-gqa", "primitive")
    max_opset = 25

    def availability(self) -> Availability:
        try:
            version = metadata.version("openvino")
        except metadata.PackageNotFoundError:
            gone = Unavailable(reason="openvino is not installed", fix=FIX)
            return Availability(build=gone, run=gone, runtime="openvino")
        state: State = Available(detail=f"openvino {version}")
        return Availability(
            build=state, run=state, runtime="openvino", version=version, device="CPU"
        )

    def compile(self, program: Program, options: CompileOptions) -> OpenVinoArtifact:
        """Compile each graph for the CPU and export the blob."""
        try:
            import openvino
        except ImportError as error:
            raise TargetUnavailableError(f"target 'openvino': {error}", fix=FIX) from error
        precision = options.precision or "f32"
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": str(options.threads or _platform.usable_cpus()),
        }
        folder = work_folder(options)
        core = openvino.Core()
        started = time.perf_counter()
        models: dict[str, Path] = {}
        inputs: dict[str, tuple[str, ...]] = {}
        outputs: dict[str, tuple[str, ...]] = {}
        for role, source in program.graphs.items():
            inputs[role], outputs[role] = graph_names(source)
            model = core.read_model(str(source))
            compiled = core.compile_model(model, "CPU", settings)
            models[role] = _save(model, compiled, folder / f"{role}.openvino-{precision}")
        return OpenVinoArtifact(
            files=tuple(path for path in sorted(folder.iterdir()) if ".openvino-" in path.name),
            compile_ms=(time.perf_counter() - started) * 1e3,
            models=models,
            inputs=inputs,
            outputs=outputs,
            settings=settings,
            notes={
                "precision": precision,
                "threads": settings["INFERENCE_NUM_THREADS"],
                "artifact": ", ".join(sorted({path.suffix[1:] for path in models.values()})),
            },
        )


def _save(model: Any, compiled: Any, stem: Path) -> Path:
    """Write what loads fastest and right: the blob, else the IR."""
    import openvino

    if NOT_IN_A_BLOB.isdisjoint(layer for layer, _ in _executed(compiled)):
        blob = stem.with_name(f"{stem.name}.blob")
        blob.write_bytes(compiled.export_model().getvalue())
        return blob
    file = stem.with_name(f"{stem.name}.xml")
    openvino.save_model(model, str(file), compress_to_fp16=False)
    return file


def _tensor(array: np.ndarray) -> Any:
    import openvino

    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        tensor = openvino.Tensor(openvino.Type.bf16, openvino.Shape(list(array.shape)))
        tensor.data[:] = array.view(np.uint16).view(tensor.data.dtype).reshape(tensor.data.shape)
        return tensor
    return openvino.Tensor(array)


def _array(tensor: Any) -> np.ndarray:
    if tensor.element_type.get_type_name() == "bf16":
        bits = np.asarray(tensor.data, order="C").view(np.uint16)
        return np.array(bits.view(ml_dtypes.bfloat16))
    return np.array(tensor.data)


def _executed(compiled: Any) -> list[tuple[str, str]]:
    """(layer type, precision) of each node of the graph as the plugin executes it."""
    found = []
    for op in compiled.get_runtime_model().get_ops():
        info = op.get_rt_info()
        layer = str(info["layerType"].value if "layerType" in info else op.get_type_name())
        precision = info["runtimePrecision"].value if "runtimePrecision" in info else ""
        found.append((layer, str(precision).lower().replace("fp", "f")))
    return found


TARGET = OpenVinoTarget()
