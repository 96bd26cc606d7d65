"""The weights of a canonical graph: their names and shapes, and where their numbers come from.

Applied as ``x W + b``. Latent attention names its weights as DeepSeek-V2, section 2.1, does:
``w_kv_a`` [m, kv_rank + rope], ``w_kv_b`` [kv_rank, h * (nope + v)] with each head's columns
[nope | v], and ``w_q`` or ``w_q_a``, ``w_q_b`` for the queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mha_export.errors import InputError
from mha_export.forms._layout import numpy_dtype
from mha_export.spec import AttentionSpec, LatentSpec, ProjectionSpec, QkNormSpec

SECOND_STREAM = "encoder_"
"""Before the name of a weight of a joint attention's second stream."""


def weight_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of the spec by name, in the order of use; none without projections.

    Sinks and qk-norm weights belong to a layer as much as its matrices do.
    """
    if spec.projections is None:
        return {}
    joint = spec.projections.joint
    if joint is not None:
        first = _stream_shapes(spec, spec.projections, joint.qk_norm)
        width = spec.projections.d_model if joint.d_model is None else joint.d_model
        stated = replace(spec.projections, d_model=width)
        if not joint.output:
            stated = replace(stated, output=False)
        second = _stream_shapes(spec, stated, joint.qk_norm)
        shared = side_shapes(spec)
        return first | {SECOND_STREAM + name: shape for name, shape in second.items()} | shared
    inner = (
        _linear_shapes(spec, spec.projections)
        if spec.latent is None
        else _latent_shapes(spec, spec.latent, spec.projections)
    )
    return inner | side_shapes(spec) | _output_shapes(spec, spec.projections)


def _stream_shapes(
    spec: AttentionSpec, projections: ProjectionSpec, norm: QkNormSpec | None
) -> dict[str, tuple[int, ...]]:
    """One of two streams: linear layers, qk-norm and output projection."""
    inner = _linear_shapes(spec, projections) | _norm_shapes(spec, norm)
    return inner | _output_shapes(spec, projections)


def _output_shapes(spec: AttentionSpec, projections: ProjectionSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if projections.output:
        shapes["w_o"] = (merged_width(spec), projections.d_model)
        if projections.output_bias:
            shapes["b_o"] = (projections.d_model,)
    return shapes


def side_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Sinks and qk-norm weights: weights of a layer, inputs of a bare attention."""
    shapes = _norm_shapes(spec, spec.qk_norm)
    if spec.sinks:
        shapes["sinks"] = (spec.q_heads,)
    return shapes


def _norm_shapes(spec: AttentionSpec, norm: QkNormSpec | None) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if norm is not None:
        whole = norm.over == "hidden"
        widths = {"q": spec.head_dim * (spec.q_heads if whole else 1)}
        if norm.key:
            widths["k"] = spec.head_dim * (spec.kv_heads if whole else 1)
        for part, stated in (("weight", norm.weight), ("bias", norm.bias)):
            if stated:
                shapes |= {f"{name}_norm_{part}": (width,) for name, width in widths.items()}
    return shapes


def merged_width(spec: AttentionSpec) -> int:
    """Width of the merged heads: what ``W_O`` reads."""
    if spec.latent is not None and spec.latent.absorbed:
        return spec.q_heads * expanded_value_dim(spec, spec.latent)
    return spec.value_dim * (1 if spec.combine == "mean" else spec.q_heads)


def expanded_value_dim(spec: AttentionSpec, latent: LatentSpec) -> int:
    """Width of one value head after the latent is expanded."""
    if latent.v_dim is not None:
        return latent.v_dim
    return latent.nope_dim if latent.absorbed else spec.value_dim


def _linear_shapes(spec: AttentionSpec, projections: ProjectionSpec) -> dict[str, tuple[int, ...]]:
    m = projections.d_model
    m_kv = projections.kv_d_model or m
    widths = {
        "q": spec.q_heads * spec.head_dim,
        "k": spec.kv_heads * spec.head_dim,
        "v": spec.kv_heads * spec.value_dim,
    }
    biased = {"q": projections.q_bias, "k": projections.k_bias, "v": projections.v_bias}
    if projections.packing != "separate":
        total = sum(widths.values())
        packed: dict[str, tuple[int, ...]] = {"w_qkv": (m, total)}
        return packed | ({"b_qkv": (total,)} if any(biased.values()) else {})
    if spec.value_source == "key_prefix":
        del widths["v"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in widths.items():
        shapes[f"w_{name}"] = (m if name == "q" else m_kv, width)
        if biased[name]:
            shapes[f"b_{name}"] = (width,)
    return shapes


def _latent_shapes(
    spec: AttentionSpec, latent: LatentSpec, projections: ProjectionSpec
) -> dict[str, tuple[int, ...]]:
    m, h = projections.d_model, spec.q_heads
    query = h * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {}
    if latent.q_rank is None:
        shapes["w_q"] = (m, query)
    else:
        shapes["w_q_a"] = (m, latent.q_rank)
        shapes["q_norm"] = (latent.q_rank,)
        shapes["w_q_b"] = (latent.q_rank, query)
    shapes["w_kv_a"] = (m, latent.kv_rank + latent.rope_dim)
    shapes["kv_norm"] = (latent.kv_rank,)
    expanded = latent.nope_dim + expanded_value_dim(spec, latent)
    shapes["w_kv_b"] = (latent.kv_rank, h * expanded)
    return shapes


def random_weights(spec: AttentionSpec, seed: int) -> dict[str, np.ndarray]:
    """Seeded weights: matrices N(0, 1 / fan_in), norms near 1, biases and sinks small.

    Drawn in fp32 and rounded to the I/O dtype, so that fp32 and fp16 graphs hold the same numbers.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for name, shape in weight_shapes(spec).items():
        drawn = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            drawn *= np.float32(1.0 / math.sqrt(shape[0]))
        elif "norm" in name and not name.endswith("bias"):
            drawn = 1.0 + np.float32(0.1) * drawn
        else:
            drawn *= np.float32(0.1)
        weights[name] = drawn.astype(numpy_dtype(spec.io_dtype))
    if "b_qkv" in weights:
        weights["b_qkv"] *= _stated_bias(spec).astype(weights["b_qkv"].dtype)
    return weights


def _stated_bias(spec: AttentionSpec) -> np.ndarray:
    """1 in the columns of a packed bias whose part the spec states, 0 in the others."""
    assert spec.projections is not None
    stated = [spec.projections.q_bias, spec.projections.k_bias, spec.projections.v_bias]
    widths = [spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    widths.append(spec.kv_heads * spec.value_dim)
    if spec.projections.packing == "packed":
        return np.repeat(np.array(stated, np.float32), widths)
    group = np.repeat(np.array(stated, np.float32), [width // spec.kv_heads for width in widths])
    return np.tile(group, spec.kv_heads)


def check_weights(spec: AttentionSpec, weights: Mapping[str, np.ndarray]) -> None:
    """Refuse weights whose names or shapes are not the spec's.

    Errors:
        InputError: one is missing, unknown or of the wrong shape; the message names it.
    """
    shapes = weight_shapes(spec)
    for name in sorted(set(shapes) ^ set(weights)):
        what = "is missing" if name in shapes else "is not one the spec states"
        raise InputError(f"weight {name} {what}", fix=f"give exactly: {', '.join(shapes)}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            found = list(weights[name].shape)
            raise InputError(f"weight {name} has shape {found}; expected {list(shape)}")
