"""Normalisation of queries and keys, read by feeding random channels and comparing with the laws."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise._evaluate import Context
from mha_export.spec import QkNormSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class PeeledNorm:
    """A normalisation taken off: ``normed = norm(before) * weight + bias``."""

    spec: QkNormSpec
    weight: ir.Value | None
    bias: ir.Value | None
    before: ir.Value
    nodes: tuple[ir.Node, ...]


def peel_norm(normed: ir.Value, *, head_dim: int, context: Context) -> PeeledNorm | None:
    """Take the normalisation over the last axis off, or None when there is none.

    ``over`` is ``head`` when the last axis is ``head_dim`` wide, else ``hidden``.
    """
    raise NotImplementedError
