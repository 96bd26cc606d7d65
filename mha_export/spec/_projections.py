"""The linear layers around an attention: of one stream, and of two that are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mha_export.errors import SpecError
from mha_export.spec._norm import QkNormSpec
from mha_export.spec._types import Dim


@dataclass(frozen=True, kw_only=True)
class JointSpec:
    """A second stream of tokens in the same attention (MMDiT: Esser et al. 2024).

    Each stream has projections and qk-norm of its own; queries, keys and values of both are joined
    along the length, the stream of the hidden states first::

        q = [norm_1(x_1 W_Q1) ; norm_2(x_2 W_Q2)]        key, value likewise
        y = attention(q, key, value)                     q_len = kv_len = s_1 + s_2
        y_1 = y[:s_1] W_O1 ;  y_2 = y[s_1:] W_O2

    Biases and whether ``W_O`` follows are those of :class:`ProjectionSpec`, for both.

    Attributes:
        lengths: s_1 and s_2.
        d_model: width of the second stream; None: that of the first.
        qk_norm: of each stream before they are joined, each with weights of its own.
        output: whether the second stream comes out again (the last layer of a model drops it).
    """

    lengths: tuple[Dim, Dim]
    d_model: int | None = None
    qk_norm: QkNormSpec | None = None
    output: bool = True

    def __post_init__(self) -> None:
        if len(self.lengths) != 2:
            raise SpecError(
                f"projections.joint.lengths has {len(self.lengths)} entries; expected the lengths "
                "of two streams"
            )


@dataclass(frozen=True, kw_only=True)
class ProjectionSpec:
    """The linear layers around the attention: ``query = x W_Q + b_Q`` and so on.

    Attributes:
        d_model: width of the query-side input, and of the output when ``output``.
        kv_d_model: width of the key/value-side input (cross attention); None: ``d_model``.
        packing: ``separate`` three weights; ``packed`` one weight [Q all heads | K | V];
            ``interleaved`` one weight whose columns go head by head [q0 k0 v0 q1 k1 v1 ...]
            (per key/value group: its query heads, then k, then v).
        output: whether ``W_O`` [h*e, d_model] follows.
        joint: a second stream with projections of its own.
    """

    d_model: int
    kv_d_model: int | None = None
    packing: Literal["separate", "packed", "interleaved"] = "separate"
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    output: bool = True
    output_bias: bool = False
    joint: JointSpec | None = None

    def __post_init__(self) -> None:
        if self.d_model < 1:
            raise SpecError(f"projections.d_model is {self.d_model}; expected 1 or more")
        if self.joint is not None and self.packing != "separate":
            raise SpecError(
                f"projections.packing is {self.packing} beside projections.joint; expected separate"
            )
        if self.packing != "separate" and self.kv_d_model not in (None, self.d_model):
            raise SpecError(
                f"packed projections read one input, but kv_d_model {self.kv_d_model} "
                f"is not d_model {self.d_model}",
                fix="use packing: separate for cross attention",
            )
