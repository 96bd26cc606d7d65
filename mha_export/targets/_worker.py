"""Worker processes: a runtime that crashes, hangs or eats the memory is a result.

A worker is a fresh Python interpreter (never a fork: runtimes start threads, and Windows has none),
so it needs no guarded ``__main__`` in the caller's script. Its memory is watched from outside,
descendants included: ``RLIMIT_AS`` would count address space that runtimes reserve and never use.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, Literal, TypeVar, cast

from mha_export import errors
from mha_export.targets import _platform
from mha_export.targets._serve import END_OF_OUTPUT, read_frame, write_frame

Kind = Literal["ok", "error", "crash", "timeout", "out-of-memory"]
T = TypeVar("T")

POLL_S = 0.02
FAMILY_S = 0.2
TAIL_BYTES = 8192
START_S = 60.0
OUTPUT_S = 2.0
"""How long to wait for the last of what a request printed, after its reply."""
EXIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may use.

    Attributes:
        seconds: wall clock.
        memory_mb: resident MiB of worker and descendants; None: four fifths of what is free.
    """

    seconds: float = 300.0
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"limits.seconds is {self.seconds}; expected above 0")


@dataclass(frozen=True, kw_only=True)
class Job(Generic[T]):
    """A call to make in a worker: a function that can be imported, and arguments that pickle."""

    function: Callable[..., T]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def path(self) -> str:
        """``module:qualified.name``.

        Errors:
            ValueError: a worker could not import it (a lambda, a nested function, ``__main__``).
        """
        module, name = self.function.__module__, self.function.__qualname__
        if "<" in name or module == "__main__":
            raise ValueError(
                f"{module}.{name} cannot be imported by a worker process; "
                "expected a function at the top level of an importable module"
            )
        return f"{module}:{name}"


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """What became of one request.

    Attributes:
        kind: ``ok``; ``error`` (it raised); ``crash`` (the process died); ``timeout``;
            ``out-of-memory`` (over its limit, or the runtime said so).
        error_type: name of the exception class, where it raised.
        signal: what killed the process (``SIGSEGV``, ``access violation``).
        output_tail: last lines of what the worker and its runtime printed.
    """

    kind: Kind
    value: T | None = None
    error_type: str | None = None
    message: str = ""
    fix: str | None = None
    signal: str | None = None
    output_tail: str = ""
    seconds: float = 0.0
    peak_rss_mb: float = 0.0

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    @property
    def reason(self) -> str:
        """One line for a record: the kind, the signal, and the runtime's own words."""
        if self.ok:
            return ""
        text = self.message.strip()
        if self.kind == "error":
            return text or str(self.error_type)
        last = self.output_tail.strip().splitlines()
        tail = f"; last output: {last[-1].strip()}" if last else ""
        return f"{self.kind}: {text}{tail}"

    def unwrap(self) -> T:
        """The value.

        Errors:
            mha_export.errors.MhaExportError: of the kind that was raised in the worker.
            WorkerError: anything else went wrong.
        """
        if self.ok:
            return cast(T, self.value)
        kind = getattr(errors, self.error_type or "", None)
        if isinstance(kind, type) and issubclass(kind, errors.MhaExportError):
            raise kind(self.message, fix=self.fix)
        raise WorkerError(self)


class WorkerError(RuntimeError):
    """A request to a worker did not end well; ``outcome`` says how."""

    def __init__(self, outcome: Outcome[Any]) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def isolated(job: Job[T], *, limits: Limits | None = None) -> Outcome[T]:
    """Run one job in a worker process of its own.

    Never raises for what the job does: a crash, a hang and an exhausted memory come back as data.
    """
    with Worker() as worker:
        return worker.call(job, limits=limits)


