"""ONNX Runtime's QNN provider, a plugin: Qualcomm's neural processors.

Nobody has run it yet. Seen on x86 with Qualcomm's HTP libraries (plugin 2.7): plain operators and
ai.onnx Attention at 16 bits of precision (errors of 5e-3); boolean masks and ``nonpad_kv_seqlen``,
MultiHeadAttention and GroupQueryAttention go to the CPU. The compiled model is saved as EPContext.
"""

from __future__ import annotations

from mha_export.targets._ort_provider import OrtProviderTarget, PluginFiles

TARGET = OrtProviderTarget(
    name="qnn",
    summary="ONNX Runtime QNN provider (Qualcomm NPU)",
    provider="QNNExecutionProvider",
    options={"backend_type": "htp"},
    distribution="onnxruntime-qnn",
    fix="on a machine with a Qualcomm NPU: pip install onnxruntime-qnn, beside onnxruntime",
    device="Qualcomm NPU (on x86 its simulation)",
    systems=("Windows", "Linux"),
    plugin=PluginFiles(
        module="onnxruntime_qnn",
        libraries={
            "Windows": "onnxruntime_providers_qnn.dll",
            "Linux": "libonnxruntime_providers_qnn.so",
        },
    ),
    context=True,
    default_forms=("onnx", "primitive"),
    max_opset=24,
)
