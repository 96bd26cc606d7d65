"""What the JavaScript targets share: sessions in a Node process (``_node.py``), and artifacts."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.targets import _platform
from mha_export.targets._files import float_nodes, nodes_of, pack, work_folder
from mha_export.targets._node import FIX, NodeProcess, modules_folder, node_of
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Placement,
    Program,
    State,
    Unavailable,
)


def package_version(name: str) -> str | None:
    """Version of an installed npm package."""
    manifest = modules_folder() / "node_modules" / name / "package.json"
    try:
        return str(json.loads(manifest.read_text(encoding="utf-8"))["version"])
    except (OSError, KeyError, json.JSONDecodeError):
        return None


def javascript_availability(
    package: str, *, device: str, also: State | None = None
) -> Availability:
    """Whether Node, one npm package and (``also``) something else are here."""
    version = package_version(package)
    state: State
    if _platform.find_program("node") is None:
        state = Unavailable(reason="node is not on the PATH", fix="install Node.js 20 or newer")
    elif version is None:
        state = Unavailable(reason=f"{package} is not in {modules_folder()}", fix=FIX)
    elif isinstance(also, Unavailable):
        state = also
    else:
        state = Available(detail=f"{package} {version}")
    return Availability(build=state, run=state, runtime=package, version=version, device=device)


class JsSession:
    """A Node process with one loaded model (:class:`mha_export.targets.Session`)."""

    def __init__(self, artifact: JsArtifact, graph: str) -> None:
        self._artifact = artifact
        self._model = artifact.models[graph]
        self.device = ""
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._last: Mapping[str, np.ndarray] | None = None
        self._load()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory(prefix="mha_export-js-") as name:
            folder = Path(name)
            node = self._load()
            described = node.ask(self._request("run", node, inputs, folder))["outputs"]
            return {name: _read(described[name], folder) for name in self._outputs}

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        with tempfile.TemporaryDirectory(prefix="mha_export-js-") as name:
            node = self._load()
            request = self._request("time", node, inputs, Path(name))
            reply = node.ask(request | {"repeats": repeats, "warmup": warmup})
            return [float(ms) for ms in reply["times_ms"]]

    def placement(self) -> Placement:
        if self._artifact.backend == "browser-webgpu":
            lines = self._load().ask({"op": "placement"})["lines"]
            return webgpu_placement(lines, dict(nodes_of(self._model)))
        if self._artifact.backend == "directml":
            return self._profiled("DmlExecutionProvider")
        count = float_nodes(self._model)
        return Placement(
            float_compute_nodes=count,
            on_target=count,
            evidence=f"{self.device}: this build has no other provider",
        )

    def _profiled(self, provider: str) -> Placement:
        """Run the last inputs again under the runtime's profiler."""
        from mha_export.targets._ort_profile import placement_of

        if self._last is None:
            return Placement(float_compute_nodes=0, on_target=0, evidence="nothing was run")
        with tempfile.TemporaryDirectory(prefix="mha_export-js-") as name:
            node, folder = self._load(), Path(name)
            node.ask(self._request("profile", node, self._last, folder))
            (profile,) = folder.glob("profile*.json")
            events = json.loads(profile.read_text(encoding="utf-8"))
        return placement_of(events, provider=provider)

    def _load(self) -> NodeProcess:
        """The Node process of this backend, with this session's model loaded in it."""
        node = node_of(self._artifact.backend)
        if node.loaded is not self:
            request = {
                "op": "load",
                "model": node.path(self._model),
                "options": dict(self._artifact.options),
            }
            node.loaded = None
            answer = node.ask(request)
            node.loaded = self
            self.device = str(answer["device"])
            self._inputs, self._outputs = answer["inputs"], answer["outputs"]
        return node

    def _request(
        self, op: str, node: NodeProcess, inputs: Mapping[str, np.ndarray], folder: Path
    ) -> dict[str, Any]:
        self._last = inputs
        written = self._write(inputs, node, folder)
        return {"op": op, "inputs": written, "folder": node.path(folder)}

    def _write(
        self, inputs: Mapping[str, np.ndarray], node: NodeProcess, folder: Path
    ) -> dict[str, Any]:
        missing = set(self._inputs) - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        described = {}
        for index, name in enumerate(self._inputs):
            array = np.asarray(inputs[name], order="C")
            file = folder / f"input_{index}.bin"
            file.write_bytes(array.tobytes())
            described[name] = {
                "type": array.dtype.name,
                "dims": list(array.shape),
                "file": node.path(file),
            }
        return described


