"""What every target on ONNX Runtime's Python package shares: set-up, sessions, artifacts.

Verified against onnxruntime 1.32. Facts this file rests on:

* ``get_providers()`` and ``get_available_providers()`` prove nothing: the GPU package lists CUDA
  on a machine without a GPU and then runs on the CPU. Placement is read off a profile.
* Idle threads that spin slow the other sessions of the process 3 to 10 times: spinning is off.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _platform
from mha_export.targets._files import work_folder
from mha_export.targets._serve import resolve
from mha_export.targets._target import CompileOptions, Placement, Program

BFLOAT16 = 16
"""``TensorProto.BFLOAT16``."""

_FATAL = 4
"""Log severity below which ONNX Runtime stays off the terminal."""

DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-migraphx",
    "onnxruntime-rocm",
    "onnxruntime-silicon",
)
"""Distributions that all install the folder ``onnxruntime``."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A provider that comes as a library of its own: registered by name before a session."""

    registration: str
    library: Path
    ep_name: str


@dataclass(frozen=True, kw_only=True)
class SessionSetup:
    """How a session is made; plain data, so that it travels to a worker process.

    Attributes:
        providers: (name, options), first choice first. CPU is always the last.
        device: where inputs and outputs are bound while timing (``cpu``, ``cuda``, ``dml``).
        config: ``session.*`` entries.
        mem_pattern: DirectML demands False.
        prepare: ``module:function`` to call once in a process before the first session.
        ep_context: the provider saves what it compiled as EPContext nodes, and loads it again.
    """

    providers: tuple[tuple[str, Mapping[str, str]], ...] = (("CPUExecutionProvider", {}),)
    plugin: Plugin | None = None
    device: str = "cpu"
    threads: int = field(default_factory=_platform.usable_cpus)
    optimise: bool = True
    mem_pattern: bool = True
    prepare: str | None = None
    ep_context: bool = False
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def provider(self) -> str:
        """The provider whose nodes count as on the target."""
        return self.plugin.ep_name if self.plugin else self.providers[0][0]


def installed_version() -> str | None:
    """Version of the installed onnxruntime, whichever distribution it came in."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@cache
def clash() -> tuple[str, str] | None:
    """(reason, fix) when distributions that overwrite each other's files are both installed."""
    return clash_among(
        {
            d.metadata["Name"].lower().replace("_", "-")
            for d in metadata.distributions()
            if d.metadata
        }
    )


def clash_among(names: set[str]) -> tuple[str, str] | None:
    """As :func:`clash`, for a given set of distribution names."""
    here = [name for name in DISTRIBUTIONS if name in names]
    if len(here) < 2:
        return None
    keep = next(name for name in reversed(here) if name != "onnxruntime")
    return (
        f"{' and '.join(here)} are installed over each other: they provide the same files, and "
        "whichever came last is what runs",
        f"pip uninstall -y {' '.join(here)} && pip install {keep}",
    )


def import_ort(target: str, fix: str) -> Any:
    """The ``onnxruntime`` module.

    Errors:
        mha_export.errors.TargetUnavailableError: it is not installed or does not load.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise TargetUnavailableError(f"target '{target}': {error}", fix=fix) from error
    return onnxruntime


def session_options(ort: Any, setup: SessionSetup) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL  # what is refused comes back as an exception
    options.intra_op_num_threads = setup.threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = setup.mem_pattern
    options.graph_optimization_level = (
        # Not ALL: its last level bakes this processor's layouts into the artifact.
        ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        if setup.optimise
        else ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    for key in ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning"):
        options.add_session_config_entry(key, "0")
    for key, value in setup.config.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(model: str | bytes, setup: SessionSetup, options: Any | None = None) -> Any:
    """An ``InferenceSession`` on exactly the providers of ``setup``.

    Errors:
        RuntimeError: the runtime refused the model, or the plugin found no device.
    """
    import onnxruntime as ort

    if setup.prepare is not None:
        resolve(setup.prepare)()
    options = options or session_options(ort, setup)
    if setup.plugin is None:
        return ort.InferenceSession(
            model, options, providers=[(name, dict(opts)) for name, opts in setup.providers]
        )
    devices = plugin_devices(setup.plugin)
    if not devices:
        raise RuntimeError(f"{setup.plugin.ep_name} found no device")
    options.add_provider_for_devices(devices[:1], dict(setup.providers[0][1]))
    return ort.InferenceSession(model, options)


def quiet_run() -> Any:
    """Options of a run in this process whose refusals come back as exceptions and nowhere else."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    return options


def plugin_devices(plugin: Plugin) -> list[Any]:
    """Devices of a plugin provider, registered at the first call. Empty: it found none."""
    import onnxruntime as ort

    _register(plugin)
    return [device for device in ort.get_ep_devices() if device.ep_name == plugin.ep_name]


@cache
def _register(plugin: Plugin) -> None:
    import onnxruntime as ort

    ort.register_execution_provider_library(plugin.registration, str(plugin.library))


