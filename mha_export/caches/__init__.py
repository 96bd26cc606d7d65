"""Decoders and their caches: giving one, changing its kind, saying what it is."""

from __future__ import annotations
