"""The canonical statement of one multi-head attention.

Dimension legend, used in every docstring and in array names (``q_bhsd``, ``scores_bhst``):

====== =============================================================
letter meaning
====== =============================================================
b      batch
s      query length
t      key length, past included
p      past length
h      query heads (``q_heads``)
k      key/value heads (``kv_heads``); h is a multiple of k
g      query heads of one key/value head, ``h // k``
d      width of one query or key head (``head_dim``)
e      width of one value head (``v_head_dim``)
m      model width (``d_model``)
r      rotated channels of a head (``rotary.dim``)
====== =============================================================

The attention a spec states, per batch ``b`` and query head ``h`` with its key/value head
``k = h // g`` (heads *interleave*: query heads ``k*g .. k*g+g-1`` share key/value head ``k``)::

    q, key  = rotary(qk_norm(q)), rotary(qk_norm(key))
    x[s,t]  = scale * sum_d q[s,d] * key[t,d]
    x       = softcap * tanh(x / softcap)                  if softcap
    x[s,t]  = x[s,t] + bias[s,t] + alibi[h] * (t - (s + offset))
    x[s,t]  = fill                                          where a keep rule forbids (s, t)
    P       = softmax over t of x, a sink adding exp(sink[h]) to the denominator
    out     = sum_t P[s,t] * value[t,e]

where ``offset[b]`` is the position of query 0 among the keys. Every rule that speaks of positions
(causal, windows, block, documents, ALiBi) reads the *same* one, ``i = s + offset``:

========================================== ==================================================
the spec states                            offset
========================================== ==================================================
causal ``top_left``                        0
lengths, or a static cache                 ``kv_lengths[b] - q_len`` (negative: empty rows)
a concat cache                             the past length
causal ``bottom_right``                    ``kv_len - q_len``
none of these                              0
========================================== ==================================================

(first row that applies; it is the offset of ``ai.onnx`` Attention 25, whose ``is_causal`` is
``bottom_right`` with a past or lengths and ``top_left`` without). Rotary positions of
``sequence`` kind count from the past length of the *cache* (``kv_lengths - q_len`` where it is
static), and from 0 without one, for queries and new keys alike.

The cache holds keys as they enter the product: after qk-norm and rotary.
This module imports nothing else of the package and no array library.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from mha_export.errors import SpecError

Dim = int | str
"""A dimension: a number, or the name of a symbol."""


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


class DType(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP64 = "fp64"


class RotaryStyle(StrEnum):
    HALF = "half"
    """Channel i pairs with i + r/2 (GPT-NeoX, Llama)."""
    INTERLEAVED = "interleaved"
    """Channel 2i pairs with 2i + 1 (GPT-J, RoFormer)."""


class QkOutput(StrEnum):
    """Which score tensor [b, h, s, t] is also an output (``qk_matmul_output_mode`` of ONNX)."""

    RAW = "raw"
    """scale * Q Kᵀ."""
    CAPPED = "capped"
    """After softcap, before the mask."""
    MASKED = "masked"
    """After softcap and mask: what softmax reads."""
    PROBABILITIES = "probabilities"


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
    over the first ``dim`` channels of each head.

    Attributes:
        theta: base of the frequencies; None where the tables come as operands.
        positions: ``sequence`` (past length + 0, 1, ...) or ``input`` (``position_ids`` [b, s]).
        key: whether keys are rotated too (they always are in decoders; not with shared rotated K).

    With :class:`LatentSpec` the rotated channels are the last ones of a head, see
    :attr:`AttentionSpec.rotary_offset`.
    """

    style: RotaryStyle = RotaryStyle.HALF
    dim: int
    theta: float | None = None
    scaling: RotaryScaling | None = None
    max_positions: int | None = None
    positions: Literal["sequence", "input"] = "sequence"
    key: bool = True

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise SpecError(f"rotary.dim is {self.dim}; expected a positive even number")


