"""DirectML on Linux: the lab that ``scripts/directml_lab`` builds, and Node inside it.

The lab is a Debian in a folder with Wine, a software Vulkan, and the Windows files of Node.js and
onnxruntime-node, which bring DirectML. It is entered with namespaces of its own (``enter``), where
our root folder is ``/host``, Wine's ``Z:/host``. Under Wine a pipe is no standard stream that Node
can use, so it talks through a socket. Run as a module this file tests the lab: a product of
matrices, because a Wine that is too old makes the session and then multiplies wrongly.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mha_export.targets import _platform
from mha_export.targets._node import SCRIPTS, Link, NodeEndedError

FIX = "scripts/directml_lab, as root, builds a lab with the real DirectML on Wine (read it first)"
HOST = "Z:/host"
START_S = 180.0
"""Wine starts in seconds; on a loaded machine, or for the first time, it takes longer."""


def lab_folder() -> Path:
    """Where the lab is or would be: ``MHA_EXPORT_DIRECTML_LAB``, else in the cache."""
    chosen = os.environ.get("MHA_EXPORT_DIRECTML_LAB")
    return Path(chosen) if chosen else _platform.cache_dir() / "directml-lab"


def lab_versions() -> Mapping[str, str] | None:
    """Versions of ``onnxruntime``, ``directml``, ``wine``, ``mesa``; None: there is no lab."""
    try:
        text = (lab_folder() / "directml" / "lab.json").read_text(encoding="utf-8")
        return {str(name): str(version) for name, version in json.loads(text).items()}
    except (OSError, json.JSONDecodeError, AttributeError):
        return None


def serve() -> Link:
    """Start Node in the lab, and wait until it has called back.

    Errors:
        NodeEndedError: it ended, or did not call in time.
    """
    lab = lab_folder().resolve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [
                *(str(lab / "directml" / "enter"), str(lab), "/directml/node"),
                *(f"{HOST}{SCRIPTS.resolve() / 'serve.mjs'}", "directml", "Z:/directml/app"),
                str(port),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            encoding="utf-8",
        )
        connection = _accept(listener, process)
    with connection:  # it stays open until both of its files are closed
        requests = connection.makefile("w", encoding="utf-8")
        replies = connection.makefile("r", encoding="utf-8")
    return Link(process=process, requests=requests, replies=replies, root=HOST)


def _accept(listener: socket.socket, process: subprocess.Popen[str]) -> socket.socket:
    listener.settimeout(0.5)
    for _ in range(int(START_S / 0.5)):
        try:
            return listener.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                raise NodeEndedError(
                    f"the lab in {lab_folder()} ended with code {process.returncode}; "
                    "it can be entered by root, where new namespaces are allowed"
                ) from None
    process.kill()
    process.wait()
    raise NodeEndedError(f"Node in the lab did not answer within {START_S:g} s")


def computes_right() -> bool:
    """Whether a product of matrices, added to itself, comes out right in the lab.

    The sum is of two tensors of one shape and a multiple of 4 numbers, which DirectML gives to a
    shader of model 6: Wine as Debian builds it refuses that.
    """
    import tempfile

    import numpy as np
    import onnx

    from mha_export.targets._target import CompileOptions, Program
    from mha_export.targets.directml import TARGET

    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[m, k] a, float[k, n] b) => (float[m, n] c) { p = MatMul(a, b) c = Add(p, p) }"""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((37, 65), (65, 24)))
    with tempfile.TemporaryDirectory(prefix="mha_export-lab-") as name:
        path = Path(name) / "product.onnx"
        onnx.save(onnx.parser.parse_model(text), path)
        options = CompileOptions(workdir=Path(name) / "built", threads=1)
        session = TARGET.compile(Program(graphs={"main": path}), options).load()
        doubled = session.run({"a": a, "b": b})["c"]
    return bool(np.allclose(doubled, 2 * (a.astype(np.float64) @ b), atol=1e-4))


if __name__ == "__main__":
    sys.exit(not computes_right())
