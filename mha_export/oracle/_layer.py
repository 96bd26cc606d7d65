"""An attention with the linear layers around it, in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from mha_export.errors import InputError
from mha_export.oracle._attention import OracleResult, attention, normalised
from mha_export.oracle._inputs import Array, Floats, OracleInputs, SideInputs
from mha_export.spec import AttentionSpec, LatentSpec, ProjectionSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of a :class:`~mha_export.spec.ProjectionSpec`, applied as ``x W + b``.

    ``w_q`` [m, h*d], ``w_k`` [m', k*d], ``w_v`` [m', k*e]; or one ``w_qkv`` [m, h*d + k*d + k*e]
    for packed and interleaved weights, with one ``b_qkv`` whose columns go likewise (zeros where
    the spec states no bias of that part). ``w_o`` [h*e, m]. m' is the width of the memory.
    """

    w_q: Array | None = None
    w_k: Array | None = None
    w_v: Array | None = None
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    w_qkv: Array | None = None
    b_qkv: Array | None = None
    w_o: Array | None = None
    b_o: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentWeights:
    """Weights of latent attention (DeepSeek-V2, section 2.1), applied as ``x W``.

    ``w_kv_a`` [m, kv_rank + rope], ``kv_norm`` [kv_rank] (RMS) or None, ``w_kv_b``
    [kv_rank, h * (nope + v)] with each head's columns [nope | v]. Queries: ``w_q``
    [m, h * (nope + rope)], or through their own latent ``w_q_a`` [m, q_rank], ``q_norm``,
    ``w_q_b`` [q_rank, h * (nope + rope)]. ``w_o`` [h * v, m]. These are the weights of the
    materialised layer; the absorbed one is computed from the same.
    """

    w_kv_a: Array
    w_kv_b: Array
    w_o: Array | None = None
    kv_norm: Array | None = None
    w_q: Array | None = None
    w_q_a: Array | None = None
    q_norm: Array | None = None
    w_q_b: Array | None = None
    epsilon: float = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamWeights:
    """One stream of a joint attention: its linear layers and its qk-norm."""

    linear: LayerWeights
    q_norm_weight: Array | None = None
    k_norm_weight: Array | None = None
    q_norm_bias: Array | None = None
    k_norm_bias: Array | None = None


def layer(
    spec: AttentionSpec,
    weights: LayerWeights,
    x: Array,
    *,
    memory: Array | None = None,
    side: SideInputs | None = None,
) -> tuple[Floats, OracleResult]:
    """Project, attend, merge heads, project: [b, s, m] to ([b, s, m], the attention's result).

    Without ``projections.output`` the first is the merged heads [b, s, h*e] (or their mean).

    Args:
        spec: the attention and its projections.
        weights: as the spec states them.
        x: [b, s, m].
        memory: [b, t, m'], what keys and values are made from; None: ``x``.
        side: masks, cache and the other operands of the attention.

    Errors:
        InputError: the spec states no projections, a weight is missing or has the wrong shape.
    """
    projections = spec.projections
    if projections is None:
        raise InputError("the spec states no projections", fix="evaluate attention() instead")
    x = x.astype(np.float64)
    memory = x if memory is None else memory.astype(np.float64)
    if projections.packing == "separate":
        query, key, value = _separate(spec, projections, weights, x, memory)
    else:
        query, key, value = _packed(spec, projections, weights, x)
    result = attention(spec, _with(side, query, key, value))
    merged = result.output if spec.combine == "mean" else _merge(result.output)
    if not projections.output:
        return merged, result
    out_bias = projections.output_bias
    width = (spec.q_heads * spec.value_dim, projections.d_model)
    return _affine(merged, weights.w_o, weights.b_o, out_bias, "o", width), result


