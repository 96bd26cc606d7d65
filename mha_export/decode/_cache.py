"""The cache of one sequence, as ONNX Runtime holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from mha_export.decode._graph import DecoderGraph
    from mha_export.decode.layout import CacheTensor


class Cache(Protocol):
    """Keys and values of the tokens so far.

    ``presents``: outputs that it binds, in this order.
    """

    batch: int
    length: int
    presents: tuple[str, ...]

    def bind(self, binding: Any) -> None:
        """Bind pasts and presents of the next run."""
        ...

    def advance(self, outputs: Mapping[str, Any], count: int) -> None:
        """Take over what the run gave; it read ``count`` tokens."""
        ...

    def reset(self) -> None:
        """Hold no tokens."""
        ...


class ConcatCache:
    """The presents of one run are the pasts of the next, where the runtime put them."""

    def __init__(self, graph: DecoderGraph, batch: int) -> None:
        self.batch = batch
        self._graph = graph
        self._tensors = graph.layout.tensors
        self.presents = tuple(tensor.present for tensor in self._tensors)
        self.reset()

    def reset(self) -> None:
        self.length = 0
        self._values = {t.past: _zeros(self._graph, t, self.batch, 0) for t in self._tensors}

    def bind(self, binding: Any) -> None:
        for tensor in self._tensors:
            binding.bind_ortvalue_input(tensor.past, self._values[tensor.past])
        for name in self.presents:
            binding.bind_output(name)

    def advance(self, outputs: Mapping[str, Any], count: int) -> None:
        self._values = {tensor.past: outputs[tensor.present] for tensor in self._tensors}
        self.length += count


class StaticCache:
    """Buffers of a fixed length, each bound as past and as present."""

    def __init__(self, graph: DecoderGraph, batch: int, room: int) -> None:
        self.batch = batch
        self.length = 0
        self._tensors = graph.layout.tensors
        self.presents = tuple(tensor.present for tensor in self._tensors)
        self.buffers = {t.past: _zeros(graph, t, batch, room) for t in self._tensors}

    def reset(self) -> None:
        # What is left in the buffers lies beyond the length: no query sees it.
        self.length = 0

    def bind(self, binding: Any) -> None:
        for tensor in self._tensors:
            binding.bind_ortvalue_input(tensor.past, self.buffers[tensor.past])
            binding.bind_ortvalue_output(tensor.present, self.buffers[tensor.past])

    def advance(self, outputs: Mapping[str, Any], count: int) -> None:
        self.length += count


def _zeros(graph: DecoderGraph, tensor: CacheTensor, batch: int, length: int) -> Any:
    import onnxruntime

    shape = [batch, tensor.heads, tensor.heads, tensor.dim]
    shape[tensor.axis] = length
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, graph.dtype(tensor.past)))