def _read(described: Mapping[str, Any], folder: Path) -> np.ndarray:
    data = (folder / described["file"]).read_bytes()
    return np.frombuffer(data, dtype=described["type"]).reshape(described["dims"]).copy()


def webgpu_placement(lines: Sequence[str], computes: Mapping[str, bool]) -> Placement:
    """Read the provider of each node off onnxruntime-web's verbose log.

    The log holds ``Node placements``, then for each provider ``Node(s) placed on [X]. Number of
    nodes: n`` and a line ``  Op (name)`` for each, or one line ``All nodes placed on [X]. Number of
    nodes: n``. The log has no types: of the nodes on the device all count as computing; of those
    elsewhere not those that make integers or truth values by the model (``computes``, by name).
    """
    on_target, elsewhere, shapes, provider = 0, [], 0, ""
    for line in lines:
        if found := PLACED.search(line):
            provider = found[2]
            if found[1] == "All nodes":
                everything = f"all {found[3]} nodes -> {provider}"
                on_target += int(found[3]) if "WebGpu" in provider else 0
                elsewhere += [] if "WebGpu" in provider else [everything]
        elif provider and (node := PLACED_NODE.search(line)) and "Memcpy" not in node[1]:
            if "WebGpu" in provider:
                on_target += 1
            elif node[1] in SHAPE_OPS or not computes.get(node[2], True):
                shapes += 1
            else:
                elsewhere.append(f"{node[2]} ({node[1]}) -> {provider}")
    return Placement(
        float_compute_nodes=on_target + len(elsewhere),
        on_target=on_target,
        elsewhere=tuple(elsewhere),
        evidence="onnxruntime-web's log of node placements"
        if provider
        else "onnxruntime-web logged no node placements",
        other_nodes=shapes if provider else None,
        other_on_target=0 if provider else None,
    )


PLACED = re.compile(r"(Node\(s\)|All nodes) placed on \[(\w+)\]\. Number of nodes: (\d+)")
PLACED_NODE = re.compile(r"\s{2,}(\w+) \((.*)\)\s*$")
SHAPE_OPS = frozenset(
    {
        *("Shape", "Size", "Gather", "Concat", "Unsqueeze", "Squeeze", "Constant", "Range"),
        *("ConstantOfShape", "Cast", "Slice", "Reshape", "Identity", "Equal", "Where", "Expand"),
    }
)
"""Ops the provider leaves to the CPU on purpose where they compute shapes; its log has no types."""


@dataclass(frozen=True, kw_only=True)
class JsArtifact:
    """Each graph in one ``.onnx`` file with its weights: what a web server or an app would ship."""

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]
    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def load(self, graph: str = "main") -> JsSession:
        return JsSession(self, graph)


def pack_for_javascript(
    program: Program,
    options: CompileOptions,
    *,
    backend: str,
    settings: Mapping[str, Any] | None = None,
) -> JsArtifact:
    """Pack each graph into one file: nothing is built, and a refusal comes when it is loaded."""
    folder = work_folder(options)
    threads = options.threads or _platform.usable_cpus()
    started = time.perf_counter()
    models = {}
    for role, source in program.graphs.items():
        models[role] = pack(source, folder / f"{role}.{backend}.onnx")
    return JsArtifact(
        files=tuple(models.values()),
        compile_ms=(time.perf_counter() - started) * 1e3,
        models=models,
        backend=backend,
        options={"threads": threads, **(settings or {})},
        notes={"threads": str(threads)},
    )
