"""Readers of attention nodes that are already fused, one file per op.

A file whose name does not begin with ``_`` defines ``READER``; it states which op it reads. What
a reader can't state exactly it rejects, with the attribute or input that stops it.
"""

from __future__ import annotations

import functools

import onnx_ir as ir

from mha_export.discovery import members
from mha_export.recognise._evaluate import Context
from mha_export.recognise._site import Rejection, Site
from mha_export.recognise.fused._node import FusedNode, Reader, Refused

__all__ = ["Reader", "is_fused", "read_fused", "readers"]


@functools.cache
def readers() -> dict[tuple[str, str], Reader]:
    """Every reader by (domain, op type)."""
    return {(reader.domain, reader.op_type): reader for reader in members(__name__, "READER")}


def is_fused(node: ir.Node) -> bool:
    """Whether some reader reads this node's op."""
    return _key(node) in readers()


def read_fused(node: ir.Node, *, context: Context) -> Site | Rejection:
    """The attention a fused node states (its id is the node's name), or why it can't be stated.

    Errors:
        KeyError: no reader reads this op (see :func:`is_fused`).
    """
    reader = readers()[_key(node)]
    try:
        return reader.read(FusedNode(node, context))
    except Refused as refused:
        return Rejection(
            id=node.name or node.op_type,
            anchor=node,
            reason=refused.reason,
            fused_as=node.op_type,
        )


def _key(node: ir.Node) -> tuple[str, str]:
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
