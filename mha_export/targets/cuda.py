"""ONNX Runtime on an NVIDIA GPU.

``onnxruntime-gpu`` lists CUDA among its providers on a machine without a GPU, and a session asked
for CUDA alone then runs on the CPU with a line on the standard error. So: the driver is asked for a
device, the CPU is forbidden (``session.disable_cpu_ep_fallback``), and the placement is profiled.
"""

from __future__ import annotations

from importlib import metadata

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _cuda, _ort, _platform
from mha_export.targets._ort import SessionSetup
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Program,
    State,
    Target,
    Unavailable,
)

FIX = "on a machine with an NVIDIA GPU: pip install 'mha-export[cuda]' (instead of onnxruntime)"
CUDA_GRAPH = "cuda_graph"
"""Key of ``CompileOptions.extra``: ``1`` captures the runs of ``time`` (fixed shapes)."""


class OrtCudaTarget(Target):
    """ONNX Runtime's CUDA provider, inputs and outputs bound on the device while timing."""

    name = "cuda"
    summary = "ONNX Runtime CUDA provider (NVIDIA GPU)"
    default_forms = ("onnx", "ort-mha", "ort-gqa", "primitive")
    max_opset = 25

    def availability(self) -> Availability:
        try:
            version = metadata.version("onnxruntime-gpu")
        except metadata.PackageNotFoundError:
            version = None
        device = _cuda.device_name()
        state: State
        if clash := _ort.clash():
            state = Unavailable(reason=clash[0], fix=clash[1])
        elif version is None:
            state = Unavailable(reason="onnxruntime-gpu is not installed", fix=FIX)
        elif device is None:
            state = Unavailable(reason="no NVIDIA GPU or driver here", fix=FIX)
        else:
            state = Available(detail=f"onnxruntime-gpu {version}")
        return Availability(
            build=state, run=state, runtime="onnxruntime-gpu", version=version, device=device
        )

    def compile(self, program: Program, options: CompileOptions) -> _ort.OrtArtifact:
        ort = _ort.import_ort(self.name, FIX)
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise TargetUnavailableError(
                "target 'cuda': this onnxruntime has no CUDA provider", fix=FIX
            )
        if _cuda.device_count() == 0:
            raise TargetUnavailableError("target 'cuda': no NVIDIA GPU or driver here", fix=FIX)
        provider = {"enable_cuda_graph": "1"} if options.extra.get(CUDA_GRAPH) == "1" else {}
        setup = SessionSetup(
            providers=(("CUDAExecutionProvider", provider),),
            device="cuda",
            threads=options.threads or _platform.usable_cpus(),
            prepare="mha_export.targets.cuda:load_libraries",
        )
        return _ort.optimise_strictly(program, setup, options)


def load_libraries() -> None:
    """Load the CUDA and cuDNN that came as Python packages, where onnxruntime knows how."""
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        preload()


TARGET = OrtCudaTarget()
