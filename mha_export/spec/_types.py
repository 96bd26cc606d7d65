"""What every part of a spec is stated with: dimensions and element types."""

from __future__ import annotations

from enum import StrEnum

Dim = int | str
"""A dimension: a number, or the name of a symbol."""


class DType(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP64 = "fp64"
