"""The machine a measurement is made on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from mha_export.report.records import MachineRecord
from mha_export.targets._platform import usable_cpus

_RUNTIMES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-ep-webgpu",
    "openvino",
    "tensorrt",
    "tensorrt-rtx",
)


def machine_record(*, ceilings: Mapping[str, float] | None = None) -> MachineRecord:
    """This machine as it is now; ``load`` is read at the call, so call before measuring.

    The id is made of the system, the processor and a short hash of what sets machines apart: the
    same machine gives the same id, and nothing in it names a person or a network.
    """
    import psutil  # reads the process table: only when a record is made

    cpu, system = _cpu(), _system()
    memory_gb = round(psutil.virtual_memory().total / 2**30, 1)
    accelerators = _accelerators()
    cores = usable_cpus()
    told_apart = "|".join((system, cpu, str(memory_gb), str(cores), *accelerators))
    short = hashlib.sha256(told_apart.encode()).hexdigest()[:4]
    words = [w for w in re.findall(r"[a-z0-9]+", cpu.lower()) if w not in _NOISE]
    return MachineRecord(
        id="-".join([platform.system().lower() or "unknown", *words[:3], short]),
        os=system,
        cpu=cpu,
        memory_gb=memory_gb,
        accelerators=accelerators,
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        cores=cores,
        python=platform.python_version(),
        packages=_packages(),
        ceilings=dict(ceilings or {}),
    )


_NOISE = frozenset(
    ("r", "tm", "c", "cpu", "processor", "intel", "amd", "apple", "with", "core", "at")
)


def _packages() -> dict[str, str]:
    found = {}
    for name in _RUNTIMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _system() -> str:
    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Linux":
        try:
            return f"{platform.freedesktop_os_release()['PRETTY_NAME']} ({name})"
        except (OSError, KeyError):
            return name
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]} ({platform.machine()})"
    return f"{platform.system()} {platform.version()} ({platform.machine()})"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(
            r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE
        )
        if match:
            return " ".join(match[1].split())
    if platform.system() == "Darwin":
        found = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if found:
            return found[0]
    return platform.processor() or platform.machine() or "unknown"


def _accelerators() -> tuple[str, ...]:
    """NVIDIA devices by their own tool; other devices are named by the target that finds them."""
    return tuple(_output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"))


def _output(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
