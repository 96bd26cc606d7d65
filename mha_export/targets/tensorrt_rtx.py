"""NVIDIA TensorRT-RTX: engines built ahead of time, with or without a GPU here.

The package needs no GPU to parse and build; running needs an RTX GPU. What is built here is named
"TensorRT-RTX ahead-of-time build", never "TensorRT".
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _cuda
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Program,
    State,
    Target,
    Unavailable,
)
from mha_export.targets._tensorrt import CAPABILITIES, TensorRtArtifact, build_program

FIX = "pip install 'mha-export[tensorrt-rtx]' (proprietary licence of NVIDIA)"


class TensorRtRtxTarget(Target):
    """TensorRT-RTX through its own API, for named compute capabilities."""

    name = "tensorrt-rtx"
    summary = "TensorRT-RTX ahead-of-time build"
    builds_slowly = True
    default_forms = ("onnx", "primitive")
    max_opset = 24
    probe_settings: Mapping[str, str] = MappingProxyType({CAPABILITIES: "SM89"})
    """One device to probe for: a build for all takes as many times as long."""

    def availability(self) -> Availability:
        try:
            version = metadata.version("tensorrt-rtx")
        except metadata.PackageNotFoundError:
            gone = Unavailable(reason="tensorrt-rtx is not installed", fix=FIX)
            return Availability(build=gone, run=gone, runtime="tensorrt-rtx")
        run: State = Available(detail=f"tensorrt-rtx {version}")
        device = _cuda.device_name()
        if device is None:
            run = Unavailable(
                reason="no NVIDIA GPU or driver here",
                fix="run the engine on a machine with an RTX GPU",
            )
        return Availability(
            build=Available(detail=f"tensorrt-rtx {version}, ahead of time"),
            run=run,
            runtime="tensorrt-rtx",
            version=version,
            device=device or "ahead of time",
        )

    def compile(self, program: Program, options: CompileOptions) -> TensorRtArtifact:
        try:
            module = importlib.import_module("tensorrt_rtx")
        except ImportError as error:
            raise TargetUnavailableError(f"target '{self.name}': {error}", fix=FIX) from error
        return build_program(module, program, options)


TARGET = TensorRtRtxTarget()
