"""ONNX Runtime's MIGraphX provider: AMD GPUs on ROCm.

Nobody has run it yet. The distribution installs the folder ``onnxruntime``, as the CPU's does: only
one of them may be there.
"""

from __future__ import annotations

from mha_export.targets._ort_provider import OrtProviderTarget

TARGET = OrtProviderTarget(
    name="migraphx",
    summary="ONNX Runtime MIGraphX provider (AMD GPU, ROCm)",
    provider="MIGraphXExecutionProvider",
    distribution="onnxruntime-migraphx",
    fix="with ROCm and an AMD GPU: pip install onnxruntime-migraphx (instead of onnxruntime)",
    device="AMD GPU",
    systems=("Linux",),
    device_file="/dev/kfd",
    default_forms=("ort-mha", "primitive"),
)
