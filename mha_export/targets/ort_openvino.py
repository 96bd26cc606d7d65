"""ONNX Runtime's OpenVINO provider, a plugin: Intel's processors, GPUs and NPUs.

OpenVINO's own runtime, which runs on any processor, is the target ``openvino``. Seen with plugin
1.8: it registers no device on a processor that is not Intel's; attention operators of any kind go
to the CPU, plain ones are taken. The compiled model is saved as EPContext.
"""

from __future__ import annotations

from mha_export.targets._ort_provider import OrtProviderTarget, PluginFiles

TARGET = OrtProviderTarget(
    name="ort-openvino",
    summary="ONNX Runtime OpenVINO provider (Intel)",
    provider="OpenVINOExecutionProvider",
    distribution="onnxruntime-ep-openvino",
    fix="on an Intel processor: pip install onnxruntime-ep-openvino; elsewhere use -t openvino",
    device="Intel device",
    systems=("Linux", "Windows"),
    plugin=PluginFiles(
        module="onnxruntime_ep_openvino",
        libraries={
            "Windows": "onnxruntime_providers_openvino_plugin.dll",
            "Linux": "libonnxruntime_providers_openvino_plugin.so",
        },
    ),
    context=True,
)
