"""The cyclic garbage collector, left out of work on one graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic collection inside.

    Every node and value of a graph is in a cycle and alive. Each full collection walks all of them
    and frees next to nothing: a third of the time at 24 layers, and more with each layer.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
