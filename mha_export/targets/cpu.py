"""ONNX Runtime on the CPU."""

from __future__ import annotations

from mha_export.targets import _ort
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

FIX = "pip install 'mha-export[cpu]'"


class OrtCpuTarget(Target):
    """ONNX Runtime's CPU provider: the artifact is the optimised model, threads do not spin."""

    name = "cpu"
    summary = "ONNX Runtime on the CPU"
    default_forms = ("onnx", "ort-mha", "ort-gqa", "primitive")
    max_opset = 25

    def availability(self) -> Availability:
        version = _ort.installed_version()
        state: State
        if clash := _ort.clash():
            state = Unavailable(reason=clash[0], fix=clash[1])
        elif version is None:
            state = Unavailable(reason="onnxruntime is not installed", fix=FIX)
        else:
            state = Available(detail=f"onnxruntime {version}")
        return Availability(
            build=state, run=state, runtime="onnxruntime", version=version, device="CPU"
        )

    def compile(self, program: Program, options: CompileOptions) -> _ort.OrtArtifact:
        """Optimise and save; see :func:`mha_export.targets._ort.optimise_once`."""
        _ort.import_ort(self.name, FIX)
        setup = SessionSetup() if options.threads is None else SessionSetup(threads=options.threads)
        return _ort.optimise_once(program, setup, options)


TARGET = OrtCpuTarget()
