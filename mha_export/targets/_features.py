"""The features an attention can ask of a runtime: their names, and a small spec that shows each.

A capability is one (form, feature, dtype). A site asks for all of :func:`features_of` its spec, so
the names here are what the exporter looks up.
"""

from __future__ import annotations

from collections.abc import Mapping

from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    QkOutput,
    RotarySpec,
    RotaryStyle,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT

PLAIN = AttentionSpec(q_heads=4, kv_heads=4, head_dim=16)
SQUARE = PLAIN.replace(kv_len="q_len")
DECODER = PLAIN.replace(
    kv_heads=2, mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec(growth="concat")
)
CAUSAL = SQUARE.replace(mask=MaskSpec(causal=TOP_LEFT))


def _masked(**parts: object) -> AttentionSpec:
    return PLAIN.replace(mask=MaskSpec(**parts))  # type: ignore[arg-type]


FEATURES: Mapping[str, AttentionSpec] = {
    "plain": PLAIN,
    "cross": PLAIN.replace(cross=True),
    "gqa": PLAIN.replace(kv_heads=2),
    "mqa": PLAIN.replace(kv_heads=1),
    "scale": PLAIN.replace(scale=1.0),
    "v_head_dim": PLAIN.replace(v_head_dim=8),
    "softcap": PLAIN.replace(softcap=2.0),
    "sinks": PLAIN.replace(sinks=True),
    "causal": CAUSAL,
    "causal_top_left": _masked(causal=TOP_LEFT),
    "causal_bottom_right": _masked(causal=BOTTOM_RIGHT),
    "causal_past": DECODER,
    "causal_gqa": CAUSAL.replace(kv_heads=2),
    "causal_softcap": CAUSAL.replace(kv_heads=2, softcap=2.0),
    "causal_padding": SQUARE.replace(
        mask=MaskSpec(causal=TOP_LEFT, padding=True, empty_row=EmptyRow.ZERO)
    ),
    "past": PLAIN.replace(cache=CacheSpec(growth="concat")),
    "static_cache": DECODER.replace(
        cache=CacheSpec(growth="static", max_length=24),
        mask=MaskSpec(causal=BOTTOM_RIGHT, lengths=True, empty_row=EmptyRow.ZERO),
    ),
    "left_window": CAUSAL.replace(mask=MaskSpec(causal=TOP_LEFT, left_window=3)),
    "right_window": SQUARE.replace(mask=MaskSpec(left_window=3, right_window=1)),
    "keep": _masked(keep=("batch", 1, "q_len", "kv_len"), empty_row=EmptyRow.ZERO),
    "bias": _masked(bias=("batch", 4, "q_len", "kv_len")),
    "padding": _masked(padding=True, empty_row=EmptyRow.ZERO),
    "lengths": _masked(lengths=True, empty_row=EmptyRow.ZERO),
    "prefix": SQUARE.replace(mask=MaskSpec(causal=TOP_LEFT, prefix=True)),
    "block": SQUARE.replace(mask=MaskSpec(block=4)),
    "documents": SQUARE.replace(mask=MaskSpec(documents=True)),
    "alibi": CAUSAL.replace(
        mask=MaskSpec(causal=TOP_LEFT, alibi_slopes=(0.5, 0.25, 0.125, 0.0625))
    ),
    "rotary_half": CAUSAL.replace(rotary=RotarySpec(style=RotaryStyle.HALF, dim=16)),
    "rotary_interleaved": CAUSAL.replace(rotary=RotarySpec(style=RotaryStyle.INTERLEAVED, dim=16)),
    "rotary_partial": CAUSAL.replace(rotary=RotarySpec(style=RotaryStyle.HALF, dim=8)),
    "rotary_past": DECODER.replace(rotary=RotarySpec(style=RotaryStyle.HALF, dim=16)),
    "qk_norm": CAUSAL.replace(qk_norm=QkNormSpec(kind="rms")),
    "qk_output": PLAIN.replace(qk_output=QkOutput.PROBABILITIES),
    "softmax_fp32": PLAIN.replace(io_dtype=DType.FP16, softmax_dtype=DType.FP32),
}
"""One spec for each feature, in the order ``doctor`` lists them."""

QUICK = ("plain", "gqa", "scale", "causal", "causal_past", "padding", "bias", "softcap")
"""What ``doctor --quick`` probes."""

SECOND_DTYPE = (
    *QUICK,
    *("mqa", "v_head_dim", "past", "static_cache", "keep", "left_window", "alibi"),
    *("causal_gqa", "causal_padding", "rotary_half", "rotary_past", "qk_output", "softmax_fp32"),
)
"""What is probed in every dtype after the first: where element types were seen to matter."""


def features_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of :data:`FEATURES` that a spec asks for; ``plain`` is always among them."""
    return tuple(name for name in FEATURES if name in _asked(spec))


def _asked(spec: AttentionSpec) -> frozenset[str]:
    mask, cached = spec.mask, spec.cache is not None
    concat = spec.cache is not None and spec.cache.growth == "concat"
    square = spec.q_len == spec.kv_len and not cached
    causal = mask.causal is not None
    shared = spec.kv_heads < spec.q_heads
    rotary = spec.rotary
    asked = {
        "plain": True,
        "cross": spec.cross,
        "gqa": shared and spec.kv_heads > 1,
        "mqa": spec.kv_heads == 1 and shared,
        "scale": abs(spec.effective_scale * spec.head_dim**0.5 - 1.0) > 1e-6,
        "v_head_dim": spec.value_dim != spec.head_dim,
        "softcap": spec.softcap is not None,
        "sinks": spec.sinks,
        "causal": causal and square,
        "causal_top_left": mask.causal is TOP_LEFT and not square,
        "causal_bottom_right": mask.causal is BOTTOM_RIGHT and not square and not cached,
        "causal_past": causal and concat,
        "causal_gqa": causal and shared,
        "causal_softcap": causal and spec.softcap is not None,
        "causal_padding": causal and mask.padding,
        "past": concat,
        "static_cache": cached and not concat,
        "left_window": mask.left_window is not None,
        "right_window": mask.right_window is not None,
        "keep": mask.keep is not None,
        "bias": mask.bias is not None,
        "padding": mask.padding,
        "lengths": mask.lengths,
        "prefix": mask.prefix,
        "block": mask.block is not None,
        "documents": mask.documents,
        "alibi": mask.alibi_slopes is not None,
        "rotary_half": rotary is not None and rotary.style is RotaryStyle.HALF,
        "rotary_interleaved": rotary is not None and rotary.style is RotaryStyle.INTERLEAVED,
        "rotary_partial": rotary is not None and rotary.dim < spec.head_dim,
        "rotary_past": rotary is not None and concat,
        "qk_norm": spec.qk_norm is not None,
        "qk_output": spec.qk_output is not None,
        "softmax_fp32": spec.effective_softmax_dtype is DType.FP32 is not spec.io_dtype,
    }
    return frozenset(name for name, here in asked.items() if here)
