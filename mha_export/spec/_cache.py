"""Keys and values kept from earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mha_export.spec._types import Dim


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Keys and values kept from earlier steps.

    Attributes:
        growth: ``concat`` (present = past ++ new), ``static`` (a buffer of ``max_length`` written
            at ``kv_lengths - s``), ``shared_buffer`` (static, one buffer bound as past and
            present). Both static kinds need the ``kv_lengths`` operand, new tokens counted, and
            imply that keys at or beyond it are masked.
        layout: axis order of the cache tensors, ``bhsd`` or ``bshd``.
    """

    growth: Literal["concat", "static", "shared_buffer"] = "concat"
    layout: Literal["bhsd", "bshd"] = "bhsd"
    max_length: Dim | None = None
