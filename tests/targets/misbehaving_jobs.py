"""Jobs for worker processes that end badly, each in its own way."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from mha_export.errors import InputError


def double(x: int) -> int:
    return 2 * x


def print_and_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    os.write(1, b"native print to descriptor 1\n")
    print("python print")
    return a + b


def raise_input_error() -> None:
    raise InputError("the file is damaged", fix="write it again")


def raise_runtime_error() -> None:
    raise RuntimeError("node 'MatMul_3' has no kernel")


def raise_memory_error() -> None:
    raise MemoryError


def say_bad_alloc() -> None:
    raise RuntimeError("std::bad_alloc")


def segfault() -> None:
    print("about to read address 0", file=sys.stderr, flush=True)
    import ctypes

    ctypes.string_at(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_quietly() -> None:
    os._exit(7)


def spin_forever() -> None:
    while True:
        pass


def sleep_forever() -> None:
    time.sleep(3600)


def never_answer(*_asked: object) -> None:
    sleep_forever()


def allocate_without_end() -> None:
    held = []
    while True:
        held.append(np.ones(4 << 20, np.float64))  # 32 MiB, touched


def allocate_in_a_child() -> None:
    import subprocess

    code = "x = []\nwhile True: x.append(bytearray(b'1' * (32 << 20)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def return_what_does_not_pickle() -> object:
    return lambda: None


def pid() -> int:
    return os.getpid()


def print_much(lines: int) -> None:
    for line in range(lines):
        print(f"line {line}", file=sys.stderr)
