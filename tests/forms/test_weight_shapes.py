"""The weights of a canonical graph: names and shapes by hand, and how drawn numbers spread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.forms._weights import (
    check_weights,
    merged_width,
    random_weights,
    side_shapes,
    weight_shapes,
)
from mha_export.spec import (
    AttentionSpec,
    DType,
    JointSpec,
    LatentSpec,
    ProjectionSpec,
    QkNormSpec,
)

BIASED: dict[str, Any] = {"q_bias": True, "k_bias": True, "v_bias": True, "output_bias": True}


def _spec(**fields: Any) -> AttentionSpec:
    """Six query heads, two key/value heads of 5 channels, values of 3."""
    return AttentionSpec(**{"q_heads": 6, "kv_heads": 2, "head_dim": 5, "v_head_dim": 3} | fields)


def _layer(projections: dict[str, Any] | None = None, **fields: Any) -> AttentionSpec:
    return _spec(projections=ProjectionSpec(**{"d_model": 24} | (projections or {})), **fields)


def _latent(projections: dict[str, Any] | None = None, **latent: Any) -> AttentionSpec:
    stated = LatentSpec(**{"kv_rank": 7, "nope_dim": 4, "rope_dim": 2} | latent)
    sizes = {"kv_heads": 6, "head_dim": 6, "v_head_dim": 3}
    if stated.absorbed:
        sizes = {"kv_heads": 1, "head_dim": 9, "v_head_dim": 7, "value_source": "key_prefix"}
    return _layer(projections, latent=stated, **sizes)


PLAIN = {"w_q": (24, 30), "w_k": (24, 10), "w_v": (24, 6), "w_o": (18, 24)}
STREAM = {"w_q": (24, 30), "w_k": (24, 10), "w_v": (24, 6)}
SECOND = {"encoder_w_q": (20, 30), "encoder_w_k": (20, 10), "encoder_w_v": (20, 6)}
EXPANDED = {"w_kv_a": (24, 9), "kv_norm": (7,)}
SHAPES: dict[str, tuple[AttentionSpec, dict[str, tuple[int, ...]]]] = {
    "none": (_spec(sinks=True), {}),
    "separate": (_layer(), PLAIN),
    "biases": (
        _layer(BIASED),
        PLAIN | {"b_q": (30,), "b_k": (10,), "b_v": (6,), "b_o": (24,)},
    ),
    "some-biases": (_layer({"q_bias": True, "v_bias": True}), PLAIN | {"b_q": (30,), "b_v": (6,)}),
    "no-output": (_layer({"output": False, "output_bias": True}), STREAM),
    "packed": (_layer({"packing": "packed"}), {"w_qkv": (24, 46), "w_o": (18, 24)}),
    "packed-bias": (
        _layer({"packing": "packed", "k_bias": True}),
        {"w_qkv": (24, 46), "b_qkv": (46,), "w_o": (18, 24)},
    ),
    "interleaved": (_layer({"packing": "interleaved"}), {"w_qkv": (24, 46), "w_o": (18, 24)}),
    "cross": (
        _layer({"kv_d_model": 11}, cross=True),
        PLAIN | {"w_k": (11, 10), "w_v": (11, 6)},
    ),
    "key-prefix": (
        _layer({"v_bias": True}, value_source="key_prefix"),
        {"w_q": (24, 30), "w_k": (24, 10), "w_o": (18, 24)},
    ),
    "mean": (_layer({"output": False}, combine="mean"), STREAM),
    "sinks": (_layer(sinks=True), PLAIN | {"sinks": (6,)}),
    "norm": (
        _layer(qk_norm=QkNormSpec(kind="rms")),
        PLAIN | {"q_norm_weight": (5,), "k_norm_weight": (5,)},
    ),
    "norm-bias-alone": (
        _layer(qk_norm=QkNormSpec(kind="layer", weight=False, bias=True)),
        PLAIN | {"q_norm_bias": (5,), "k_norm_bias": (5,)},
    ),
    "norm-of-queries-over-all-heads": (
        _layer(qk_norm=QkNormSpec(kind="rms", over="hidden", key=False)),
        PLAIN | {"q_norm_weight": (30,)},
    ),
    "norm-over-all-heads": (
        _layer(qk_norm=QkNormSpec(kind="rms", over="hidden")),
        PLAIN | {"q_norm_weight": (30,), "k_norm_weight": (10,)},
    ),
    "joint": (
        _layer({"joint": JointSpec(lengths=("a", "b"))}, q_len="s", kv_len="s"),
        PLAIN | {f"encoder_{name}": shape for name, shape in PLAIN.items()},
    ),
    "joint-norm-and-sinks": (
        _layer(
            {
                "joint": JointSpec(
                    lengths=("a", "b"), d_model=20, qk_norm=QkNormSpec(kind="rms"), output=False
                )
            },
            q_len="s",
            kv_len="s",
            sinks=True,
        ),
        PLAIN
        | {"q_norm_weight": (5,), "k_norm_weight": (5,)}
        | SECOND
        | {"encoder_q_norm_weight": (5,), "encoder_k_norm_weight": (5,), "sinks": (6,)},
    ),
    "latent": (
        _latent(),
        {"w_q": (24, 36)} | EXPANDED | {"w_kv_b": (7, 42), "w_o": (18, 24)},
    ),
    "latent-query": (
        _latent(q_rank=8),
        {"w_q_a": (24, 8), "q_norm": (8,), "w_q_b": (8, 36)}
        | EXPANDED
        | {"w_kv_b": (7, 42), "w_o": (18, 24)},
    ),
    "latent-absorbed": (
        _latent(absorbed=True),
        {"w_q": (24, 36)} | EXPANDED | {"w_kv_b": (7, 48), "w_o": (24, 24)},
    ),
    "latent-absorbed-narrow-values": (
        _latent(absorbed=True, v_dim=3),
        {"w_q": (24, 36)} | EXPANDED | {"w_kv_b": (7, 42), "w_o": (18, 24)},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes(name: str) -> None:
    spec, shapes = SHAPES[name]
    assert weight_shapes(spec) == shapes
    assert {name: array.shape for name, array in random_weights(spec, 0).items()} == shapes


def test_a_mean_of_heads_is_one_head_wide() -> None:
    assert merged_width(_spec(combine="mean")) == 3
    assert merged_width(_spec()) == 18


def test_sinks_and_norms_are_inputs_of_a_bare_attention() -> None:
    spec = _spec(sinks=True, qk_norm=QkNormSpec(kind="rms"))
    assert side_shapes(spec) == {"q_norm_weight": (5,), "k_norm_weight": (5,), "sinks": (6,)}


WIDE = AttentionSpec(
    q_heads=64,
    kv_heads=64,
    head_dim=16,
    sinks=True,
    qk_norm=QkNormSpec(kind="layer", over="hidden", bias=True),
    projections=ProjectionSpec(d_model=400, **BIASED),
)


@pytest.mark.parametrize(
    ("name", "mean", "spread"),
    [
        ("w_q", 0.0, 1 / 20),
        ("w_o", 0.0, 1 / 32),
        ("b_q", 0.0, 0.1),
        ("b_o", 0.0, 0.1),
        ("sinks", 0.0, 0.1),
        ("q_norm_weight", 1.0, 0.1),
        ("q_norm_bias", 0.0, 0.1),
    ],
)
def test_how_drawn_weights_spread(name: str, mean: float, spread: float) -> None:
    """Matrices keep the size of what they read: by one over the root of its width."""
    drawn = random_weights(WIDE, 3)[name]
    assert drawn.dtype == np.float32
    assert drawn.mean() == pytest.approx(mean, abs=5 * spread / np.sqrt(drawn.size))
    assert drawn.std() == pytest.approx(spread, rel=4 / np.sqrt(drawn.size))


def test_a_larger_norm_weight_is_as_likely_as_a_smaller_one_and_is_drawn_first() -> None:
    """Seeded numbers stay the same: goldens and proofs of other runs rest on them."""
    norm = QkNormSpec(kind="rms")
    drawn = random_weights(_layer({"output": False}, qk_norm=norm), 3)["q_norm_weight"]
    rng = np.random.default_rng(3)
    for shape in STREAM.values():
        rng.standard_normal(shape, dtype=np.float32)
    expected = 1.0 + np.float32(0.1) * rng.standard_normal(5, dtype=np.float32)
    np.testing.assert_array_equal(drawn, expected)


PARTS = {"q": (0, 30), "k": (30, 40), "v": (40, 46)}


@pytest.mark.parametrize("part", PARTS)
def test_a_packed_bias_holds_only_what_is_stated(part: str) -> None:
    spec = _layer({"packing": "packed", f"{part}_bias": True})
    columns = np.nonzero(random_weights(spec, 0)["b_qkv"])[0]
    assert [*columns] == [*range(*PARTS[part])]


@pytest.mark.parametrize(("part", "columns"), {"q": (0, 15), "k": (15, 20), "v": (20, 23)}.items())
def test_an_interleaved_bias_goes_group_by_group(part: str, columns: tuple[int, int]) -> None:
    """Two groups of [three query heads | key | value], 23 columns each."""
    spec = _layer({"packing": "interleaved", f"{part}_bias": True})
    (found,) = np.nonzero(random_weights(spec, 0)["b_qkv"])
    assert [*found] == [*range(*columns), *range(23 + columns[0], 23 + columns[1])]


def test_half_precision_weights_are_the_same_numbers_rounded() -> None:
    spec = _layer({"packing": "packed", "q_bias": True})
    exact, narrow = (random_weights(s, 1) for s in (spec, spec.replace(io_dtype=DType.FP16)))
    for name, array in exact.items():
        assert narrow[name].dtype == np.float16
        np.testing.assert_array_equal(narrow[name], array.astype(np.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_k": None}, r"weight w_k is missing[\s\S]*give exactly: w_q, w_k, w_v, w_o"),
        ({"w_x": np.zeros(1)}, r"weight w_x is not one the spec states"),
        ({"w_v": np.zeros((6, 24))}, r"weight w_v has shape \[6, 24\]; expected \[24, 6\]"),
    ],
)
def test_other_weights_are_refused(change: dict[str, Any], message: str) -> None:
    weights = random_weights(_layer(), 0)
    check_weights(_layer(), weights)
    changed = {name: array for name, array in (weights | change).items() if array is not None}
    with pytest.raises(InputError, match=message):
        check_weights(_layer(), changed)
