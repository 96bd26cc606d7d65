"""ONNX Runtime's TensorRT provider, where its library links: the engine is saved as EPContext.

TensorRT's own interface is the target ``tensorrt``. Nobody has run this one yet. The provider of
PyPI's onnxruntime-gpu 1.31 is linked to TensorRT 10, whose libraries are not on PyPI: without
them ONNX Runtime would go on with CUDA in silence, which the strict placement here does not allow.
"""

from __future__ import annotations

from mha_export.targets._ort_provider import OrtProviderTarget

TARGET = OrtProviderTarget(
    name="ort-tensorrt",
    summary="ONNX Runtime TensorRT provider (NVIDIA GPU)",
    provider="TensorrtExecutionProvider",
    options={"trt_engine_cache_enable": "0", "trt_timing_cache_enable": "1"},
    distribution="onnxruntime-gpu",
    fix="with an NVIDIA GPU: pip install 'mha-export[cuda]', and TensorRT 10's libraries on the "
    "library path",
    device="NVIDIA GPU",
    systems=("Linux", "Windows"),
    device_file="/dev/nvidia0",
    context=True,
    default_forms=("primitive",),
)
