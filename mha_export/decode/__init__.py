"""Running a decoder that keeps its cache: prefill, step, generate. See docs/caches.md."""

from __future__ import annotations

from mha_export.decode.layout import KEY, CacheLayout, CacheTensor
from mha_export.decode.session import DecodeSession

__all__ = ["KEY", "CacheLayout", "CacheTensor", "DecodeSession"]
