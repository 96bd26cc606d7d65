"""``com.microsoft`` PackedAttention: recognised, never restated."""

from __future__ import annotations

from mha_export.recognise._site import Site
from mha_export.recognise.fused._node import FusedNode, Reader


def _read(fused: FusedNode) -> Site:
    fused.refuse(
        "ragged-batch",
        "its tokens of all sequences lie in one axis without padding",
        "export with MultiHeadAttention and a key padding mask",
    )


READER = Reader(domain="com.microsoft", op_type="PackedAttention", read=_read)
