"""From a graph to a verdict for every softmax and every fused attention node in it."""

from __future__ import annotations

from mha_export.recognise._recognise import recognise
from mha_export.recognise._site import (
    NotAttention,
    Reason,
    Recognition,
    Rejection,
    Site,
    Verdict,
)

__all__ = ["NotAttention", "Reason", "Recognition", "Rejection", "Site", "Verdict", "recognise"]
