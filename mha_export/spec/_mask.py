"""Which (query, key) pairs take part, and what is added to their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mha_export.errors import SpecError
from mha_export.spec._types import Dim


class CausalAlignment(StrEnum):
    """Which corner of the score matrix the causal diagonal passes through.

    Query ``s`` sees key ``t`` when ``t <= s + offset``. They differ when s and t differ.
    """

    TOP_LEFT = "top_left"
    """offset 0: query 0 sees key 0 only (PyTorch ``is_causal``)."""

    BOTTOM_RIGHT = "bottom_right"
    """offset = number of keys - number of queries: the last query sees every key. With a past
    (or valid lengths) the offset is the past length, which is the same number where there are as
    many new keys as queries."""


class EmptyRow(StrEnum):
    """What a query gets whose keys are all masked."""

    ZERO = "zero"
    NAN = "nan"
    UNIFORM = "uniform"
    """The mean over *all* t values: the fill absorbs every score (dtype minimum)."""
    FINITE = "finite"
    """Softmax of score + finite fill: what the arithmetic gives."""
    NOT_APPLICABLE = "n/a"
    """No row can be empty under this mask."""


Fill = Literal["-inf", "min"] | float
"""The value of a forbidden score: -inf, the dtype's minimum, or a finite number that is *added*."""


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which (query, key) pairs take part, and what is added to their scores.

    All stated parts hold at once. Operands (arrays or graph values) carry the parts' data:
    ``keep`` [broadcastable to b,h,s,t] bool, ``bias`` likewise float, ``key_padding`` [b, t]
    (nonzero: key takes part), ``kv_lengths`` [b] (keys ``< length`` take part),
    ``prefix_lengths`` [b], ``document_ids`` [b, t].

    Attributes:
        causal: None, or the alignment of the diagonal.
        left_window: query at position i sees keys ``t >= i - left_window`` (ONNX opset 25);
            Hugging Face's ``sliding_window = w`` is ``left_window = w - 1``.
        right_window: query at position i sees keys ``t <= i + right_window``.
        keep: shape of a boolean keep-mask operand (True: takes part), or None. Its last axis
            may be shorter than the keys: missing keys are masked. Other axes of 1 broadcast; the
            last one never does (as in ``ai.onnx`` Attention: 1 means one key, not all keys).
        bias: shape of an additive bias operand, or None. Its last axis may be shorter than
            the keys: missing keys are masked (they get the fill). Its -inf entries mask too:
            a row with nothing else is an empty row.
        padding: a ``key_padding`` operand takes part (holes and left padding allowed).
        lengths: a ``kv_lengths`` operand takes part.
        prefix: keys ``< prefix_lengths[b]`` are seen by every query whatever ``causal`` says
            (every other part still holds).
        block: chunk size c: a query at position i sees key t only when ``i // c == t // c``.
        documents: a ``document_ids`` operand takes part: pairs of unequal id are masked; the
            query's id is that of the key at its position i.
        alibi_slopes: one slope a query head; ``slope * (t - i)`` is added to the scores.
        fill: what a forbidden score becomes: ``-inf``; ``min``, the minimum of the io dtype, the
            score absorbed; or score + a finite number, which a large score can outbid.
        empty_row: what a row with no key gets. ``n/a`` where no row can be empty. With sinks the
            softmax of an empty row is defined and gives zero, so state ``zero`` there.
    """

    causal: CausalAlignment | None = None
    left_window: int | None = None
    right_window: int | None = None
    keep: tuple[Dim, ...] | None = None
    bias: tuple[Dim, ...] | None = None
    padding: bool = False
    lengths: bool = False
    prefix: bool = False
    block: int | None = None
    documents: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    fill: Fill = "-inf"
    empty_row: EmptyRow = EmptyRow.NOT_APPLICABLE

    def __post_init__(self) -> None:
        for name in ("left_window", "right_window"):
            window = getattr(self, name)
            if window is not None and window < 0:
                raise SpecError(
                    f"mask.{name} is {window}; expected 0 or more",
                    fix="leave it out for an unlimited window",
                )
        if self.block is not None and self.block < 1:
            raise SpecError(f"mask.block is {self.block}; expected a chunk size of 1 or more")
        for name in ("keep", "bias"):
            shape = getattr(self, name)
            if shape is not None and not 1 <= len(shape) <= 4:
                raise SpecError(
                    f"mask.{name} has rank {len(shape)}; expected 1 to 4, broadcastable to "
                    "[batch, q_heads, q_len, kv_len]"
                )
        if isinstance(self.fill, float) and not math.isfinite(self.fill):
            raise SpecError(
                f"mask.fill is {self.fill}; expected '-inf', 'min' or a finite number",
                fix="write the text '-inf' for minus infinity",
            )
        if self.empty_row is EmptyRow.NOT_APPLICABLE and self.may_empty_a_row:
            raise SpecError(
                "the mask can leave a query without a key, but mask.empty_row is n/a",
                fix="state empty_row: zero, nan, uniform or finite",
            )

    @property
    def hides_keys(self) -> bool:
        """Whether any rule can forbid a (query, key) pair."""
        return bool(
            self.causal
            or self.left_window is not None
            or self.right_window is not None
            or self.keep is not None
            or self.padding
            or self.lengths
            or self.block is not None
            or self.documents
        )

    @property
    def may_empty_a_row(self) -> bool:
        """Whether data can leave a row without keys (positions alone are the spec's affair)."""
        return bool(self.keep is not None or self.padding or self.lengths)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the data-carrying parts, as ``inspect --json`` lists them."""
        present = {
            "padding": self.padding,
            "lengths": self.lengths,
            "keep": self.keep is not None,
            "bias": self.bias is not None,
            "alibi": self.alibi_slopes is not None,
            "prefix": self.prefix,
            "block": self.block is not None or self.documents,
        }
        return tuple(name for name, here in present.items() if here)
