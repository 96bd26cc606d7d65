"""Native TensorRT: one code path over the two modules ``tensorrt`` and ``tensorrt_rtx``.

The modules share one API, so that the ahead-of-time build of TensorRT-RTX, which needs no GPU,
exercises most of what ``tensorrt`` does on a machine with one. Facts this file rests on
(TensorRT 11, TensorRT-RTX 1.7):

* networks are strongly typed: the precision is that of the ONNX file;
* an ``Attention`` without a fused kernel (fp32, head size over 256) fails the build unless its
  layer is marked decomposable; the attribute ``TRT_decomposable`` would break ONNX Runtime;
* ``supports_model_v2`` says True for graphs whose build fails: only building tells;
* TensorRT-RTX builds for named compute capabilities; ``CURRENT`` needs a driver, and Turing
  (SM75) has no fp32 matrix product, so it is built for only where it is asked for.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mha_export.targets import _cuda, _platform
from mha_export.targets._files import work_folder
from mha_export.targets._target import CannotRun, CompileOptions, Placement, Program, Session
from mha_export.targets._tensorrt_layers import EngineLayers, parse_layers

CAPABILITIES = "compute_capabilities"
PROFILE = "profile."
"""Keys of ``CompileOptions.extra``: ``compute_capabilities`` = ``SM89,SM120``, and the range of a
symbolic dimension, ``profile.seq`` = ``1:128:2048`` (least, best, most)."""


ASKED_ONLY = ("SM75",)
LONGEST, SHORTEST = 2048, 16
"""The most that a dimension of unknown meaning may be, first tried and last."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """One serialised engine and what is known of it without running it."""

    engine: bytes
    layers: EngineLayers
    inputs: tuple[str, ...]
    attentions: int
    decomposed: bool
    ranges: Mapping[str, tuple[int, int, int]]
    parse_ms: float
    build_ms: float


@dataclass(frozen=True, kw_only=True)
class TensorRtArtifact:
    """Engines that load without building again.

    Attributes:
        notes: what a record carries: parse and build times, fused attentions, capabilities, ranges.
        layers: what each engine consists of.
        unread: graph inputs that an engine ignores, by role. Anything here makes its results wrong.
    """

    files: tuple[Path, ...]
    compile_ms: float
    models: Mapping[str, Path]
    module: str
    runs: bool
    layers: Mapping[str, EngineLayers]
    attentions: Mapping[str, int]
    unread: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, str] = field(default_factory=dict)

    def load(self, graph: str = "main") -> Session | CannotRun:
        if not self.runs or _cuda.device_count() == 0:
            return CannotRun(
                reason=f"a {self.module} engine runs on an NVIDIA GPU; none is here",
                fix="copy the engine to a machine with a GPU of one of its compute capabilities",
                placement=self.placement(graph),
                unread=self.unread[graph],
            )
        from mha_export.targets._tensorrt_session import TensorRtSession

        return TensorRtSession(self, graph)

    def placement(self, graph: str = "main") -> Placement:
        """What the builder said of each layer: all are the GPU's."""
        layers = self.layers[graph]
        count = len(layers.names)
        fused = ", ".join(sorted(set(layers.fused))) or "no fused attention kernel"
        return Placement(
            float_compute_nodes=count,
            on_target=count,
            evidence=f"engine layers: {len(layers.fused)} fused of {self.attentions[graph]} "
            f"attentions ({fused})",
        )


def build_program(trt: Any, program: Program, options: CompileOptions) -> TensorRtArtifact:
    """Build each graph of a program and write the engines.

    Errors:
        RuntimeError: a graph was not parsed or not built; the message is TensorRT's own.
    """
    folder = work_folder(options)
    suffix = trt.__name__.replace("_", "-")
    models: dict[str, Path] = {}
    built: dict[str, Built] = {}
    for role, source in program.graphs.items():
        built[role] = build_engine(trt, source, options)
        models[role] = folder / f"{role}.{suffix}.engine"
        staged = models[role].with_suffix(".engine.new")
        staged.write_bytes(built[role].engine)
        _platform.replace_file(staged, models[role])
    parse_ms = sum(one.parse_ms for one in built.values())
    build_ms = sum(one.build_ms for one in built.values())
    fused = sum(len(one.layers.fused) for one in built.values())
    attentions = sum(one.attentions for one in built.values())
    return TensorRtArtifact(
        files=tuple(models.values()),
        compile_ms=parse_ms + build_ms,
        models=models,
        module=suffix,
        runs=trt.__name__ != "tensorrt_rtx" or _cuda.device_count() > 0,
        layers={role: one.layers for role, one in built.items()},
        attentions={role: one.attentions for role, one in built.items()},
        unread={
            role: one.layers.unread(one.inputs, _updated_in_place(program.graphs[role]))
            for role, one in built.items()
        },
        outputs={role: _outputs(source) for role, source in program.graphs.items()},
        notes={
            "parse_ms": f"{parse_ms:.1f}",
            "build_ms": f"{build_ms:.1f}",
            "fused_attention": f"{fused} of {attentions}",
            "decomposed": str(any(one.decomposed for one in built.values())).lower(),
            **{
                f"{PROFILE}{name}": ":".join(map(str, bounds))
                for one in built.values()
                for name, bounds in sorted(one.ranges.items())
            },
            CAPABILITIES: ",".join(capability_names(trt, options)) or "of this device",
        },
    )


