"""What a worker does for a target that ends badly: importable there, put in place of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping

import numpy as np

from mha_export.targets import CompileOptions, Program, _target_worker

ENDING = "TEST_ENDING"
VICTIM = "reference"


def segfault() -> None:
    print("about to read address 0", file=sys.stderr, flush=True)
    import ctypes

    ctypes.string_at(0)


def kill_itself() -> None:
    print("about to be killed", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def loop_forever() -> None:
    print("about to loop", file=sys.stderr, flush=True)
    while True:
        pass


def allocate_30_gb() -> None:
    print("about to allocate", file=sys.stderr, flush=True)
    held = [np.ones(4 << 20, np.float64) for _ in range(30 << 5)]  # touched, 32 MiB each
    raise AssertionError(f"{len(held)} pieces were allocated")


ENDINGS: Mapping[str, Callable[[], None]] = {
    "SIGSEGV": segfault,
    "SIGKILL": kill_itself,
    "endless loop": loop_forever,
    "30 GB": allocate_30_gb,
}


def compile_badly(target: str, program: Program, options: CompileOptions) -> object:
    if target == VICTIM:
        ENDINGS[os.environ[ENDING]]()
    return _target_worker._compile(target, program, options)


def run_badly(artifact: object, graph: str, inputs: Mapping[str, np.ndarray]) -> object:
    if VICTIM in type(artifact).__module__:
        ENDINGS[os.environ[ENDING]]()
    return _target_worker._run(artifact, graph, inputs)  # type: ignore[arg-type]
