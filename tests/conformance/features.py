"""Every feature a spec can state, each alone or beside what it is known to interact with."""

from __future__ import annotations

from typing import Any

from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    LatentSpec,
    MaskSpec,
    QkNormSpec,
    QkOutput,
    RotaryScaling,
    RotarySpec,
    RotaryStyle,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
SLOPES = (0.5, 0.25, 0.125, 0.0625)
SQUARE = {"q_len": "s", "kv_len": "s"}
KEEP = ("batch", 1, "q_len", "kv_len")


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 4, "head_dim": 16} | fields)


def _gqa(**fields: Any) -> AttentionSpec:
    return _spec(**{"kv_heads": 2} | fields)


def _cached(cache: CacheSpec | None = None, **mask: Any) -> dict[str, Any]:
    return {
        "mask": MaskSpec(**{"causal": BOTTOM_RIGHT} | mask),
        "cache": cache or CacheSpec(),
    }


def _rotary(**fields: Any) -> RotarySpec:
    return RotarySpec(**{"dim": 16, "theta": 1e4, "max_positions": 4096} | fields)


def _scaled(kind: Any, factor: float) -> RotarySpec:
    scaling = RotaryScaling(kind=kind, factor=factor, original_max_positions=64)
    return _rotary(scaling=scaling)


