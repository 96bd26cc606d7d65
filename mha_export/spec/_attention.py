"""One attention, with every part in its place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from mha_export.errors import SpecError
from mha_export.spec._cache import CacheSpec
from mha_export.spec._latent import LatentSpec
from mha_export.spec._mask import MaskSpec
from mha_export.spec._norm import QkNormSpec
from mha_export.spec._projections import ProjectionSpec
from mha_export.spec._rotary import RotarySpec
from mha_export.spec._types import Dim, DType


class QkOutput(StrEnum):
    """Which score tensor [b, h, s, t] is also an output (``qk_matmul_output_mode`` of ONNX)."""

    RAW = "raw"
    """scale * Q Kᵀ."""
    CAPPED = "capped"
    """After softcap, before the mask."""
    MASKED = "masked"
    """After softcap and mask: what softmax reads."""
    PROBABILITIES = "probabilities"


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
        if self.rotary is not None:
            self._check_rotary(self.rotary)
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

    def _check_rotary(self, rotary: RotarySpec) -> None:
        if rotary.dim > self.head_dim:
            raise SpecError(f"rotary.dim {rotary.dim} is above head_dim {self.head_dim}")
        if rotary.offset + rotary.dim > self.head_dim:
            raise SpecError(
                f"rotary.offset {rotary.offset} and rotary.dim {rotary.dim} go beyond head_dim "
                f"{self.head_dim}"
            )
        if self.latent is not None and rotary.offset not in (0, self.rotary_offset):
            raise SpecError(
                f"rotary.offset is {rotary.offset}; latent attention rotates from channel "
                f"{self.rotary_offset} on",
                fix="leave rotary.offset out beside latent",
            )

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
        """First rotated channel of a head: as stated, or what follows from the latent."""
        if self.rotary is None:
            return 0
        if self.latent is None:
            return self.rotary.offset
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

    def _rotary_to_json(self) -> dict[str, Any] | None:
        """Style and width, and the first rotated channel where that is not channel 0."""
        rotary, offset = self.rotary, self.rotary_offset
        if rotary is None:
            return None
        stated: dict[str, Any] = {"style": rotary.style.value, "dim": rotary.dim}
        return {**stated, "offset": offset} if offset else stated

    def to_json(self) -> dict[str, Any]:
        """The spec as ``inspect --json`` and ``export.json`` state it (defaults resolved)."""
        mask = self.mask
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
            "rotary": self._rotary_to_json(),
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
