"""Running a decoder that keeps its cache: prefill, step, generate. See docs/caches.md."""

from __future__ import annotations

from mha_export.decode.layout import KEY, CacheLayout, CacheTensor

__all__ = ["KEY", "CacheLayout", "CacheTensor"]
