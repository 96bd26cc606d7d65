"""Readers of attention nodes that are already fused, one file per op.

A file whose name does not begin with ``_`` defines ``READER``; it states which op it reads.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_export.recognise._evaluate import Context
from mha_export.recognise._site import Rejection, Site


def is_fused(node: ir.Node) -> bool:
    """Whether some reader reads this node's op."""
    raise NotImplementedError


def read_fused(node: ir.Node, *, context: Context) -> Site | Rejection:
    """The attention a fused node states (its id is the node's name), or why it can't be stated."""
    raise NotImplementedError
