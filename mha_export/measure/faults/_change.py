"""What a fault changes of a right layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.measure.faults._bases import Base
from mha_export.spec import AttentionSpec

Edit = Callable[[ir.Model], bool]
"""Changes a graph in place; False: the graph has no place for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """One way to get a layer wrong; what is None stays as it was.

    Attributes:
        detail: which number, head or input.
        spec: what the wrong graph states.
        weights: of the wrong graph.
        edit: surgery on the built graph, the same on a float64 copy.
        plain: the edit needs the softmax in plain ops.
    """

    detail: str
    spec: AttentionSpec | None = None
    weights: Mapping[str, np.ndarray] | None = None
    edit: Edit | None = None
    plain: bool = False


Fault = Callable[[Base], Iterator[Change]]