HEADS = {
    "mha": _spec(),
    "cross": _spec(cross=True, q_len="s", kv_len="t"),
    "gqa": _gqa(),
    "gqa-square": _gqa(**SQUARE),
    "mqa": _spec(kv_heads=1, **SQUARE),
    "gqa-of-equal-heads": _spec(**SQUARE, **_cached()),
    "v-head-dim": _spec(v_head_dim=8),
    "gqa-v-head-dim": _gqa(v_head_dim=8),
    "head-dim-512": _spec(q_heads=1, kv_heads=1, head_dim=512, **SQUARE),
    "head-dim-6": _spec(head_dim=6, **SQUARE),
    "mean": _spec(combine="mean"),
    "key-prefix": _spec(kv_heads=1, value_source="key_prefix", v_head_dim=8),
    "key-prefix-whole": _spec(kv_heads=1, value_source="key_prefix"),
    "key-prefix-cache": _spec(kv_heads=1, value_source="key_prefix", v_head_dim=8, **_cached()),
    "key-prefix-static": _spec(
        kv_heads=1, value_source="key_prefix", v_head_dim=8, **_cached(CacheSpec(growth="static"))
    ),
    "latent-absorbed": _spec(
        kv_heads=1,
        value_source="key_prefix",
        v_head_dim=12,
        latent=LatentSpec(kv_rank=12, nope_dim=8, rope_dim=4, absorbed=True),
        rotary=_rotary(dim=4),
        **_cached(),
    ),
    "softmax-fp32": _gqa(softmax_dtype=DType.FP32, **SQUARE),
}
SCALES = {
    "scale-1": _gqa(scale=1.0, **SQUARE),
    "scale-eighth": _gqa(scale=0.125, **SQUARE),
    "scale-negative": _gqa(scale=-0.5, **SQUARE),
    "scale-0": _gqa(scale=0.0, **SQUARE),
    "softcap": _gqa(softcap=2.0, **SQUARE),
    "softcap-keep": _gqa(
        softcap=2.0, mask=MaskSpec(keep=("batch", 1, "s", "s"), empty_row=EmptyRow.ZERO), **SQUARE
    ),
}
POSITIONS = {
    "causal-top-left": _spec(mask=MaskSpec(causal=TOP_LEFT)),
    "causal-bottom-right": _spec(mask=MaskSpec(causal=BOTTOM_RIGHT)),
    "causal-square": _gqa(mask=MaskSpec(causal=TOP_LEFT), **SQUARE),
    "causal-square-bottom-right": _gqa(mask=MaskSpec(causal=BOTTOM_RIGHT), **SQUARE),
    "window-left": _gqa(mask=MaskSpec(causal=TOP_LEFT, left_window=2), **SQUARE),
    "window-0": _gqa(mask=MaskSpec(causal=TOP_LEFT, left_window=0), **SQUARE),
    "window-both": _spec(mask=MaskSpec(left_window=1, right_window=2), **SQUARE),
    "window-cross": _spec(cross=True, mask=MaskSpec(left_window=3, right_window=1)),
    "block": _spec(mask=MaskSpec(block=3), **SQUARE),
    "block-bottom-right": _spec(mask=MaskSpec(block=3, causal=BOTTOM_RIGHT)),
    "documents": _spec(mask=MaskSpec(documents=True, causal=TOP_LEFT), **SQUARE),
    "documents-lengths": _spec(
        mask=MaskSpec(documents=True, lengths=True, empty_row=EmptyRow.ZERO), q_len=2
    ),
    "prefix": _gqa(mask=MaskSpec(prefix=True, causal=TOP_LEFT), **SQUARE),
    "alibi": _spec(mask=MaskSpec(alibi_slopes=SLOPES, causal=TOP_LEFT), **SQUARE),
    "alibi-alone": _spec(mask=MaskSpec(alibi_slopes=SLOPES)),
}
CACHES = {
    "cache": _gqa(**_cached()),
    "cache-mha": _spec(**_cached()),
    "cache-v-head-dim": _spec(v_head_dim=8, **_cached()),
    "cache-top-left": _gqa(**_cached(causal=TOP_LEFT)),
    "cache-not-causal": _gqa(**_cached(causal=None)),
    "cache-bshd": _gqa(**_cached(CacheSpec(layout="bshd"))),
    "cache-window": _gqa(**_cached(left_window=3)),
    "cache-prefix": _gqa(**_cached(prefix=True)),
    "cache-alibi": _spec(**_cached(alibi_slopes=SLOPES)),
    "cache-lengths": _gqa(**_cached(lengths=True, empty_row=EmptyRow.ZERO)),
    "cache-padding": _gqa(**_cached(padding=True, empty_row=EmptyRow.ZERO)),
    "cache-padding-uniform": _gqa(**_cached(padding=True, empty_row=EmptyRow.UNIFORM)),
    "decode-not-causal": _gqa(q_len=1, **_cached(causal=None)),
    "one-row-not-causal": _gqa(batch=1, **_cached(causal=None)),
    "static": _gqa(**_cached(CacheSpec(growth="static"))),
    "static-shared": _gqa(**_cached(CacheSpec(growth="shared_buffer"))),
    "static-not-causal": _gqa(**_cached(CacheSpec(growth="static"), causal=None)),
    "static-top-left": _gqa(
        **_cached(CacheSpec(growth="static"), causal=TOP_LEFT, empty_row=EmptyRow.ZERO)
    ),
    "static-bshd": _gqa(**_cached(CacheSpec(growth="static", layout="bshd"))),
    "static-window": _gqa(**_cached(CacheSpec(growth="static"), left_window=3)),
    "static-decode": _gqa(q_len=1, **_cached(CacheSpec(growth="static", max_length=12))),
}
LENGTHS = {
    "lengths": _spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
    "lengths-nan": _spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.NAN)),
    "lengths-causal": _spec(
        mask=MaskSpec(lengths=True, causal=BOTTOM_RIGHT, empty_row=EmptyRow.ZERO)
    ),
    "lengths-top-left": _spec(
        mask=MaskSpec(lengths=True, causal=TOP_LEFT, empty_row=EmptyRow.ZERO)
    ),
    "lengths-window": _spec(
        mask=MaskSpec(lengths=True, left_window=2, right_window=0, empty_row=EmptyRow.ZERO)
    ),
}
BIASES = {
    "bias": _spec(mask=MaskSpec(bias=(1, 4, "q_len", "kv_len"))),
    "bias-rank-2": _spec(mask=MaskSpec(bias=("q_len", "kv_len"))),
    "bias-rank-1": _spec(mask=MaskSpec(bias=("kv_len",))),
    "bias-heads": _spec(mask=MaskSpec(bias=(4, 1, "kv_len"))),
    "bias-short": _spec(mask=MaskSpec(bias=("q_len", "mask_len"), empty_row=EmptyRow.ZERO)),
    "bias-causal": _gqa(
        mask=MaskSpec(bias=(1, 4, "s", "s"), causal=TOP_LEFT, empty_row=EmptyRow.ZERO), **SQUARE
    ),
    "bias-min": _gqa(
        mask=MaskSpec(
            bias=(1, 4, "s", "s"), causal=TOP_LEFT, fill="min", empty_row=EmptyRow.UNIFORM
        ),
        **SQUARE,
    ),
    "bias-finite": _gqa(
        mask=MaskSpec(
            bias=(1, 4, "s", "s"), padding=True, fill=-10000.0, empty_row=EmptyRow.FINITE
        ),
        **SQUARE,
    ),
    "bias-alibi": _spec(
        mask=MaskSpec(bias=("s", "s"), alibi_slopes=SLOPES, causal=TOP_LEFT), **SQUARE
    ),
    "keep-short": _spec(mask=MaskSpec(keep=("q_len", "mask_len"), empty_row=EmptyRow.ZERO)),
    "keep-short-rank-1": _spec(mask=MaskSpec(keep=("mask_len",), empty_row=EmptyRow.ZERO)),
    "keep-short-rank-3": _spec(
        mask=MaskSpec(keep=(4, "q_len", "mask_len"), empty_row=EmptyRow.ZERO)
    ),
    "keep-short-rank-4": _spec(
        mask=MaskSpec(keep=("batch", 1, "q_len", "mask_len"), empty_row=EmptyRow.NAN)
    ),
    "bias-short-rank-1": _spec(mask=MaskSpec(bias=("mask_len",), empty_row=EmptyRow.ZERO)),
    "bias-short-rank-4": _spec(
        mask=MaskSpec(bias=(1, 4, "q_len", "mask_len"), empty_row=EmptyRow.ZERO)
    ),
    "keep-rank-1": _spec(mask=MaskSpec(keep=("kv_len",), empty_row=EmptyRow.ZERO)),
    "keep-heads": _gqa(mask=MaskSpec(keep=(4, "q_len", "kv_len"), empty_row=EmptyRow.UNIFORM)),
}
SINKS = {
    "sinks": _spec(sinks=True),
    "sinks-square": _gqa(sinks=True, **SQUARE),
    "sinks-softcap": _gqa(sinks=True, softcap=3.0, **SQUARE),
    "sinks-causal": _gqa(sinks=True, mask=MaskSpec(causal=TOP_LEFT), **SQUARE),
    "sinks-cache": _gqa(sinks=True, **_cached(left_window=4)),
    "sinks-padding": _gqa(
        sinks=True, mask=MaskSpec(padding=True, empty_row=EmptyRow.ZERO), **SQUARE
    ),
    "sinks-padding-min": _gqa(
        sinks=True, mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.ZERO), **SQUARE
    ),
    "sinks-padding-nan": _gqa(
        sinks=True, mask=MaskSpec(padding=True, empty_row=EmptyRow.NAN), **SQUARE
    ),
}
ROTARY = {
    "rotary": _gqa(mask=MaskSpec(causal=TOP_LEFT), rotary=_rotary(), **SQUARE),
    "rotary-tables": _gqa(mask=MaskSpec(causal=TOP_LEFT), rotary=RotarySpec(dim=16), **SQUARE),
    "rotary-tables-input": _gqa(rotary=RotarySpec(dim=16, positions="input"), **SQUARE),
    "rotary-interleaved": _gqa(
        rotary=_rotary(style=RotaryStyle.INTERLEAVED), mask=MaskSpec(causal=TOP_LEFT), **SQUARE
    ),
    "rotary-interleaved-partial": _spec(
        rotary=_rotary(style=RotaryStyle.INTERLEAVED, dim=8), **SQUARE
    ),
    "rotary-partial": _gqa(rotary=_rotary(dim=8), **_cached()),
    "rotary-cache": _gqa(rotary=_rotary(), **_cached()),
    "rotary-input": _gqa(rotary=_rotary(positions="input"), **_cached()),
    "rotary-static": _gqa(rotary=_rotary(), **_cached(CacheSpec(growth="static"))),
    "rotary-query-alone": _gqa(rotary=_rotary(key=False), **SQUARE),
    "rotary-cross": _spec(cross=True, rotary=_rotary(), kv_len="t"),
    "rotary-tables-cross": _spec(cross=True, rotary=RotarySpec(dim=16), kv_len="t"),
    "rotary-linear": _spec(rotary=_scaled("linear", 4.0), **SQUARE),
    "rotary-ntk": _spec(rotary=_scaled("ntk", 4.0), **SQUARE),
    "rotary-yarn": _spec(rotary=_scaled("yarn", 4.0), **SQUARE),
    "rotary-llama3": _spec(rotary=_scaled("llama3", 8.0), **SQUARE),
}
NORMS = {
    "rms": _gqa(qk_norm=QkNormSpec(kind="rms"), **SQUARE),
    "rms-hidden": _gqa(qk_norm=QkNormSpec(kind="rms", over="hidden"), **SQUARE),
    "rms-without-weight": _gqa(qk_norm=QkNormSpec(kind="rms", weight=False), **SQUARE),
    "rms-bias": _gqa(qk_norm=QkNormSpec(kind="rms", bias=True), **SQUARE),
    "rms-query-alone": _gqa(qk_norm=QkNormSpec(kind="rms", key=False), **SQUARE),
    "layer": _gqa(qk_norm=QkNormSpec(kind="layer", bias=True), **SQUARE),
    "l2": _gqa(qk_norm=QkNormSpec(kind="l2", weight=False), **SQUARE),
    "rms-rotary-cache": _gqa(qk_norm=QkNormSpec(kind="rms"), rotary=_rotary(), **_cached()),
}
POLICIES = tuple(policy for policy in EmptyRow if policy is not EmptyRow.NOT_APPLICABLE)
FILLS: dict[str, Any] = {"inf": "-inf", "min": "min", "finite": -10000.0}
EMPTY_ROWS = {
    f"{part}-{name}-{policy.value}": _gqa(
        mask=MaskSpec(
            **({"keep": ("b", 1, "s", "s")} if part == "keep" else {"padding": True}),
            fill=fill,
            empty_row=policy,
        ),
        batch="b",
        **SQUARE,
    )
    for part in ("keep", "padding")
    for name, fill in FILLS.items()
    for policy in POLICIES
} | {
    f"padding-causal-{name}-{policy.value}": _gqa(
        mask=MaskSpec(padding=True, causal=TOP_LEFT, fill=fill, empty_row=policy), **SQUARE
    )
    for name, fill in FILLS.items()
    for policy in POLICIES
}
SCORES = (
    {
        f"scores-{kind.value}": _spec(qk_output=kind, softcap=3.0, mask=MaskSpec(causal=TOP_LEFT))
        for kind in QkOutput
    }
    | {
        f"scores-{kind.value}-keep": _gqa(
            qk_output=kind, mask=MaskSpec(keep=KEEP, empty_row=EmptyRow.ZERO)
        )
        for kind in QkOutput
    }
    | {
        f"scores-{kind.value}-min": _gqa(
            qk_output=kind, mask=MaskSpec(keep=KEEP, fill="min", empty_row=EmptyRow.UNIFORM)
        )
        for kind in QkOutput
    }
)

FEATURES: dict[str, AttentionSpec] = {
    **HEADS,
    **SCALES,
    **POSITIONS,
    **CACHES,
    **LENGTHS,
    **BIASES,
    **SINKS,
    **ROTARY,
    **NORMS,
    **EMPTY_ROWS,
    **SCORES,
}
"""By a readable name: the rows of the conformance matrix."""