def _separate(
    spec: AttentionSpec, projections: ProjectionSpec, w: LayerWeights, x: Floats, memory: Floats
) -> tuple[Floats, Floats, Floats | None]:
    m, width = x.shape[-1], memory.shape[-1]
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    query = _affine(x, w.w_q, w.b_q, projections.q_bias, "q", (m, h * d))
    key = _affine(memory, w.w_k, w.b_k, projections.k_bias, "k", (width, k * d))
    value = None
    if spec.value_source == "own":
        value = _affine(memory, w.w_v, w.b_v, projections.v_bias, "v", (width, k * e))
    return _split(query, h), _split(key, k), None if value is None else _split(value, k)


def _packed(
    spec: AttentionSpec, projections: ProjectionSpec, w: LayerWeights, x: Floats
) -> tuple[Floats, Floats, Floats]:
    h, k, d, e = spec.q_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    biased = projections.q_bias or projections.k_bias or projections.v_bias
    columns = h * d + k * d + k * e
    packed = _affine(x, w.w_qkv, w.b_qkv, biased, "qkv", (x.shape[-1], columns))
    b, s, _ = packed.shape
    if projections.packing == "packed":
        query, key, value = np.split(packed, [h * d, h * d + k * d], axis=-1)
        return _split(query, h), _split(key, k), _split(value, k)
    grouped = packed.reshape(b, s, k, spec.group * d + d + e)
    query, key, value = np.split(grouped, [spec.group * d, spec.group * d + d], axis=-1)
    return _split(query.reshape(b, s, h * d), h), key.swapaxes(1, 2), value.swapaxes(1, 2)


def latent_layer(
    spec: AttentionSpec, weights: LatentWeights, x: Array, *, side: SideInputs | None = None
) -> tuple[Floats, OracleResult]:
    """Multi-head latent attention: [b, s, m] to ([b, s, m] or merged heads, the inner result).

    ``c = rms(x W_kv_a[:rank])``, ``k_rope = x W_kv_a[rank:]`` shared by all heads, and per head
    ``[k_nope | v] = c W_kv_b``. Absorbed: ``q_nope W_k^T`` queries ``[c | k_rope]`` itself, and
    ``W_v`` is applied to the weighted latent.

    Errors:
        InputError: the spec states no latent, or the weights do not fit it.
    """
    latent = spec.latent
    if latent is None:
        raise InputError("the spec states no latent attention", fix="evaluate layer() instead")
    x = x.astype(np.float64)
    b = x.shape[0]
    h, nope, rank = spec.q_heads, latent.nope_dim, latent.kv_rank
    query = _split(_latent_query(latent, weights, x), h)
    both = x @ weights.w_kv_a.astype(np.float64)
    c = _rms(both[..., :rank], weights.kv_norm, weights.epsilon)
    k_rope = both[:, None, :, rank:]
    expand = weights.w_kv_b.astype(np.float64).reshape(rank, h, -1)
    w_key, w_value = expand[..., :nope], expand[..., nope:]
    if latent.absorbed:
        q_latent = np.einsum("bhsn,rhn->bhsr", query[..., :nope], w_key)
        query = np.concatenate([q_latent, query[..., nope:]], axis=-1)
        key = np.concatenate([c[:, None], k_rope], axis=-1)
        result = attention(spec, _with(side, query, key, None))
        heads = np.einsum("bhsr,rhv->bhsv", result.output, w_value)
    else:
        k_nope = np.einsum("bsr,rhn->bhsn", c, w_key)
        key = np.concatenate([k_nope, np.broadcast_to(k_rope, (b, h, *k_rope.shape[2:]))], axis=-1)
        result = attention(spec, _with(side, query, key, np.einsum("bsr,rhv->bhsv", c, w_value)))
        heads = result.output
    merged = _merge(heads)
    return (merged if weights.w_o is None else merged @ weights.w_o.astype(np.float64)), result


