"""ONNX Runtime's WebGPU provider, a plugin, on a real or a software Vulkan device.

Facts this file rests on (plugin 0.4 with onnxruntime 1.32):

* the plugin claims nodes it then computes wrongly (``softcap`` of GroupQueryAttention is ignored)
  or refuses at the first run (``key_padding_mask``): the probes decide, not the placement;
* without a GPU it needs a software adapter to be allowed, and one to be there: SwiftShader's
  library and its ICD file, as Debian's ``chromium-common`` carries them;
* it opens ``libvulkan.so.1`` by name: loading ours first spares the user ``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
from functools import cache
from importlib import metadata, util
from pathlib import Path

from mha_export.targets import _ort, _platform
from mha_export.targets._ort import Plugin, SessionSetup
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Program,
    State,
    Target,
    Unavailable,
)

FIX = "pip install 'mha-export[webgpu]'"
ICD = "vk_swiftshader_icd.json"


class WebGpuTarget(Target):
    """ONNX Runtime on WebGPU (Dawn), outside a browser."""

    name = "webgpu"
    summary = "ONNX Runtime WebGPU provider (Vulkan, D3D12 or Metal)"
    default_forms = ("ort-mha", "ort-gqa", "primitive")
    max_opset = 24
    coarse_sines = True
    """WGSL allows a sine to be off by 2^-11, and says nothing of angles beyond pi."""

    def availability(self) -> Availability:
        try:
            version = metadata.version("onnxruntime-ep-webgpu")
        except metadata.PackageNotFoundError:
            state: State = Unavailable(reason="onnxruntime-ep-webgpu is not installed", fix=FIX)
            return Availability(build=state, run=state, runtime="onnxruntime-ep-webgpu")
        state = _device_state(version)
        return Availability(
            build=state,
            run=state,
            runtime="onnxruntime-ep-webgpu",
            version=f"{version} (onnxruntime {_ort.installed_version()})",
            device=device_name(),
        )

    def compile(self, program: Program, options: CompileOptions) -> _ort.OrtArtifact:
        _ort.import_ort(self.name, FIX)
        prepare_vulkan()
        setup = SessionSetup(
            providers=(("WebGpuExecutionProvider", {}),),
            plugin=plugin(),
            threads=options.threads or _platform.usable_cpus(),
            prepare="mha_export.targets.webgpu:prepare_vulkan",
        )
        return _ort.optimise_once(program, setup, options)


def plugin() -> Plugin:
    """The provider library, found without loading it."""
    found = util.find_spec("onnxruntime_ep_webgpu")
    if found is None or found.origin is None:
        raise RuntimeError("onnxruntime-ep-webgpu is not installed")
    name = {
        "Windows": "onnxruntime_providers_webgpu.dll",
        "Darwin": "libonnxruntime_providers_webgpu.dylib",
    }.get(platform.system(), "libonnxruntime_providers_webgpu.so")
    return Plugin(
        registration="WebGpuExecutionProvider",
        library=Path(found.origin).parent / name,
        ep_name="WebGpuExecutionProvider",
    )


def swiftshader_folder() -> Path | None:
    """Where SwiftShader's ICD file lies: ours in the cache, or an installed Chromium's."""
    chosen = os.environ.get("MHA_EXPORT_SWIFTSHADER")
    places = [Path(chosen)] if chosen else []
    places += [_platform.cache_dir() / "swiftshader", Path("/usr/lib/chromium")]
    return next((place for place in places if (place / ICD).is_file()), None)


def has_gpu() -> bool:
    """Whether a graphics device is there; only Linux is asked: other systems always have one."""
    return platform.system() != "Linux" or any(Path("/dev/dri").glob("renderD*"))


def device_name() -> str:
    """What the provider computes on, as far as that can be told without starting it."""
    if platform.system() != "Linux":
        return "WebGPU adapter of this system"
    return "Vulkan device" if has_gpu() else "SwiftShader (software Vulkan)"


@cache
def prepare_vulkan() -> None:
    """Point the Vulkan loader at SwiftShader where there is no GPU. To be called in a worker."""
    if has_gpu():
        return
    folder = swiftshader_folder()
    if folder is None:
        raise RuntimeError("no GPU, and no SwiftShader: run scripts/setup_targets")
    os.environ.setdefault("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        os.environ.setdefault(name, str(folder / ICD))
    loader = folder / "libvulkan.so.1"
    if loader.is_file():
        ctypes.CDLL(str(loader), mode=ctypes.RTLD_GLOBAL)


def _device_state(version: str) -> State:
    if clash := _ort.clash():
        return Unavailable(reason=clash[0], fix=clash[1])
    if _ort.installed_version() is None:
        return Unavailable(reason="onnxruntime is not installed", fix=FIX)
    if has_gpu():
        return Available(detail=f"onnxruntime-ep-webgpu {version}")
    folder = swiftshader_folder()
    if folder is None:
        return Unavailable(
            reason="no GPU, and SwiftShader's software Vulkan is not here",
            fix="run scripts/setup_targets",
        )
    if not (folder / "libvulkan.so.1").is_file() and ctypes.util.find_library("vulkan") is None:
        return Unavailable(
            reason="the Vulkan loader libvulkan.so.1 is not here",
            fix="apt-get install libvulkan1, or run scripts/setup_targets",
        )
    return Available(detail=f"onnxruntime-ep-webgpu {version} on SwiftShader in {folder}")


TARGET = WebGpuTarget()
