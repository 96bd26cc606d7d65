"""onnxruntime-web's WebAssembly build, in Node.js."""

from __future__ import annotations

from mha_export.targets._javascript import JsArtifact, javascript_availability, pack_for_javascript
from mha_export.targets._target import Availability, CompileOptions, Program, Target


class WasmTarget(Target):
    """ONNX Runtime as WebAssembly, without a browser."""

    name = "wasm"
    summary = "onnxruntime-web, WebAssembly in Node.js"
    default_forms = ("onnx", "ort-mha", "ort-gqa", "primitive")
    max_opset = 25

    def availability(self) -> Availability:
        return javascript_availability("onnxruntime-web", device="WebAssembly in Node")

    def compile(self, program: Program, options: CompileOptions) -> JsArtifact:
        return pack_for_javascript(program, options, backend="wasm")


TARGET = WasmTarget()