def build_engine(trt: Any, source: Path, options: CompileOptions) -> Built:
    """Parse and build one graph.

    Again with attention decomposable where that is the fault, and with shorter ranges where the
    graph has a table (of positions) that ends before the range does.
    """
    decompose, longest = False, LONGEST
    while True:
        made = _attempt(trt, source, options, decompose=decompose, longest=longest)
        if isinstance(made, Built):
            return made
        if "decomposable" in made and not decompose:
            decompose = True
        elif "violate shape constraints" in made and longest > SHORTEST:
            longest //= 2
        else:
            raise RuntimeError(made)


def _attempt(
    trt: Any, source: Path, options: CompileOptions, *, decompose: bool, longest: int
) -> Built | str:
    """The engine, or the builder's last words."""
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    started = time.perf_counter()
    if not parser.parse_from_file(str(source)):
        errors = [_parse_error(parser.get_error(i)) for i in range(parser.num_errors)]
        return f"parse: {'; '.join(errors) or logger.last_error()}"
    parse_ms = (time.perf_counter() - started) * 1e3
    attentions = _mark_attentions(trt, network, decompose=decompose)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    _name_capabilities(trt, config, options)
    ranges = _add_profile(builder, config, network, source, options, longest)
    cache_file = _load_timing_cache(config, trt, options)
    started = time.perf_counter()
    engine = builder.build_serialized_network(network, config)
    build_ms = (time.perf_counter() - started) * 1e3
    if engine is None:
        return f"build: {logger.last_error()}"
    _save_timing_cache(config, cache_file)
    return Built(
        engine=bytes(memoryview(engine)),
        layers=parse_layers(logger.layers()),
        inputs=tuple(network.get_input(i).name for i in range(network.num_inputs)),
        attentions=attentions or _softmaxes(source),
        decomposed=decompose,
        ranges=ranges,
        parse_ms=parse_ms,
        build_ms=build_ms,
    )


def _parse_error(error: Any) -> str:
    return f"{error.node_operator()} '{error.node_name()}': {error.desc()}"


def _logger(trt: Any) -> Any:
    class Kept(trt.ILogger):  # type: ignore[misc]
        """Keeps errors and the report of layers; the rest is thousands of lines."""

        def __init__(self) -> None:
            super().__init__()
            self._errors: list[str] = []
            self._layers = ""

        def log(self, severity: Any, message: str) -> None:
            if message.startswith("Layers:"):
                self._layers = message
            elif severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._errors.append(message)

        def layers(self) -> str:
            return self._layers

        def last_error(self) -> str:
            return self._errors[-1] if self._errors else "no reason given"

    return Kept()


def _mark_attentions(trt: Any, network: Any, *, decompose: bool) -> int:
    """Count the ``Attention`` nodes of the network, and allow their decomposition if asked."""
    kind = getattr(trt.LayerType, "ATTENTION_OUTPUT", None)
    count = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if kind is None or layer.type != kind:
            continue
        count += 1
        if decompose:
            layer.__class__ = trt.IAttentionOutputLayer
            layer.attention.decomposable = True
    return count


def _softmaxes(source: Path) -> int:
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    return sum(node.op_type in ("Softmax", "MultiHeadAttention") for node in graph.node)


def _updated_in_place(source: Path) -> dict[str, str]:
    """Caches by ``TensorScatter``: the input, and the output it comes out as."""
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    scatters = (node for node in graph.node if node.op_type == "TensorScatter")
    return {node.input[0]: node.output[0] for node in scatters}


