"""Decoders and their caches: giving one, changing its kind, proving it, saying what it is."""

from __future__ import annotations

from mha_export.caches.describe import layout_of
from mha_export.caches.grow import Cached, with_cache
from mha_export.caches.steps import StepProof, prove_steps

__all__ = ["Cached", "StepProof", "layout_of", "prove_steps", "with_cache"]
