"""Random valid specs: ``from strategies import attention_specs``.

``tests/properties`` is on the ``pythonpath`` of pytest. Narrow a strategy with ``.filter`` or with
the keyword arguments; everything drawn is small enough to evaluate in milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st

from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    QkOutput,
    RotaryScaling,
    RotarySpec,
    RotaryStyle,
)

FEATURES = (
    "alibi",
    "bias",
    "block",
    "cache",
    "causal",
    "cross",
    "documents",
    "fill",
    "keep",
    "key_prefix",
    "lengths",
    "mean",
    "padding",
    "prefix",
    "projections",
    "qk_norm",
    "qk_output",
    "rotary",
    "scale",
    "sinks",
    "softcap",
    "v_head_dim",
    "windows",
)
"""What a drawn spec may use; pass some of them as ``without`` to leave them out."""


@st.composite
def attention_specs(
    draw: st.DrawFn,
    *,
    without: Collection[str] = (),
    dtypes: Collection[DType] = (DType.FP32,),
) -> AttentionSpec:
    """A spec that keeps every rule of :mod:`mha_export.spec` and that ``cases`` can draw data for.

    Args:
        draw: given by hypothesis.
        without: features (of :data:`FEATURES`) that no drawn spec has.
        dtypes: io dtypes to draw from.
    """
    unknown = set(without) - set(FEATURES)
    if unknown:
        raise ValueError(f"unknown features {sorted(unknown)}; expected some of {FEATURES}")

    def chance(feature: str, *, of: int = 4) -> bool:
        return feature not in without and draw(st.integers(0, of - 1)) == 0

    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3]))
    q_heads = kv_heads * group
    head_dim = draw(st.sampled_from([2, 4, 8, 16]))
    cross = chance("cross")
    cache = None
    if not cross and chance("cache", of=2):
        growth = draw(st.sampled_from(["concat", "concat", "static", "shared_buffer"]))
        cache = CacheSpec(growth=growth, layout=draw(st.sampled_from(["bhsd", "bshd"])))
    square = cache is None and not cross and draw(st.booleans())
    q_len, kv_len = ("sequence", "sequence") if square else ("q_len", "kv_len")
    key_prefix = chance("key_prefix", of=8)
    v_head_dim = draw(st.sampled_from([2, 4, 8])) if chance("v_head_dim") else None
    if key_prefix:
        v_head_dim = min(v_head_dim or head_dim, head_dim)
    sinks = chance("sinks")
    mask = draw(_masks(q_heads, cache, cross, square, sinks, (q_len, kv_len), set(without)))
    mean = chance("mean", of=8)
    spec: dict[str, Any] = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "value_source": "key_prefix" if key_prefix else "own",
        "scale": draw(st.sampled_from([1.0, 0.125, 0.3])) if chance("scale") else None,
        "softcap": draw(st.sampled_from([1.5, 5.0, 50.0])) if chance("softcap") else None,
        "sinks": sinks,
        "mask": mask,
        "rotary": draw(_rotaries(head_dim, square=square or cache is not None))
        if chance("rotary", of=3)
        else None,
        "qk_norm": draw(_norms()) if chance("qk_norm") else None,
        "cache": cache,
        "cross": cross,
        "combine": "mean" if mean else "concat",
        "qk_output": draw(st.sampled_from(list(QkOutput))) if chance("qk_output") else None,
        "io_dtype": draw(st.sampled_from(sorted(dtypes))),
        "q_len": q_len,
        "kv_len": kv_len,
    }
    if chance("projections"):
        spec["projections"] = draw(_projections(cross=cross, output=not mean, prefix=key_prefix))
    return AttentionSpec(**spec)


@st.composite
def _masks(
    draw: st.DrawFn,
    q_heads: int,
    cache: CacheSpec | None,
    cross: bool,
    square: bool,
    sinks: bool,
    lengths_of: tuple[str, str],
    without: set[str],
) -> MaskSpec:
    def chance(feature: str, *, of: int = 4) -> bool:
        return feature not in without and draw(st.integers(0, of - 1)) == 0

    q_len, kv_len = lengths_of
    causal = draw(st.sampled_from(list(CausalAlignment))) if chance("causal", of=2) else None
    if cache is not None and causal is not None:
        # Top-left with a past hides all new keys from most queries: legal, but seen nowhere.
        causal = CausalAlignment.BOTTOM_RIGHT
    windows = {}
    if chance("windows"):
        windows = {
            name: draw(st.integers(0, 3))
            for name in draw(
                st.sampled_from(
                    [["left_window"], ["right_window"], ["left_window", "right_window"]]
                )
            )
        }
    shapes = st.sampled_from(
        [
            (kv_len,),
            ("mask_len",),
            (q_len, kv_len),
            (q_heads, q_len, kv_len),
            (1, q_len, kv_len),
            ("batch", 1, q_len, kv_len),
            ("batch", 1, 1, kv_len),
            (1, q_heads, q_len, "mask_len"),
        ]
    )
    keep = draw(shapes) if chance("keep") else None
    padding, lengths = chance("padding"), chance("lengths")
    documents = (square or cache is not None) and not lengths and chance("documents", of=8)
    may_empty = keep is not None or padding or lengths
    fill: Any = "-inf"
    if chance("fill"):
        fill = draw(st.sampled_from(["min", -10_000.0, -1e9]))
    empty_row = EmptyRow.NOT_APPLICABLE
    if may_empty:
        empty_row = draw(
            st.sampled_from(
                [EmptyRow.ZERO]
                if sinks or fill == "-inf"
                else [EmptyRow.ZERO, EmptyRow.UNIFORM]
                if fill != -10_000.0
                else [EmptyRow.ZERO, EmptyRow.FINITE]
            )
        )
        if fill == "-inf" and not sinks and draw(st.booleans()):
            empty_row = EmptyRow.NAN
    slopes = None
    if chance("alibi", of=8):
        slopes = tuple(2.0 ** -(1 + i) for i in range(q_heads))
    return MaskSpec(
        causal=causal,
        keep=keep,
        bias=draw(shapes) if chance("bias") else None,
        padding=padding,
        lengths=lengths,
        prefix=causal is not None and chance("prefix"),
        block=draw(st.integers(2, 4)) if chance("block", of=8) else None,
        documents=documents,
        alibi_slopes=slopes,
        fill=fill,
        empty_row=empty_row,
        **windows,
    )


@st.composite
def _rotaries(draw: st.DrawFn, head_dim: int, *, square: bool) -> RotarySpec:
    dim = draw(st.sampled_from([r for r in (2, 4, 8, 16) if r <= head_dim]))
    tables = square and draw(st.booleans())
    scaling = None
    if not tables and draw(st.booleans()):
        kinds = ["linear", "yarn", "llama3"] + (["ntk"] if dim > 2 else [])
        kind = draw(st.sampled_from(kinds))
        scaling = RotaryScaling(
            kind=kind,
            factor=draw(st.sampled_from([2.0, 8.0])),
            original_max_positions=64 if kind in ("yarn", "llama3") else None,
            truncate=draw(st.booleans()) if kind == "yarn" else True,
        )
    return RotarySpec(
        style=draw(st.sampled_from(list(RotaryStyle))),
        dim=dim,
        theta=None if tables else draw(st.sampled_from([100.0, 10_000.0])),
        scaling=scaling,
        positions=draw(st.sampled_from(["sequence", "input"])) if square else "sequence",
    )


@st.composite
def _norms(draw: st.DrawFn) -> QkNormSpec:
    kind = draw(st.sampled_from(["rms", "layer", "l2"]))
    return QkNormSpec(
        kind=kind,
        epsilon=draw(st.sampled_from([1e-6, 1e-5])),
        over=draw(st.sampled_from(["head", "hidden"])),
        weight=draw(st.booleans()),
        bias=kind == "layer" and draw(st.booleans()),
    )


@st.composite
def _projections(draw: st.DrawFn, *, cross: bool, output: bool, prefix: bool) -> ProjectionSpec:
    packing = "separate"
    if not cross and not prefix:
        packing = draw(st.sampled_from(["separate", "packed", "interleaved"]))
    output = output and draw(st.booleans())
    return ProjectionSpec(
        d_model=draw(st.sampled_from([8, 12])),
        kv_d_model=10 if cross and draw(st.booleans()) else None,
        packing=packing,
        q_bias=draw(st.booleans()),
        k_bias=draw(st.booleans()),
        v_bias=draw(st.booleans()),
        output=output,
        output_bias=output and draw(st.booleans()),
    )
