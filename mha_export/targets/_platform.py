"""Everything that differs between operating systems, in one place.

Each function takes ``system`` (``Linux``, ``Darwin``, ``Windows``; default: this one), so that the
choices for the other systems are tested here too. Systems nobody has run this on yet are named in
``docs/targets.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

SYSTEM = platform.system()

NT_STATUS = {
    0xC0000005: "access violation",
    0xC0000017: "out of memory",
    0xC000001D: "illegal instruction",
    0xC0000094: "integer division by zero",
    0xC00000FD: "stack overflow",
    0xC0000374: "heap corruption",
    0xC0000409: "fail fast",
}
"""Exit codes with which Windows reports what other systems report as a signal."""


def death_of(returncode: int, *, system: str = SYSTEM) -> str | None:
    """Name of the signal (or NTSTATUS) that ended a process; None for an ordinary exit."""
    if system == "Windows":
        return NT_STATUS.get(returncode & 0xFFFFFFFF)
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def cache_dir(
    *, system: str = SYSTEM, environ: Mapping[str, str] | None = None, home: Path | None = None
) -> Path:
    """Where probed capabilities and fetched JavaScript runtimes are kept (not created).

    ``MHA_EXPORT_CACHE`` wins; else the system's convention: ``XDG_CACHE_HOME`` or ``~/.cache``,
    ``~/Library/Caches``, ``%LOCALAPPDATA%``.
    """
    env = os.environ if environ is None else environ
    base = Path.home() if home is None else home
    if chosen := env.get("MHA_EXPORT_CACHE"):
        return Path(chosen)
    if system == "Windows":
        local = env.get("LOCALAPPDATA")
        return (Path(local) if local else base / "AppData" / "Local") / "mha_export" / "Cache"
    if system == "Darwin":
        return base / "Library" / "Caches" / "mha_export"
    xdg = env.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else base / ".cache") / "mha_export"


def worker_flags(*, system: str = SYSTEM) -> dict[str, Any]:
    """Arguments of :class:`subprocess.Popen` that keep a worker apart from our terminal.

    Its own session (or no console window), so that Ctrl-C reaches us first and we end it.
    """
    if system == "Windows":
        return {"creationflags": getattr(subprocess, "CREATE_NO_WINDOW", 0x08000000)}
    return {"start_new_session": True}


def silence_crash_dialogs(*, system: str = SYSTEM) -> None:
    """Make a crash end the process at once instead of opening a dialog or writing a core file."""
    if system == "Windows":  # pragma: no cover - nothing to call on other systems
        # SEM_FAILCRITICALERRORS | SEM_NOGPFAULTERRORBOX | SEM_NOOPENFILEERRORBOX
        ctypes.windll.kernel32.SetErrorMode(0x8003)  # type: ignore[attr-defined]
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def is_root() -> bool:
    """Whether this process may make namespaces and mounts (never on Windows)."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def usable_cpus() -> int:
    """Processors this process may use (affinity respected where the system has it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rss_mb(pid: int, *, descendants: bool) -> float:
    """Resident memory of a process (and its descendants) in MiB; 0 when it is gone."""
    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)] if descendants else [root]
    except psutil.Error:
        return 0.0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20


def end_family(process: subprocess.Popen[bytes], *, wait_s: float = 5.0) -> None:
    """End a worker and all its descendants, and wait for them; its exit code stays readable.

    Descendants it left behind are found by its process group (not on Windows, where none is kept).
    """
    family: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.Error):
            child.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=wait_s)


def default_memory_limit_mb() -> int:
    """Four fifths of the memory that is free now, and at least 1 GiB."""
    return max(1024, int(psutil.virtual_memory().available * 0.8 / 2**20))


def replace_file(source: Path, destination: Path, *, system: str = SYSTEM) -> None:
    """Put ``source`` in the place of ``destination`` in one step.

    Windows refuses to replace a file that a runtime has mapped, but lets it be renamed: the old one
    is moved aside, and deleted as soon as it can be.

    Errors:
        OSError: the file can be neither replaced nor renamed.
    """
    try:
        source.replace(destination)
    except PermissionError:
        if system != "Windows":
            raise
        aside = destination.with_name(f"{destination.name}.{os.getpid()}-{time.time_ns()}.old")
        destination.rename(aside)
        source.replace(destination)
        try:
            aside.unlink()
        except OSError:  # still mapped: a later sweep of *.old takes it
            return


def find_program(*names: str, system: str = SYSTEM) -> Path | None:
    """The first of ``names`` on the PATH (``npm`` is ``npm.cmd`` on Windows)."""
    for name in names:
        candidates = [f"{name}.cmd", f"{name}.exe", name] if system == "Windows" else [name]
        for candidate in candidates:
            found = shutil.which(candidate)
            if found is not None:
                return Path(found)
    return None
