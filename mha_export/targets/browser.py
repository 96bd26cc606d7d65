"""onnxruntime-web in headless Chromium: WebAssembly (default) or WebGPU (``-t browser:webgpu``).

WebGPU runs on SwiftShader, Chromium's software Vulkan, unless ``MHA_EXPORT_BROWSER_GPU=1`` says
that this machine has a GPU to use.
"""

from __future__ import annotations

from mha_export.targets._javascript import (
    JsArtifact,
    javascript_availability,
    pack_for_javascript,
    package_version,
)
from mha_export.targets._node import chromium_program
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Program,
    State,
    Target,
    Unavailable,
)


class BrowserTarget(Target):
    """ONNX Runtime Web in a real browser."""

    name = "browser"
    summary = "onnxruntime-web in headless Chromium"
    precisions: tuple[str, ...] = ("wasm", "webgpu")
    """Not a number format but the provider: the two columns a browser has."""
    default_forms = ("ort-mha", "ort-gqa", "primitive")
    max_opset = 25
    coarse_sines = True
    """In WGSL a sine may be off by 2^-11, and one file serves both providers."""

    def availability(self) -> Availability:
        return javascript_availability(
            "onnxruntime-web", device="headless Chromium", also=_browser_here()
        )

    def compile(self, program: Program, options: CompileOptions) -> JsArtifact:
        provider = options.precision or "wasm"
        return pack_for_javascript(
            program,
            options,
            backend=f"browser-{provider}",
            settings={"verbose": provider == "webgpu"},
        )


def _browser_here() -> State:
    if chromium_program() is None:
        return Unavailable(
            reason="neither chromium nor google-chrome is on the PATH",
            fix="apt-get install chromium, or set MHA_EXPORT_CHROMIUM to a Chromium's path",
        )
    if package_version("playwright-core") is None:
        return Unavailable(
            reason="playwright-core is not installed", fix="run scripts/setup_targets"
        )
    return Available()


TARGET = BrowserTarget()
