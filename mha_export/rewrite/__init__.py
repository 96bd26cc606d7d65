"""From recognised sites to a rewritten, proven model."""

from __future__ import annotations

from mha_export.rewrite._outcome import (
    Choice,
    Keep,
    Proof,
    ProofCase,
    RewriteSettings,
    Rewritten,
    SiteOutcome,
)
from mha_export.rewrite._rewrite import rewrite
from mha_export.rewrite.gelus import with_contrib_gelus
from mha_export.rewrite.opset import with_opset
from mha_export.rewrite.precision import with_dtype
from mha_export.rewrite.quantised import WEIGHT_KINDS, with_quantised_weights
from mha_export.rewrite.selection import choose_form
from mha_export.rewrite.sines import with_own_sines

__all__ = [
    "WEIGHT_KINDS",
    "Choice",
    "Keep",
    "Proof",
    "ProofCase",
    "RewriteSettings",
    "Rewritten",
    "SiteOutcome",
    "choose_form",
    "rewrite",
    "with_contrib_gelus",
    "with_dtype",
    "with_opset",
    "with_own_sines",
    "with_quantised_weights",
]
