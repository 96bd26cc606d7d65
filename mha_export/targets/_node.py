"""A Node.js process that serves one JavaScript runtime: a line of JSON asked, a line answered.

Tensors travel as files (``js/serve.mjs``). The runtimes are npm packages in a folder of the user's
cache (``scripts/setup_targets`` fills it); DirectML's is in a lab of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _platform

SCRIPTS = Path(__file__).parent / "js"
FIX = "run scripts/setup_targets (it needs node and npm)"


def modules_folder() -> Path:
    """The folder whose ``node_modules`` holds the runtimes: ``MHA_EXPORT_NODE`` or in the cache."""
    chosen = os.environ.get("MHA_EXPORT_NODE")
    return Path(chosen) if chosen else _platform.cache_dir() / "node"


def chromium_program() -> Path | None:
    """Chromium or Chrome: ``MHA_EXPORT_CHROMIUM``, else the usual names on the PATH."""
    chosen = os.environ.get("MHA_EXPORT_CHROMIUM")
    if chosen:
        return Path(chosen)
    return _platform.find_program("chromium", "chromium-browser", "google-chrome", "chrome")


class NodeEndedError(RuntimeError):
    """The Node process died under a request: the runtime's crash, not its refusal."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A started Node process and the streams to talk to it.

    Attributes:
        root: what our root folder is called on the other side (empty: ``/``, the same).
    """

    process: subprocess.Popen[str]
    requests: IO[str]
    replies: IO[str]
    root: str = ""


class NodeProcess:
    """Serves one backend; ``loaded`` is the session whose model it holds."""

    def __init__(self, backend: str) -> None:
        self._link = _linked(backend)
        self._lock = threading.Lock()
        self.loaded: object | None = None

    @property
    def alive(self) -> bool:
        return self._link.process.poll() is None

    def path(self, path: Path) -> str:
        """The path as the process knows it."""
        return f"{self._link.root}{path.resolve()}" if self._link.root else str(path)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request.

        Errors:
            RuntimeError: the runtime refused; the message is its own.
            NodeEndedError: Node died.
        """
        with self._lock:
            try:
                self._link.requests.write(json.dumps(request) + "\n")
                self._link.requests.flush()
                line = self._link.replies.readline()
            except OSError:
                line = ""
        if not line:
            code = self._link.process.wait()
            death = _platform.death_of(code)
            raise NodeEndedError(f"node ended: {death or f'exit code {code}'}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(str(reply["error"]))
        return reply

    def close(self) -> None:
        """End it: politely, then not."""
        for stream in (self._link.requests, self._link.replies):  # a socket ends with both
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._link.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._link.process.kill()
            self._link.process.wait()


_running: dict[str, NodeProcess] = {}


def node_of(backend: str) -> NodeProcess:
    """The process of a backend: one (one browser) serves all sessions of this process in turn."""
    node = _running.get(backend)
    if node is None or not node.alive:
        node = _running[backend] = NodeProcess(backend)
        atexit.register(node.close)
    return node


def _linked(backend: str) -> Link:
    if backend == "directml":
        from mha_export.targets._directml_lab import serve

        return serve()
    node = _platform.find_program("node")
    if node is None:
        raise TargetUnavailableError("node is not on the PATH", fix=FIX)
    environ = dict(os.environ)
    chromium = chromium_program()
    if chromium is not None:
        environ["MHA_EXPORT_CHROMIUM"] = str(chromium)
    process = subprocess.Popen(
        [str(node), str(SCRIPTS / "serve.mjs"), backend, str(modules_folder())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return Link(process=process, requests=process.stdin, replies=process.stdout)