def _outputs(source: Path) -> tuple[str, ...]:
    from mha_export.targets._files import graph_names

    return graph_names(source)[1]


def capability_names(trt: Any, options: CompileOptions) -> tuple[str, ...]:
    """The compute capabilities to build for: those asked for, else all from Ampere (SM80) on.

    Empty where the module builds for the device it finds (``tensorrt``).

    Errors:
        RuntimeError: one was asked for that the module does not know.
    """
    known = getattr(trt, "ComputeCapability", None)
    if known is None or not hasattr(trt.IBuilderConfig, "set_compute_capability"):
        return ()
    names = [name for name in known.__members__ if re.fullmatch(r"SM\d+", name)]
    asked = options.extra.get(CAPABILITIES)
    if asked is None:
        return tuple(name for name in names if name not in ASKED_ONLY)
    wanted = tuple(part.strip().upper() for part in asked.split(","))
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise RuntimeError(f"compute capability {unknown} is not one of {', '.join(names)}")
    return wanted


def _name_capabilities(trt: Any, config: Any, options: CompileOptions) -> None:
    names = capability_names(trt, options)
    if names:
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            config.set_compute_capability(trt.ComputeCapability.__members__[name], index)


def _add_profile(
    builder: Any,
    config: Any,
    network: Any,
    source: Path,
    options: CompileOptions,
    longest: int,
) -> dict[str, tuple[int, int, int]]:
    """One optimisation profile that covers the range of every symbolic dimension; the ranges."""
    used: dict[str, tuple[int, int, int]] = {}
    symbols = _symbols(source)
    profile = builder.create_optimization_profile()
    dynamic = False
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tuple(tensor.shape)
        if -1 not in shape:
            continue
        dynamic = True
        names = symbols.get(tensor.name, (None,) * len(shape))
        ranges = []
        for dim, name in zip(shape, names, strict=True):
            if dim == -1:
                ranges.append(dimension_range(name, options.extra, longest=longest))
                used[name or "?"] = ranges[-1]
            else:
                ranges.append((dim, dim, dim))
        profile.set_shape(tensor.name, *(list(bound) for bound in zip(*ranges, strict=True)))
    if dynamic:
        config.add_optimization_profile(profile)
    return used


def dimension_range(
    name: str | None, extra: Mapping[str, str], *, longest: int = LONGEST
) -> tuple[int, int, int]:
    """Least, best and most of a symbolic dimension: as asked, else by what its name suggests.

    Errors:
        RuntimeError: a range that was asked for is not ``least:best:most`` in ascending order.
    """
    asked = extra.get(f"{PROFILE}{name}")
    if asked is not None:
        try:
            least, best, most = (int(part) for part in asked.split(":"))
        except ValueError:
            least, best, most = 1, 0, 0
        if not 0 <= least <= best <= most:
            raise RuntimeError(f"{PROFILE}{name} is '{asked}'; expected least:best:most, as 1:8:64")
        return least, best, most
    lowered = (name or "").lower()
    if "batch" in lowered or lowered in ("b", "n"):
        return 1, 1, 32
    if "past" in lowered:
        return 0, min(127, longest // 2), longest - 1
    return 1, min(128, longest // 2), longest


def _symbols(source: Path) -> dict[str, tuple[str | None, ...]]:
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    return {
        value.name: tuple(dim.dim_param or None for dim in value.type.tensor_type.shape.dim)
        for value in graph.input
    }


def _load_timing_cache(config: Any, trt: Any, options: CompileOptions) -> Path | None:
    """Give the builder the timings it measured before. Only where it measures: on a GPU."""
    if _cuda.device_count() == 0 or not hasattr(config, "create_timing_cache"):
        return None
    key = hashlib.sha256(f"{trt.__name__} {trt.__version__} {_cuda.device_name()}".encode())
    folder = options.workdir or _platform.cache_dir()
    file = folder / f"timing-{key.hexdigest()[:16]}.cache"
    known = file.read_bytes() if file.is_file() else b""
    config.set_timing_cache(config.create_timing_cache(known), False)
    return file


def _save_timing_cache(config: Any, file: Path | None) -> None:
    if file is None:
        return
    cache = config.get_timing_cache()
    if cache is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_suffix(".new")
        staged.write_bytes(bytes(memoryview(cache.serialize())))
        _platform.replace_file(staged, file)
