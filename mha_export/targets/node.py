"""onnxruntime-node: ONNX Runtime's native library inside Node.js, on the CPU."""

from __future__ import annotations

from mha_export.targets._javascript import JsArtifact, javascript_availability, pack_for_javascript
from mha_export.targets._target import Availability, CompileOptions, Program, Target


class NodeTarget(Target):
    """ONNX Runtime in Node.js."""

    name = "node"
    summary = "onnxruntime-node (Node.js, CPU)"
    default_forms = ("onnx", "ort-mha", "ort-gqa", "primitive")
    max_opset = 25

    def availability(self) -> Availability:
        return javascript_availability("onnxruntime-node", device="CPU")

    def compile(self, program: Program, options: CompileOptions) -> JsArtifact:
        return pack_for_javascript(program, options, backend="node")


TARGET = NodeTarget()
