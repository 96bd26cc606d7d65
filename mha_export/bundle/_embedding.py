"""Where each target's graph runs in an app: runtimes, what they call the device, oldest versions.

Oldest versions were measured, not read: graphs of every opset from 18 to 26 were loaded and run on
ONNX Runtime 1.19 to 1.25 (2026-11-30). Versions before those tried are not promised.
"""

from __future__ import annotations

from collections.abc import Mapping

from mha_export.bundle._manifest import RunsOnRecord

PORTABLE = "portable"

_ORT_FOR_OPSET = ((26, "1.25"), (24, "1.24"), (23, "1.23"), (22, "1.21"), (0, "1.19"))
"""Opset from which on a version of ONNX Runtime is needed, latest first."""
_ORT_FOR_IR = ((12, "1.24"), (11, "1.23"), (0, "1.19"))
_OTHER_MINIMUM: Mapping[str, str] = {
    "openvino": "2026.4",
    "tensorrt": "11.0",
    "tensorrt-rtx": "1.7",
    "tract": "0.23",
    "onnx": "1.19",
}
"""Runtimes of which one version was tried: that one."""
_PROVIDER_MINIMUM: Mapping[str, str] = {
    **dict.fromkeys(("webgpu", "WebGpuExecutionProvider"), "1.30"),
    **dict.fromkeys(("dml", "DmlExecutionProvider"), "1.30"),
}
"""Providers of which one version was tried."""

_CPU = ("onnxruntime", "CPUExecutionProvider")
_NODE = ("onnxruntime-node", "cpu")
_WASM = ("onnxruntime-web", "wasm")
_OPENVINO = ("openvino", "CPU")

_PLACES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tensorrt": (("onnxruntime", "TensorrtExecutionProvider"), ("tensorrt", "GPU")),
    "tensorrt-rtx": (("tensorrt-rtx", "GPU"),),
    "cuda": (("onnxruntime", "CUDAExecutionProvider"), ("onnxruntime-node", "cuda")),
    "directml": (("onnxruntime", "DmlExecutionProvider"), ("onnxruntime-node", "dml")),
    "webgpu": (
        ("onnxruntime-web", "webgpu"),
        ("onnxruntime", "WebGpuExecutionProvider"),
        ("onnxruntime-node", "webgpu"),
    ),
    "browser": (("onnxruntime-web", "webgpu"), _WASM),
    "coreml": (("onnxruntime", "CoreMLExecutionProvider"), ("onnxruntime-node", "coreml")),
    "migraphx": (("onnxruntime", "MIGraphXExecutionProvider"),),
    "qnn": (("onnxruntime", "QNNExecutionProvider"), ("onnxruntime-node", "qnn")),
    "ort-tensorrt": (("onnxruntime", "TensorrtExecutionProvider"),),
    "openvino": (_OPENVINO,),
    "ort-openvino": (("onnxruntime", "OpenVINOExecutionProvider"),),
    "cpu": (_CPU, _NODE),
    "node": (_NODE, _CPU),
    "wasm": (_WASM,),
    "tract": (("tract", "CPU"),),
    "reference": (("onnx", "ReferenceEvaluator"),),
    PORTABLE: (_CPU, _NODE, _WASM, _OPENVINO),
}
"""Target to (runtime, provider), in order of preference; targets in order of preference."""


def preference(target: str) -> int:
    """Place of a target among the variants: devices before processors, ``portable`` last."""
    order = list(_PLACES)
    return order.index(target) if target in _PLACES else order.index("cpu")


def runs_on(target: str, *, opset: int, ir_version: int) -> tuple[RunsOnRecord, ...]:
    """Where a graph of ``target`` runs; empty for a target of which nothing is known."""
    return tuple(
        RunsOnRecord(
            runtime=runtime,
            provider=provider,
            minimum=max(
                _minimum(runtime, opset, ir_version),
                _PROVIDER_MINIMUM.get(provider, "0"),
                key=version_numbers,
            ),
        )
        for runtime, provider in _PLACES.get(target, ())
    )


def _minimum(runtime: str, opset: int, ir_version: int) -> str:
    if runtime in _OTHER_MINIMUM:
        return _OTHER_MINIMUM[runtime]
    by_opset = next(version for least, version in _ORT_FOR_OPSET if opset >= least)
    by_ir = next(version for least, version in _ORT_FOR_IR if ir_version >= least)
    return max(by_opset, by_ir, key=version_numbers)


def version_numbers(text: str) -> tuple[int, ...]:
    """``2026.4.0-19952`` is (2026, 4, 0): numbers up to the first part that is none."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def options_of(target: str, *, dtype: str) -> dict[str, dict[str, str]]:
    """What a session needs to be told to compute what was proven, by runtime."""
    if target == "directml":
        # Not forbidding the CPU: nodes that compute shapes may stay there; attention may not, which
        # is checked by name.
        return {
            "onnxruntime": {"enable_mem_pattern": "0", "execution_mode": "sequential"},
            "onnxruntime-node": {"enableMemPattern": "0", "executionMode": "sequential"},
        }
    if target in ("openvino", PORTABLE):
        precision = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "fp64": "f32"}[dtype]
        return {"openvino": {"INFERENCE_PRECISION_HINT": precision}}
    return {}
