"""What became of each attention in a TensorRT engine, read off the layers the builder reports.

With ``profiling_verbosity=DETAILED`` the builder's last message that begins ``Layers:`` lists every
layer of the engine. A fused attention is a layer ``_gemm_mha_v2`` (``_gemv_mha_v1`` for one query).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FUSED = re.compile(r"_?(?:gemm|gemv)_mha_v\d+|fmha|mha_fused", re.IGNORECASE)
NAME = re.compile(r"^Name: (?P<name>[^,]*), LayerType: (?P<kind>[^,]*)", re.MULTILINE)
TENSOR = re.compile(r"\{ Name: ([^,]*),")


@dataclass(frozen=True, kw_only=True)
class EngineLayers:
    """The layers of one engine.

    Attributes:
        names: every layer, in order of execution.
        fused: those that are fused attention kernels.
        read: names of the tensors that some layer reads.
    """

    names: tuple[str, ...]
    fused: tuple[str, ...]
    read: frozenset[str]

    def unread(
        self, inputs: tuple[str, ...], aliases: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """The inputs that no layer reads: an engine that ignores an input can't be right.

        ``aliases``: inputs that an engine updates in place, with the output they come out as; the
        layers know such a tensor by the output's name alone.
        """
        known = aliases or {}
        return tuple(
            name for name in inputs if name not in self.read and known.get(name) not in self.read
        )


def parse_layers(message: str) -> EngineLayers:
    """Read a ``Layers:`` message (the text before ``I/O Tensors:`` counts)."""
    text = message.partition("I/O Tensors:")[0]
    names: list[str] = []
    read: set[str] = set()
    for line in text.splitlines():
        found = NAME.match(line)
        if found is None:
            continue
        names.append(found["name"])
        inputs = line.partition("Inputs: [")[2].partition("], Constants:")[0]
        read.update(TENSOR.findall(inputs))
    fused = tuple(name for name in names if FUSED.search(name))
    return EngineLayers(names=tuple(names), fused=fused, read=frozenset(read))