def to_ort_value(array: np.ndarray) -> Any:
    """An OrtValue on the CPU; bfloat16 goes through its bits, which numpy has no dtype for."""
    import onnxruntime as ort

    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_ort_value(value: Any) -> np.ndarray:
    """The array of a CPU OrtValue."""
    if value.element_type() != BFLOAT16:
        return np.asarray(value.numpy())
    shape, size = value.shape(), value.tensor_size_in_bytes()
    if not size:
        return np.empty(shape, ml_dtypes.bfloat16)
    bits = ctypes.string_at(value.data_ptr(), size)
    return np.frombuffer(bits, dtype=ml_dtypes.bfloat16).reshape(shape).copy()


class OrtSession:
    """A loaded ONNX Runtime session (:class:`mha_export.targets.Session`)."""

    def __init__(self, model: Path, setup: SessionSetup) -> None:
        self._model = model
        self._setup = setup
        self._session = open_session(str(model), setup)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._last: Mapping[str, np.ndarray] | None = None

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = self._bindable(inputs)
        self._last = inputs
        results = self._session.run_with_ort_values(self._outputs, values)
        return {
            name: from_ort_value(value) for name, value in zip(self._outputs, results, strict=True)
        }

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        binding = self._bind(inputs)
        for _ in range(warmup):
            self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            times.append((time.perf_counter() - started) * 1e3)
        return times

    def placement(self) -> Placement:
        from mha_export.targets._ort_profile import profiled_placement

        return profiled_placement(self._model, self._setup, self._last)

    def _bind(self, inputs: Mapping[str, np.ndarray]) -> Any:
        self._last = inputs
        binding = self._session.io_binding()
        for name, value in self._bindable(inputs).items():
            if self._setup.device == "cpu":
                binding.bind_ortvalue_input(name, value)
            else:
                binding.bind_ortvalue_input(name, self._on_device(inputs[name]))
        for name in self._outputs:
            binding.bind_output(name, self._setup.device)
        binding.synchronize_inputs()
        return binding

    def _on_device(self, array: np.ndarray) -> Any:
        import onnxruntime as ort

        if array.dtype == ml_dtypes.bfloat16:
            raise RuntimeError("onnxruntime's Python API cannot place a bfloat16 array on a device")
        return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), self._setup.device, 0)

    def _bindable(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        missing = self._inputs.keys() - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        return {name: to_ort_value(np.asarray(inputs[name])) for name in self._inputs}


@dataclass(frozen=True, kw_only=True)
class OrtArtifact:
    """Optimised models that load without optimising again (:class:`mha_export.targets.Artifact`).

    Attributes:
        models: role to ``.onnx`` file; weights lie beside it.
        setup: how to load them.
        notes: what a record should carry (threads, strictness).
    """

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]
    setup: SessionSetup
    notes: Mapping[str, str] = field(default_factory=dict)

    def load(self, graph: str = "main") -> OrtSession:
        return OrtSession(self.models[graph], self.setup)


STRICT = "session.disable_cpu_ep_fallback"


def optimise_strictly(
    program: Program, setup: SessionSetup, options: CompileOptions
) -> OrtArtifact:
    """As :func:`optimise_once`, with the CPU forbidden to take any node if the graph allows it.

    Where the provider leaves nodes to the CPU the session is made again without the ban, so that
    the placement can name them; ``notes["strict"]`` says which of the two it was.
    """
    strict = replace(setup, config={**setup.config, STRICT: "1"})
    try:
        artifact = optimise_once(program, strict, options)
    except Exception as error:
        if "fallback" not in str(error).lower():
            raise
        artifact = optimise_once(program, setup, options)
        return replace(artifact, notes={**artifact.notes, "strict": "no: the CPU took nodes"})
    return replace(artifact, notes={**artifact.notes, "strict": "yes"})


def _save_to(saved: Path, options: Any, setup: SessionSetup) -> None:
    """Have a session save what it compiled: the provider's own blobs, or the optimised graph."""
    if setup.ep_context:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(saved))
        options.add_session_config_entry("ep.context_embed_mode", "1")
        return
    options.optimized_model_filepath = str(saved)
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{saved.name}.data"
    )
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
    )


def optimise_once(program: Program, setup: SessionSetup, options: CompileOptions) -> OrtArtifact:
    """Optimise each graph, save it, and promise to load the saved one as it is.

    Errors:
        RuntimeError: the runtime refused a graph; the message is its own.
    """
    import onnxruntime as ort

    folder = work_folder(options)
    started = time.perf_counter()
    models: dict[str, Path] = {}
    for role, source in program.graphs.items():
        saved = folder / f"{role}.ort-optimised.onnx"
        chosen = session_options(ort, setup)
        if not options.keep:
            open_session(str(source), setup, chosen)
            continue
        _save_to(saved, chosen, setup)
        open_session(str(source), setup, chosen)
        if not saved.is_file():
            raise RuntimeError(f"{setup.provider} compiled the graph and saved nothing")
        models[role] = saved
    compile_ms = (time.perf_counter() - started) * 1e3
    return OrtArtifact(
        files=tuple(
            sorted(path for path in folder.iterdir() if ".ort-optimised.onnx" in path.name)
        ),
        compile_ms=compile_ms,
        models=models,
        setup=replace(setup, optimise=False),
        notes={"threads": str(setup.threads), "spinning": "off"},
    )
