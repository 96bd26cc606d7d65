"""ONNX Runtime's DirectML provider: on Windows, and on Linux in the lab of ``_directml_lab.py``.

Facts this file rests on (DirectML 1.15, ONNX Runtime 1.30): the opset ceiling is 22 (from 23 on
even Reshape falls to the CPU); there is no kernel for ai.onnx Attention, RotaryEmbedding and
RMSNormalization; memory patterns must be off and execution sequential. What its contrib ops ignore
in silence is in the shipped capabilities (``data/directml.json``).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _directml_lab, _ort, _platform
from mha_export.targets._javascript import JsArtifact, pack_for_javascript
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

FIX = "on Windows 10 or newer: pip install 'mha-export[directml]' (instead of onnxruntime)"


class DirectMlTarget(Target):
    """ONNX Runtime on any DirectX 12 device."""

    name = "directml"
    summary = "ONNX Runtime DirectML provider (Windows; a lab on Linux)"
    default_forms = ("ort-gqa", "ort-mha", "primitive")
    """GroupQueryAttention is causal by itself; MultiHeadAttention needs a mask of [b, h, s, t]."""
    max_opset = 22
    form_options: Mapping[str, Mapping[str, str]] = MappingProxyType({"ort-mha": {"bias": "whole"}})
    """``unidirectional`` is ignored, and a bias with an axis of 1 is refused."""
    coarse_sines = True
    """Direct3D allows a sine to be off by 0.0008."""
    contrib_gelu = True
    """ai.onnx Gelu has no kernel; com.microsoft's has."""
    probe_seconds = 600.0
    """Under Wine every shape compiles its shaders anew, in software."""

    def availability(self) -> Availability:
        system = platform.system()
        return availability_on_linux() if system == "Linux" else availability_on(system)

    def compile(self, program: Program, options: CompileOptions) -> _ort.OrtArtifact | JsArtifact:
        if platform.system() == "Linux":
            if _directml_lab.lab_versions() is None:
                raise TargetUnavailableError(
                    f"target 'directml': there is no lab in {_directml_lab.lab_folder()}",
                    fix=_directml_lab.FIX,
                )
            return pack_for_javascript(program, options, backend="directml")
        ort = _ort.import_ort(self.name, FIX)
        if "DmlExecutionProvider" not in ort.get_available_providers():
            raise TargetUnavailableError(
                "target 'directml': this onnxruntime has no DirectML provider", fix=FIX
            )
        setup = SessionSetup(
            providers=(("DmlExecutionProvider", {}),),
            threads=options.threads or _platform.usable_cpus(),
            mem_pattern=False,
        )
        return _ort.optimise_strictly(program, setup, options)


def availability_on(system: str) -> Availability:
    """Availability as of an operating system, without a lab."""
    try:
        version = metadata.version("onnxruntime-directml")
    except metadata.PackageNotFoundError:
        version = None
    state: State
    if system != "Windows":
        state = Unavailable(reason=f"DirectML is part of Windows; this is {system}", fix=FIX)
    elif clash := _ort.clash():
        state = Unavailable(reason=clash[0], fix=clash[1])
    elif version is None:
        state = Unavailable(reason="onnxruntime-directml is not installed", fix=FIX)
    else:
        state = Available(detail=f"onnxruntime-directml {version}")
    return Availability(
        build=state,
        run=state,
        runtime="onnxruntime-directml",
        version=version,
        device="DirectX 12 device" if isinstance(state, Available) else None,
    )


def availability_on_linux() -> Availability:
    """In the lab, where there is one."""
    versions = _directml_lab.lab_versions()
    if versions is None:
        state: State = Unavailable(
            reason="DirectML is part of Windows; this is Linux, without a DirectML lab",
            fix=f"{FIX}; on Linux {_directml_lab.FIX}",
        )
        return Availability(build=state, run=state, runtime="onnxruntime-directml")
    version = f"{versions['onnxruntime']} (DirectML {versions['directml']})"
    if not _platform.is_root():
        state = Unavailable(
            reason=f"only root can enter the DirectML lab in {_directml_lab.lab_folder()}",
            fix="run as root",
        )
    else:
        state = Available(detail=f"onnxruntime-node {version} in {_directml_lab.lab_folder()}")
    return Availability(
        build=state,
        run=state,
        runtime="onnxruntime-node (win32)",
        version=version,
        device=f"software Vulkan (Mesa {versions['mesa']}) under Wine {versions['wine']}",
    )


TARGET = DirectMlTarget()
