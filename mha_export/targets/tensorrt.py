"""NVIDIA TensorRT through its own API, on a CUDA GPU.

The libraries are not on the package index (what is there are stubs that fetch them, or fail); a GPU
is needed to build. The code is the one that ``tensorrt-rtx`` exercises without a GPU.
"""

from __future__ import annotations

import importlib
from importlib import metadata

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
from mha_export.targets._tensorrt import TensorRtArtifact, build_program

FIX = (
    "on a machine with an NVIDIA GPU: pip install 'mha-export[tensorrt]', and put TensorRT's "
    "libraries on the library path where the package brings none"
)


class TensorRtTarget(Target):
    """TensorRT 10.9 or newer, strongly typed."""

    name = "tensorrt"
    summary = "TensorRT (NVIDIA GPU)"
    builds_slowly = True
    default_forms = ("onnx", "primitive")
    max_opset = 24

    def availability(self) -> Availability:
        device = _cuda.device_name()
        try:
            version = metadata.version("tensorrt")
        except metadata.PackageNotFoundError:
            version = None
        state: State
        if version is None:
            state = Unavailable(reason="tensorrt is not installed", fix=FIX)
        elif device is None:
            state = Unavailable(reason="no NVIDIA GPU or driver here", fix=FIX)
        else:
            state = Available(detail=f"tensorrt {version}")
        return Availability(
            build=state, run=state, runtime="tensorrt", version=version, device=device
        )

    def compile(self, program: Program, options: CompileOptions) -> TensorRtArtifact:
        if _cuda.device_count() == 0:
            raise TargetUnavailableError("target 'tensorrt': no NVIDIA GPU or driver here", fix=FIX)
        try:
            module = importlib.import_module("tensorrt")
        except ImportError as error:
            raise TargetUnavailableError(f"target '{self.name}': {error}", fix=FIX) from error
        return build_program(module, program, options)


TARGET = TensorRtTarget()