def joint_layer(
    spec: AttentionSpec,
    weights: tuple[StreamWeights, StreamWeights],
    streams: tuple[Array, Array],
    *,
    side: SideInputs | None = None,
) -> tuple[list[Floats], OracleResult]:
    """Two streams [b, s_1, m] and [b, s_2, m'] in one attention; what each of them becomes.

    The second is missing where the spec drops it (``projections.joint.output``).

    Errors:
        InputError: the spec states no second stream, or the weights do not fit it.
    """
    projections = spec.projections
    if projections is None or projections.joint is None:
        raise InputError("the spec states no second stream", fix="evaluate layer() instead")
    joint = projections.joint
    made = []
    for own, given in zip(weights, streams, strict=True):
        x = given.astype(np.float64)
        query, key, value = _separate(spec, projections, own.linear, x, x)
        query = normalised(joint.qk_norm, query, own.q_norm_weight, own.q_norm_bias)
        if joint.qk_norm is not None and joint.qk_norm.key:
            key = normalised(joint.qk_norm, key, own.k_norm_weight, own.k_norm_bias)
        made.append((query, key, value))
    query, key = (np.concatenate([made[0][i], made[1][i]], axis=2) for i in (0, 1))
    value = np.concatenate([part for _, _, part in made if part is not None], axis=2)
    result = attention(spec, _with(side, query, key, value))
    merged = _merge(result.output)
    cut = streams[0].shape[1]
    parts = [merged[:, :cut], merged[:, cut:]] if joint.output else [merged[:, :cut]]
    if not projections.output:
        return parts, result
    width = spec.q_heads * spec.value_dim
    return [
        _affine(
            part,
            own.linear.w_o,
            own.linear.b_o,
            projections.output_bias,
            "o",
            (width, given.shape[-1]),
        )
        for part, own, given in zip(parts, weights, streams, strict=False)
    ], result


def _latent_query(latent: LatentSpec, weights: LatentWeights, x: Floats) -> Floats:
    direct = latent.q_rank is None
    needed = ("w_q",) if direct else ("w_q_a", "w_q_b")
    for name in needed:
        if getattr(weights, name) is None:
            raise InputError(f"latent weight {name} is missing (latent.q_rank is {latent.q_rank})")
    if direct:
        assert weights.w_q is not None
        return x @ weights.w_q.astype(np.float64)
    assert weights.w_q_a is not None
    assert weights.w_q_b is not None
    inner = _rms(x @ weights.w_q_a.astype(np.float64), weights.q_norm, weights.epsilon)
    return inner @ weights.w_q_b.astype(np.float64)


def _rms(x: Floats, weight: Array | None, epsilon: float) -> Floats:
    if weight is None:
        return x
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    scaled: Floats = x / np.sqrt(mean_square + epsilon) * weight.astype(np.float64)
    return scaled


def _with(
    side: SideInputs | None, query: Floats, key: Floats, value: Floats | None
) -> OracleInputs:
    others = {} if side is None else {f.name: getattr(side, f.name) for f in fields(SideInputs)}
    return OracleInputs(query=query, key=key, value=value, **others)


def _affine(
    x: Floats,
    weight: Array | None,
    bias: Array | None,
    biased: bool,
    name: str,
    shape: tuple[int, int],
) -> Floats:
    if weight is None or weight.shape != shape:
        found = "none" if weight is None else list(weight.shape)
        raise InputError(f"weight w_{name}: expected shape {list(shape)}, got {found}")
    if (bias is not None) is not biased:
        raise InputError(
            f"bias b_{name} is " + ("not stated by the spec" if bias is not None else "missing")
        )
    y = x @ weight.astype(np.float64)
    if bias is not None:
        if bias.shape != shape[1:]:
            raise InputError(f"bias b_{name}: expected [{shape[1]}], got {list(bias.shape)}")
        y = y + bias.astype(np.float64)
    return y


def _split(x: Floats, heads: int) -> Floats:
    b, s, width = x.shape
    return x.reshape(b, s, heads, width // heads).swapaxes(1, 2)


def _merge(x_bhse: Floats) -> Floats:
    b, h, s, e = x_bhse.shape
    return x_bhse.swapaxes(1, 2).reshape(b, s, h * e)
