"""The child side of a worker process: ``python -m mha_export.targets._serve``.

Frames are a length (8 bytes, little endian) and a pickle. Requests come on the standard input and
replies go to what was the standard output; descriptor 1 is pointed at the standard error first, so
that nothing a runtime prints can end up among the replies.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

END_OF_OUTPUT = b"\0mha_export: end of output\0"
"""Written to the standard error when a request is done: what was printed before it has all come."""
GRACE_S = 10.0
"""How long a job may go on after our parent has gone."""


def read_frame(stream: BinaryIO) -> bytes | None:
    """One frame, or None at the end of the stream (also in the middle of a frame)."""
    header = _read_exactly(stream, 8)
    return None if header is None else _read_exactly(stream, int.from_bytes(header, "little"))


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    parts = []
    while size:
        part = stream.read(min(size, 1 << 24))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    stream.write(len(payload).to_bytes(8, "little"))
    stream.write(payload)
    stream.flush()


def resolve(path: str) -> Callable[..., Any]:
    """The function that ``module:qualified.name`` names."""
    module, _, qualified = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualified.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def answer(request: bytes) -> bytes:
    """Run one request; what it returned or raised, as a pickle that always loads."""
    started = time.perf_counter()
    try:
        function, args, kwargs = pickle.loads(request)
        value = resolve(function)(*args, **kwargs)
        return pickle.dumps(("ok", value, time.perf_counter() - started), protocol=5)
    except MemoryError as error:
        return _failure("out-of-memory", error, started)
    except Exception as error:
        return _failure("error", error, started)


def _failure(kind: str, error: Exception, started: float) -> bytes:
    from mha_export.errors import MhaExportError

    fix = error.fix if isinstance(error, MhaExportError) else None
    what = error.what if isinstance(error, MhaExportError) else str(error)
    details = (type(error).__name__, what or repr(error), fix, traceback.format_exc())
    return pickle.dumps((kind, details, time.perf_counter() - started), protocol=5)


def _receive(stream: BinaryIO, requests: queue.SimpleQueue[bytes | None]) -> None:
    while (frame := read_frame(stream)) is not None:
        requests.put(frame)
    requests.put(None)
    # The parent closed the pipe or died: a job stuck in native code must not outlive it for long.
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    stdin = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)

    first = read_frame(stdin)
    if first is None:
        return
    sys.path[:] = pickle.loads(first)
    from mha_export.targets._platform import silence_crash_dialogs

    silence_crash_dialogs()
    write_frame(replies, b"ready")
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(stdin, requests), daemon=True).start()
    while (request := requests.get()) is not None:
        reply = answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, END_OF_OUTPUT)
        write_frame(replies, reply)
    # Runtimes were seen to crash in their own destructors; the replies are out, so leave at once.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
