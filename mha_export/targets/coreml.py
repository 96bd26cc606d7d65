"""ONNX Runtime's CoreML provider: Apple's neural engine, GPU and CPU, on macOS.

Nobody has run it yet. From its documentation (onnxruntime 1.32): an ML program takes fp32 and fp16;
subgraphs that CoreML does not take stay on the CPU, which is forbidden here where that is possible.
"""

from __future__ import annotations

from mha_export.targets._ort_provider import OrtProviderTarget

TARGET = OrtProviderTarget(
    name="coreml",
    summary="ONNX Runtime CoreML provider (macOS)",
    provider="CoreMLExecutionProvider",
    options={"ModelFormat": "MLProgram", "MLComputeUnits": "ALL"},
    distribution="onnxruntime",
    fix="on a Mac: pip install 'mha-export[cpu]', whose onnxruntime brings CoreML",
    device="Apple neural engine, GPU or CPU",
    systems=("Darwin",),
)
