"""Layers of the oracle: packed, latent and joint projections."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from oracle_specs import BOTTOM_RIGHT, make_spec

from mha_export.errors import InputError
from mha_export.oracle import (
    LatentWeights,
    LayerWeights,
    SideInputs,
    StreamWeights,
    joint_layer,
    latent_layer,
    layer,
)
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    JointSpec,
    LatentSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    QkOutput,
    RotarySpec,
    RotaryStyle,
)

RNG = np.random.default_rng(7)


def test_packed_and_interleaved_weights_are_the_separate_ones_reordered() -> None:
    h, k, d, e, m = 4, 2, 3, 5, 7
    w_q, w_k, w_v = (RNG.normal(size=(m, n)) for n in (h * d, k * d, k * e))
    b_q, b_k, b_v = (RNG.normal(size=n) for n in (h * d, k * d, k * e))
    w_o, b_o = RNG.normal(size=(h * e, m)), RNG.normal(size=m)
    x = RNG.normal(size=(2, 4, m))

    def spec_of(packing: str) -> AttentionSpec:
        return AttentionSpec(
            q_heads=h,
            kv_heads=k,
            head_dim=d,
            v_head_dim=e,
            projections=ProjectionSpec(
                d_model=m,
                packing=packing,  # type: ignore[arg-type]
                q_bias=True,
                k_bias=True,
                v_bias=True,
                output_bias=True,
            ),
        )

    def by_group(q: np.ndarray, key: np.ndarray, v: np.ndarray) -> np.ndarray:
        parts = []
        for group in range(k):
            parts += [q[..., group * 2 * d : (group + 1) * 2 * d]]
            parts += [key[..., group * d : (group + 1) * d], v[..., group * e : (group + 1) * e]]
        return np.concatenate(parts, axis=-1)

    out = {"w_o": w_o, "b_o": b_o}
    separate = LayerWeights(w_q=w_q, w_k=w_k, w_v=w_v, b_q=b_q, b_k=b_k, b_v=b_v, **out)
    packed = LayerWeights(
        w_qkv=np.concatenate([w_q, w_k, w_v], -1), b_qkv=np.concatenate([b_q, b_k, b_v]), **out
    )
    mixed = LayerWeights(w_qkv=by_group(w_q, w_k, w_v), b_qkv=by_group(b_q, b_k, b_v), **out)
    expected, result = layer(spec_of("separate"), separate, x)
    assert expected.shape == (2, 4, m)
    merged = result.output.transpose(0, 2, 1, 3).reshape(2, 4, h * e)
    np.testing.assert_allclose(expected, merged @ w_o + b_o)
    np.testing.assert_allclose(layer(spec_of("packed"), packed, x)[0], expected, atol=1e-12)
    np.testing.assert_allclose(layer(spec_of("interleaved"), mixed, x)[0], expected, atol=1e-12)


def test_cross_attention_reads_its_memory() -> None:
    spec = make_spec(cross=True, projections=ProjectionSpec(d_model=8, kv_d_model=5, output=False))
    weights = LayerWeights(
        w_q=RNG.normal(size=(8, 24)), w_k=RNG.normal(size=(5, 12)), w_v=RNG.normal(size=(5, 12))
    )
    out, result = layer(
        spec, weights, RNG.normal(size=(1, 3, 8)), memory=RNG.normal(size=(1, 4, 5))
    )
    assert out.shape == (1, 3, 24)
    assert result.scores(QkOutput.RAW).shape == (1, 4, 3, 4)


def test_layers_of_averaged_heads_and_of_key_prefixes() -> None:
    weights = LayerWeights(
        w_q=RNG.normal(size=(8, 24)), w_k=RNG.normal(size=(8, 12)), w_v=RNG.normal(size=(8, 12))
    )
    projections = ProjectionSpec(d_model=8, output=False)
    x = RNG.normal(size=(1, 3, 8))
    mean = make_spec(combine="mean", projections=projections)
    assert layer(mean, weights, x)[0].shape == (1, 3, 6)
    prefix = make_spec(value_source="key_prefix", projections=projections)
    assert layer(prefix, dataclasses.replace(weights, w_v=None), x)[0].shape == (1, 3, 24)


LATENT = AttentionSpec(
    q_heads=3,
    kv_heads=3,
    head_dim=10,
    v_head_dim=5,
    scale=0.4,
    mask=MaskSpec(causal=BOTTOM_RIGHT),
    rotary=RotarySpec(style=RotaryStyle.INTERLEAVED, dim=4, theta=30.0),
    latent=LatentSpec(kv_rank=8, nope_dim=6, rope_dim=4),
)
ABSORBED = LATENT.replace(
    kv_heads=1,
    head_dim=12,
    v_head_dim=8,
    value_source="key_prefix",
    latent=LatentSpec(kv_rank=8, nope_dim=6, rope_dim=4, absorbed=True, v_dim=5),
)


@pytest.mark.parametrize("q_rank", [None, 7])
def test_latent_attention_is_the_same_materialised_and_absorbed(q_rank: int | None) -> None:
    weights = LatentWeights(
        w_kv_a=RNG.normal(size=(9, 12)),
        w_kv_b=RNG.normal(size=(8, 3 * 11)),
        w_o=RNG.normal(size=(15, 9)),
        kv_norm=RNG.normal(size=8),
        w_q=RNG.normal(size=(9, 30)) if q_rank is None else None,
        w_q_a=None if q_rank is None else RNG.normal(size=(9, 7)),
        q_norm=None if q_rank is None else RNG.normal(size=7),
        w_q_b=None if q_rank is None else RNG.normal(size=(7, 30)),
    )
    x = RNG.normal(size=(2, 5, 9))
    ranks = {"q_rank": q_rank}
    one, full = latent_layer(
        LATENT.replace(latent=dataclasses.replace(LATENT.latent, **ranks)), weights, x
    )
    two, lean = latent_layer(
        ABSORBED.replace(latent=dataclasses.replace(ABSORBED.latent, **ranks)), weights, x
    )
    np.testing.assert_allclose(one, two, atol=1e-11)
    np.testing.assert_allclose(full.probabilities, lean.probabilities, atol=1e-12)
    assert full.present_key.shape == (2, 3, 5, 10)
    assert lean.present_key.shape == (2, 1, 5, 12)
    bare, _ = latent_layer(
        LATENT.replace(latent=dataclasses.replace(LATENT.latent, **ranks)),
        dataclasses.replace(weights, w_o=None),
        x,
    )
    np.testing.assert_allclose(bare @ weights.w_o, one, atol=1e-11)


def test_latent_attention_decodes_from_the_latent_cache() -> None:
    weights = LatentWeights(
        w_kv_a=RNG.normal(size=(9, 12)),
        w_kv_b=RNG.normal(size=(8, 33)),
        w_q=RNG.normal(size=(9, 30)),
    )
    x = RNG.normal(size=(1, 4, 9))
    whole, _ = latent_layer(ABSORBED, weights, x)
    spec = ABSORBED.replace(cache=CacheSpec())
    past = np.zeros((1, 1, 0, 12))
    for at in range(4):
        step, result = latent_layer(
            spec, weights, x[:, at : at + 1], side=SideInputs(past_key=past)
        )
        past = result.present_key
        np.testing.assert_allclose(step, whole[:, at : at + 1], atol=1e-12)


def test_latent_attention_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    config = transformers.DeepseekV3Config(
        hidden_size=9,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=8,
        q_lora_rank=7,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=5,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        rope_interleave=True,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.no_grad():
        module = DeepseekV3Attention(config, 0).double()
        x = torch.randn(2, 5, 9, dtype=torch.float64)
        cos, sin = DeepseekV3RotaryEmbedding(config)(x, torch.arange(5)[None])
        causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        expected = module(x, (cos.double(), sin.double()), causal)[0].numpy()
        w = {name: p.numpy() for name, p in module.named_parameters()}
    weights = LatentWeights(
        w_kv_a=w["kv_a_proj_with_mqa.weight"].T,
        kv_norm=w["kv_a_layernorm.weight"],
        w_kv_b=w["kv_b_proj.weight"].T,
        w_q_a=w["q_a_proj.weight"].T,
        q_norm=w["q_a_layernorm.weight"],
        w_q_b=w["q_b_proj.weight"].T,
        w_o=w["o_proj.weight"].T,
    )
    latent = dataclasses.replace(LATENT.latent, q_rank=7)
    found, _ = latent_layer(LATENT.replace(latent=latent, scale=10**-0.5), weights, x.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_layers_that_do_not_fit_the_spec() -> None:
    x = np.zeros((1, 2, 8))
    spec = make_spec(projections=ProjectionSpec(d_model=8, output=False))
    good = LayerWeights(w_q=np.zeros((8, 24)), w_k=np.zeros((8, 12)), w_v=np.zeros((8, 12)))
    biased = make_spec(projections=ProjectionSpec(d_model=8, output=False, q_bias=True))
    for bad_spec, weights, words in (
        (make_spec(), good, "no projections"),
        (spec, dataclasses.replace(good, w_k=None), "w_k: expected shape"),
        (spec, dataclasses.replace(good, w_k=np.zeros((8, 11))), "w_k: expected shape"),
        (spec, dataclasses.replace(good, b_v=np.zeros(12)), "b_v is not stated"),
        (biased, good, "b_q is missing"),
        (biased, dataclasses.replace(good, b_q=np.zeros(3)), "b_q: expected"),
    ):
        with pytest.raises(InputError, match=words):
            layer(bad_spec, weights, x)
    with pytest.raises(InputError, match="no latent"):
        latent_layer(spec, LatentWeights(w_kv_a=x, w_kv_b=x), x)
    with pytest.raises(InputError, match="w_q is missing"):
        latent_layer(LATENT, LatentWeights(w_kv_a=x, w_kv_b=x), x)


JOINT = AttentionSpec(
    q_heads=2,
    kv_heads=2,
    head_dim=4,
    projections=ProjectionSpec(
        d_model=6,
        output_bias=True,
        joint=JointSpec(lengths=("a", "b"), d_model=5, qk_norm=QkNormSpec(kind="rms")),
    ),
    q_len="s",
    kv_len="s",
)


def _stream(width: int) -> StreamWeights:
    linear = LayerWeights(
        **{f"w_{name}": RNG.normal(size=(width, 8)) for name in "qkv"},
        w_o=RNG.normal(size=(8, width)),
        b_o=RNG.normal(size=width),
    )
    return StreamWeights(
        linear=linear, q_norm_weight=RNG.normal(size=4), k_norm_weight=RNG.normal(size=4)
    )


def test_two_streams_are_one_attention_over_both() -> None:
    """One head of one token at a time, from the definition."""
    streams = _stream(6), _stream(5)
    xs = RNG.normal(size=(1, 3, 6)), RNG.normal(size=(1, 2, 5))
    outputs, result = joint_layer(JOINT, streams, xs)
    assert result.output.shape == (1, 2, 5, 4)

    def vectors(name: str, head: int) -> list[np.ndarray]:
        found = []
        for own, x in zip(streams, xs, strict=True):
            weight = getattr(own.linear, f"w_{name}")[:, 4 * head : 4 * head + 4]
            for token in x[0]:
                y = token @ weight
                if name != "v":
                    y = y / np.sqrt(np.mean(y * y) + 1e-6) * getattr(own, f"{name}_norm_weight")
                found.append(y)
        return found

    merged = np.zeros((5, 8))
    for head in range(2):
        keys, values = np.array(vectors("k", head)), np.array(vectors("v", head))
        for at, query in enumerate(vectors("q", head)):
            weights = np.exp(keys @ query / 2)
            merged[at, 4 * head : 4 * head + 4] = weights @ values / weights.sum()
    for own, part, found in zip(streams, (merged[:3], merged[3:]), outputs, strict=True):
        np.testing.assert_allclose(found[0], part @ own.linear.w_o + own.linear.b_o, atol=1e-12)


def test_the_second_stream_may_end_in_the_attention() -> None:
    streams = _stream(6), _stream(5)
    xs = RNG.normal(size=(1, 3, 6)), RNG.normal(size=(1, 2, 5))
    both, _ = joint_layer(JOINT, streams, xs)
    joint = dataclasses.replace(JOINT.projections.joint, output=False)
    spec = JOINT.replace(projections=dataclasses.replace(JOINT.projections, joint=joint))
    (first,), _ = joint_layer(spec, streams, xs)
    np.testing.assert_array_equal(first, both[0])
    bare = JOINT.replace(projections=ProjectionSpec(d_model=6, output=False, joint=joint))
    (merged,), _ = joint_layer(bare, streams, xs)
    linear = streams[0].linear
    np.testing.assert_allclose(merged @ linear.w_o + linear.b_o, first, atol=1e-12)
    with pytest.raises(InputError, match="no second stream"):
        joint_layer(JOINT.replace(projections=None), streams, xs)


def test_a_direct_query_weight_is_not_read_where_queries_have_a_latent() -> None:
    latent = dataclasses.replace(LATENT.latent, q_rank=7)
    weights = LatentWeights(
        w_kv_a=RNG.normal(size=(9, 12)),
        w_kv_b=RNG.normal(size=(8, 33)),
        w_q_a=RNG.normal(size=(9, 7)),
        w_q_b=RNG.normal(size=(7, 30)),
    )
    x = RNG.normal(size=(1, 2, 9))
    both = dataclasses.replace(weights, w_q=RNG.normal(size=(9, 30)))
    spec = LATENT.replace(latent=latent)
    np.testing.assert_array_equal(latent_layer(spec, both, x)[0], latent_layer(spec, weights, x)[0])


def test_a_latent_is_divided_by_its_root_mean_square() -> None:
    from mha_export.oracle._layer import _rms

    x, weight = np.array([[[3.0, 4.0], [1.0, 0.0]]]), np.array([2.0, 10.0])
    expected = [[[6.0 / 12.75**0.5, 40.0 / 12.75**0.5], [2.0 / 0.75**0.5, 0.0]]]
    np.testing.assert_allclose(_rms(x, weight, 0.25), expected, rtol=1e-15)