class Worker:
    """A worker process that serves requests one after the other until it is closed or dies.

    Args:
        environ: variables added to the worker's environment.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = bytearray()
        self._threads: list[threading.Thread] = []
        self._peak = 0.0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs (it starts with the first call, and again after a death)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def call(self, job: Job[T], *, limits: Limits | None = None) -> Outcome[T]:
        """Send one request and wait for its end. A worker that died is started anew."""
        limits = limits or Limits()
        request = pickle.dumps((job.path(), job.args, dict(job.kwargs)), protocol=5)
        started = time.perf_counter()
        if not self.alive:
            self._start()
            first = self._wait(Limits(seconds=START_S, memory_mb=limits.memory_mb), started)
            if isinstance(first, Outcome):
                return first
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._tail.clear()
        started = time.perf_counter()
        # The pipe holds less than a big request: a worker that died must not block the writer.
        writer = threading.Thread(target=_write, args=(process.stdin, request), daemon=True)
        writer.start()
        reply = self._wait(limits, started)
        if isinstance(reply, Outcome):
            return reply
        return self._read_reply(reply)

    def close(self) -> None:
        """End the process: politely, then not."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=EXIT_S)
        self._reap(process)

    def _start(self) -> None:
        self.close()
        self._frames = queue.SimpleQueue()
        self._tail = bytearray()
        environ = {
            **os.environ,
            "PYTHONIOENCODING": "utf-8",
            "PYTHONFAULTHANDLER": "1",
            # Idle threads of one runtime otherwise slow those of the next three to ten times.
            "OMP_WAIT_POLICY": "passive",
            **self._environ,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mha_export.targets._serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            **_platform.worker_flags(),
        )
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        assert all(streams)
        self._threads = [
            threading.Thread(
                target=_collect, args=(self._process.stdout, self._frames), daemon=True
            ),
            threading.Thread(
                target=_keep_tail, args=(self._process.stderr, self._tail), daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        _write(self._process.stdin, pickle.dumps(sys.path))

    def _wait(self, limits: Limits, started: float) -> bytes | Outcome[Any]:
        """The next frame, or what went wrong before it came."""
        process = self._process
        assert process is not None
        memory_mb = limits.memory_mb or _platform.default_memory_limit_mb()
        peak = 0.0
        look_at_family = 0.0
        while True:
            try:
                frame = self._frames.get(timeout=POLL_S)
            except queue.Empty:
                frame = b""
            seconds = time.perf_counter() - started
            # Listing descendants reads the whole process table: seldom, the worker itself always.
            family = seconds >= look_at_family
            if family:
                look_at_family = seconds + FAMILY_S
            rss_mb = _platform.rss_mb(process.pid, descendants=family)
            self._peak = peak = max(peak, rss_mb)
            if frame:
                return frame
            if frame is None:
                return self._died(process, seconds, peak)
            if peak > memory_mb:
                return self._stop(
                    "out-of-memory", f"used {peak:.0f} MiB of {memory_mb} MiB", seconds, peak
                )
            if seconds > limits.seconds:
                return self._stop("timeout", f"no answer in {limits.seconds:g} s", seconds, peak)

    def _read_reply(self, reply: bytes) -> Outcome[Any]:
        kind, value, seconds = pickle.loads(reply)
        if kind == "ok":
            return Outcome(
                kind="ok",
                value=value,
                seconds=seconds,
                peak_rss_mb=self._peak,
                output_tail=self._all_printed(),
            )
        error_type, message, fix, trace = value
        if "bad_alloc" in message or "bad allocation" in message:
            kind = "out-of-memory"
        return Outcome(
            kind=kind,
            error_type=error_type,
            message=message,
            fix=fix,
            output_tail=(self._all_printed() + trace)[-TAIL_BYTES:],
            seconds=seconds,
            peak_rss_mb=self._peak,
        )

    def _died(self, process: subprocess.Popen[bytes], seconds: float, peak: float) -> Outcome[Any]:
        self._process = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=EXIT_S)
        self._reap(process)
        signal = _platform.death_of(process.returncode)
        how = f"killed by {signal}" if signal else f"exit code {process.returncode}"
        return Outcome(
            kind="crash",
            message=f"the worker process ended: {how}",
            signal=signal,
            output_tail=self._printed(),
            seconds=seconds,
            peak_rss_mb=peak,
        )

    def _stop(self, kind: Kind, message: str, seconds: float, peak: float) -> Outcome[Any]:
        process, self._process = self._process, None
        if process is not None:
            self._reap(process)
        return Outcome(
            kind=kind,
            message=message,
            output_tail=self._printed(),
            seconds=seconds,
            peak_rss_mb=peak,
        )

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        _platform.end_family(process)
        for thread in self._threads:
            thread.join(timeout=2.0)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # a broken pipe with bytes left to flush
                    continue

    def _all_printed(self) -> str:
        """What a request printed, once its last bytes have come through the pipe."""
        deadline = time.monotonic() + OUTPUT_S
        while not self._tail.endswith(END_OF_OUTPUT) and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._printed()

    def _printed(self) -> str:
        return bytes(self._tail).replace(END_OF_OUTPUT, b"").decode("utf-8", "replace")


def _write(stream: Any, payload: bytes) -> None:
    try:
        write_frame(stream, payload)
    except (OSError, ValueError):  # the worker is gone: the reader reports how
        return


def _collect(stream: Any, frames: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while (frame := read_frame(stream)) is not None:
            frames.put(frame)
    except (OSError, ValueError):
        pass
    frames.put(None)


def _keep_tail(stream: Any, tail: bytearray) -> None:
    try:
        while part := cast(BinaryIO, stream).read1(4096):  # type: ignore[attr-defined]
            tail += part
            del tail[: max(0, len(tail) - TAIL_BYTES)]
    except (OSError, ValueError):
        return
