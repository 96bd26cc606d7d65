"""``com.microsoft`` DecoderMaskedSelfAttention: recognised, never restated."""

from __future__ import annotations

from mha_export.recognise._site import Site
from mha_export.recognise.fused._node import FusedNode, Reader


def _read(fused: FusedNode) -> Site:
    fused.refuse(
        "beam-buffers",
        "its caches are beam-search buffers that the kernel reorders in place",
        "export with MultiHeadAttention and a growing past",
    )


READER = Reader(domain="com.microsoft", op_type="DecoderMaskedSelfAttention", read=_read)