@dataclass(frozen=True, kw_only=True)
class QkNormSpec:
    """Normalisation of queries and keys before rotary.

    rms: ``x / sqrt(mean(x^2) + epsilon) * w``; layer: ``(x - mean) / sqrt(var + epsilon) * w + b``;
    l2: ``x / max(|x|, epsilon)`` (times w). ``over`` head: each head alone, w and b [d]; hidden:
    all heads together, w and b [h*d] and [k*d]. ``key`` false: only queries are normalised (the
    keys are another site's, normalised there).
    """

    kind: Literal["rms", "layer", "l2"]
    epsilon: float = 1e-6
    over: Literal["head", "hidden"] = "head"
    weight: bool = True
    bias: bool = False
    key: bool = True


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


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2): keys and values expand from one latent vector.

    Each head's key is ``nope_dim`` channels expanded from the latent and ``rope_dim`` rotated
    channels shared by all heads; ``head_dim = nope_dim + rope_dim``.

    Attributes:
        kv_rank: width of the latent kept in the cache.
        q_rank: width of the query latent, or None for a direct projection.
        absorbed: the expansion is folded into query and output, attention runs over the latent
            (equal in exact arithmetic; kv_heads is then 1, value_source a prefix of K).
        v_dim: width of one expanded value head when absorbed (``v_head_dim`` is then kv_rank).
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    q_rank: int | None = None
    absorbed: bool = False
    v_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention. See the module docstring for the equation and the dimension legend.

    Attributes:
        q_heads: h. kv_heads: k, a divisor of h. head_dim: d. v_head_dim: e (None: d).
        scale: the whole factor on Q Kᵀ; None means *not stated*, and :attr:`effective_scale`
            then gives the convention ``1 / sqrt(head_dim)``.
        softcap: c in ``c * tanh(x / c)``, applied before the mask; None for none.
        sinks: an operand ``sinks`` [h] joins the softmax denominator.
        cross: keys and values come from another sequence than the queries.
        kv_source: ``own``, or the id of the site whose keys and values are shared.
        value_source: ``own``, or ``key_prefix``: the value is the first e channels of the key as
            it is cached (after qk-norm and rotary); no value operand or cache then.
        combine: heads are concatenated, or averaged.
        qk_output: the score tensor that is also an output.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    mask: MaskSpec = dataclasses.field(default_factory=MaskSpec)
    rotary: RotarySpec | None = None
    qk_norm: QkNormSpec | None = None
    cache: CacheSpec | None = None
    cross: bool = False
    kv_source: str = "own"
    value_source: Literal["own", "key_prefix"] = "own"
    projections: ProjectionSpec | None = None
    latent: LatentSpec | None = None
    combine: Literal["concat", "mean"] = "concat"
    qk_output: QkOutput | None = None
    io_dtype: DType = DType.FP32
    softmax_dtype: DType | None = None
    batch: Dim = "batch"
    q_len: Dim = "q_len"
    kv_len: Dim = "kv_len"

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.q_heads % self.kv_heads:
            near = [n for n in range(1, self.q_heads + 1) if self.q_heads % n == 0]
            raise SpecError(
                f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}",
                fix=f"for {self.q_heads} query heads, kv_heads may be one of {near}",
            )
        if self.v_head_dim is not None and self.v_head_dim < 1:
            raise SpecError(f"v_head_dim is {self.v_head_dim}; expected 1 or more")
        if self.softcap is not None and not self.softcap > 0:
            raise SpecError(
                f"softcap is {self.softcap}; expected above 0", fix="leave it out for no softcap"
            )
        if self.scale is not None and not math.isfinite(self.scale):
            raise SpecError(f"scale is {self.scale}; expected a finite number")
        if self.rotary is not None and self.rotary.dim > self.head_dim:
            raise SpecError(f"rotary.dim {self.rotary.dim} is above head_dim {self.head_dim}")
        slopes = self.mask.alibi_slopes
        if slopes is not None and len(slopes) != self.q_heads:
            raise SpecError(
                f"mask.alibi_slopes has {len(slopes)} values; expected q_heads = {self.q_heads}"
            )
        if self.cross and self.cache is not None and self.cache.growth == "concat":
            raise SpecError(
                "cross attention does not grow a cache by concat",
                fix="leave cache out: cross keys and values are computed once",
            )
        if self.value_source == "key_prefix" and self.value_dim > self.head_dim:
            raise SpecError(
                f"value_source key_prefix needs v_head_dim {self.value_dim} <= "
                f"head_dim {self.head_dim}"
            )
        if self.combine == "mean" and self.projections is not None and self.projections.output:
            raise SpecError("combine: mean is not followed by an output projection here")
        if self.projections is not None and self.projections.joint is not None:
            self._check_joint()
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: LatentSpec) -> None:
        if latent.absorbed:
            expected = {
                "kv_heads": (self.kv_heads, 1),
                "head_dim": (self.head_dim, latent.kv_rank + latent.rope_dim),
                "v_head_dim": (self.value_dim, latent.kv_rank),
                "value_source": (self.value_source, "key_prefix"),
            }
        else:
            expected = {"head_dim": (self.head_dim, latent.nope_dim + latent.rope_dim)}
        for name, (found, wanted) in expected.items():
            if found != wanted:
                kind = "absorbed" if latent.absorbed else "materialised"
                raise SpecError(f"{name} is {found}; {kind} latent attention has {wanted}")
        if self.rotary is not None and self.rotary.dim > latent.rope_dim:
            raise SpecError(f"rotary.dim {self.rotary.dim} is above latent.rope_dim")

    def _check_joint(self) -> None:
        beside = {
            "cross": self.cross,
            "cache": self.cache is not None,
            "latent": self.latent is not None,
            "qk_norm (state projections.joint.qk_norm)": self.qk_norm is not None,
            "value_source: key_prefix": self.value_source != "own",
            "combine: mean": self.combine == "mean",
            "a kv_len other than q_len": self.kv_len != self.q_len,
        }
        for name, here in beside.items():
            if here:
                raise SpecError(f"projections.joint does not go with {name}")

    @property
    def value_dim(self) -> int:
        """e, resolved."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def group(self) -> int:
        """g = h // k: how many query heads share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def effective_scale(self) -> float:
        """The factor on Q Kᵀ, ``1 / sqrt(head_dim)`` where none is stated."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def effective_softmax_dtype(self) -> DType:
        return self.io_dtype if self.softmax_dtype is None else self.softmax_dtype

    @property
    def uses_lengths(self) -> bool:
        """Whether ``kv_lengths`` takes part: stated, or implied by a static cache."""
        return self.mask.lengths or (self.cache is not None and self.cache.growth != "concat")

    @property
    def rotary_offset(self) -> int:
        """First rotated channel of a head: 0, or with latent attention the end of the others."""
        if self.rotary is None or self.latent is None:
            return 0
        return self.head_dim - self.latent.rope_dim

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def resolved(self) -> AttentionSpec:
        """The same attention with every default made explicit."""
        return self.replace(
            scale=self.effective_scale,
            v_head_dim=self.value_dim,
            softmax_dtype=self.effective_softmax_dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """The spec as ``inspect --json`` and ``export.json`` state it (defaults resolved)."""
        mask, rotary = self.mask, self.rotary
        return {
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.value_dim,
            "scale": self.effective_scale,
            "softcap": self.softcap,
            "causal": None if mask.causal is None else mask.causal.value,
            "left_window": mask.left_window,
            "right_window": mask.right_window,
            "mask": list(mask.parts),
            "fill": mask.fill if mask.hides_keys else None,
            "empty_row": mask.empty_row.value,
            "rotary": None if rotary is None else {"style": rotary.style.value, "dim": rotary.dim},
            "qk_norm": None if self.qk_norm is None else self.qk_norm.kind,
            "sinks": self.sinks,
            "cross": self.cross,
            "cache": None
            if self.cache is None
            else ("concat" if self.cache.growth == "concat" else "static"),
            "kv_source": self.kv_source,
            "combine": self.combine,
            "io_dtype": self.io_dtype.value,
            "softmax_dtype": self.effective_softmax_dtype.value,
            "dims": {"batch": self.batch, "q_len": self.q_len, "kv_len": self.kv_len},
        }
