"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mha_export.errors import SpecError


class RotaryStyle(StrEnum):
    HALF = "half"
    """Channel i pairs with i + r/2 (GPT-NeoX, Llama)."""
    INTERLEAVED = "interleaved"
    """Channel 2i pairs with 2i + 1 (GPT-J, RoFormer)."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How a rotary table stretches beyond the trained length.

    ``kind`` linear: positions / factor. ntk: theta * factor^(d/(d-2)). yarn (Peng et al. 2023) and
    llama3 (Llama 3.1): per-frequency interpolation between the two limits. yarn also multiplies
    cosine and sine by ``attention_factor`` (None: ``0.1 ln(factor) + 1``); ``truncate`` rounds its
    two limits to whole channels (gpt-oss does not).
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise SpecError(f"rotary.scaling.factor is {self.factor}; expected above 0")
        if self.kind in ("yarn", "llama3") and self.original_max_positions is None:
            raise SpecError(
                f"rotary.scaling of kind {self.kind} needs original_max_positions",
                fix="state the length the model was trained with",
            )


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary position embedding of queries and keys (Su et al. 2021).

    For a pair (x, y) at position n and frequency w: ``(x cos nw - y sin nw, y cos nw + x sin nw)``
    over ``dim`` channels of each head, from channel ``offset`` on.

    Attributes:
        offset: the first rotated channel; with :class:`LatentSpec` it follows from that, see
            :attr:`AttentionSpec.rotary_offset`.
        theta: base of the frequencies; None where the tables come as operands.
        positions: ``sequence`` (past length + 0, 1, ...) or ``input`` (``position_ids`` [b, s]).
        key: whether keys are rotated too (they always are in decoders; not with shared rotated K).
    """

    style: RotaryStyle = RotaryStyle.HALF
    dim: int
    offset: int = 0
    theta: float | None = None
    scaling: RotaryScaling | None = None
    max_positions: int | None = None
    positions: Literal["sequence", "input"] = "sequence"
    key: bool = True

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise SpecError(f"rotary.dim is {self.dim}; expected a positive even number")
        if self.offset < 0:
            raise SpecError(f"rotary.offset is {self.offset}; expected 0 or more")
