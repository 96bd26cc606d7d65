"""The oracle against independent implementations, and each rule of the spec on numbers by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import attention_specs

from mha_export.cases import cases
from mha_export.errors import InputError
from mha_export.oracle import (
    LatentWeights,
    LayerWeights,
    OracleInputs,
    OracleResult,
    RotaryInputs,
    SideInputs,
    StreamWeights,
    attention,
    hidden_pairs,
    inverse_frequencies,
    joint_layer,
    latent_layer,
    layer,
    rotary_tables,
    rotate,
)
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    JointSpec,
    LatentSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    QkOutput,
    RotaryScaling,
    RotarySpec,
    RotaryStyle,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
RNG = np.random.default_rng(7)


def make_spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 6, **changes})


def draw(spec: AttentionSpec, b: int, s: int, n: int, **others: Any) -> OracleInputs:
    rng = np.random.default_rng(3)
    own = spec.value_source == "own"
    return OracleInputs(
        query=rng.normal(size=(b, spec.q_heads, s, spec.head_dim)),
        key=rng.normal(size=(b, spec.kv_heads, n, spec.head_dim)),
        value=rng.normal(size=(b, spec.kv_heads, n, spec.value_dim)) if own else None,
        **others,
    )


def seen(spec: AttentionSpec, s: int, t: int, b: int = 1, **others: Any) -> list[str]:
    """The rows of batch row 0 and head 0 as text, # where the pair takes part."""
    hidden = hidden_pairs(spec, draw(spec, b, s, t, **others))
    return ["".join(".#"[int(not x)] for x in row) for row in hidden[0, 0]]


# --- against PyTorch ---------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("masking", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("v_head_dim", [None, 5])
def test_it_is_torch_scaled_dot_product_attention(
    kv_heads: int, scale: float | None, masking: str, v_head_dim: int | None
) -> None:
    torch = pytest.importorskip("torch")
    shapes = {"bool": {"keep": ("batch", 1, 5, 7)}, "float": {"bias": (4, 5, 7)}}
    mask = MaskSpec(
        causal=TOP_LEFT if masking == "causal" else None,
        empty_row=EmptyRow.ZERO,
        **shapes.get(masking, {}),
    )
    spec = make_spec(kv_heads=kv_heads, scale=scale, v_head_dim=v_head_dim, mask=mask)
    keep = RNG.random((2, 1, 5, 7)) < 0.6
    keep[..., 0] = True
    bias = RNG.normal(size=(4, 5, 7))
    inputs = draw(spec, 2, 5, 7)
    inputs = inputs.replace(
        keep=keep if masking == "bool" else None, bias=bias if masking == "float" else None
    )
    torch_mask = {"bool": keep, "float": bias}.get(masking)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x) for x in (inputs.query, inputs.key, inputs.value)),
        attn_mask=None if torch_mask is None else torch.from_numpy(torch_mask),
        is_causal=masking == "causal",
        scale=scale,
        enable_gqa=True,
    )
    np.testing.assert_allclose(attention(spec, inputs).output, expected.numpy(), atol=1e-13)


def test_it_is_torch_multi_head_attention() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, bias=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lost = torch.tensor([[False] * 5, [False, True, False, True, True]])
    with torch.no_grad():
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
        expected, weights = module(x, x, x, key_padding_mask=lost, average_attn_weights=False)
        weights_of_layer = LayerWeights(
            w_qkv=module.in_proj_weight.numpy().T,
            b_qkv=module.in_proj_bias.numpy(),
            w_o=module.out_proj.weight.numpy().T,
            b_o=module.out_proj.bias.numpy(),
        )
    spec = AttentionSpec(
        q_heads=4,
        kv_heads=4,
        head_dim=4,
        mask=MaskSpec(padding=True, empty_row=EmptyRow.NAN),
        projections=ProjectionSpec(
            d_model=16, packing="packed", q_bias=True, k_bias=True, v_bias=True, output_bias=True
        ),
    )
    side = SideInputs(key_padding=~lost.numpy())
    found, result = layer(spec, weights_of_layer, x.numpy(), side=side)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)
    np.testing.assert_allclose(result.probabilities, weights.numpy(), atol=1e-12)


# --- rotary, against transformers --------------------------------------------------------------

SCALINGS = {
    "default": (None, {}),
    "linear": (RotaryScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        RotaryScaling(kind="yarn", factor=8.0, original_max_positions=256),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    ),
    "yarn untruncated, own factor": (
        RotaryScaling(
            kind="yarn",
            factor=32.0,
            original_max_positions=4096,
            truncate=False,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.25,
        ),
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    "yarn of factor 1": (
        RotaryScaling(kind="yarn", factor=1.0, original_max_positions=256),
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256},
    ),
    "llama3": (
        RotaryScaling(kind="llama3", factor=8.0, original_max_positions=512),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, parameters = SCALINGS[name]
    original = parameters.get("original_max_position_embeddings", 2048)
    config = transformers.LlamaConfig(
        hidden_size=4 * 64,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=int(original * parameters.get("factor", 1)),
        rope_parameters={"rope_type": "default", "rope_theta": theta, **parameters},
    )
    if name == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device="cpu")
    found, found_factor = inverse_frequencies(RotarySpec(dim=64, theta=theta, scaling=scaling))
    np.testing.assert_allclose(found, expected.double().numpy(), rtol=3e-6)
    assert found_factor == pytest.approx(factor, rel=1e-12)


def test_ntk_is_the_dynamic_scaling_of_transformers_at_the_length_that_gives_its_factor() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=300,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    )
    # factor * length / 300 - (factor - 1) = 3 at length 500.
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, device="cpu", seq_len=torch.tensor(500))
    spec = RotarySpec(dim=64, theta=1e4, scaling=RotaryScaling(kind="ntk", factor=3.0))
    found, factor = inverse_frequencies(spec)
    np.testing.assert_allclose(found, expected.double().numpy(), rtol=3e-6)
    assert factor == 1.0


def test_a_ramp_of_no_width_does_not_divide_by_zero() -> None:
    scaling = RotaryScaling(
        kind="yarn",
        factor=2.0,
        original_max_positions=64,
        beta_fast=1.0,
        beta_slow=1.0,
        truncate=False,
    )
    found, _ = inverse_frequencies(RotarySpec(dim=16, theta=1e4, scaling=scaling))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("style", list(RotaryStyle))
def test_rotation_keeps_lengths_and_depends_on_distance_alone(style: RotaryStyle) -> None:
    rotary = RotarySpec(style=style, dim=4, theta=100.0)
    x, y = RNG.normal(size=(2, 1, 1, 1, 6))

    def at(vector: np.ndarray, position: int) -> np.ndarray:
        cos, sin = rotary_tables(rotary, np.array([[position]]))
        return rotate(vector, cos, sin, rotary, 0)

    np.testing.assert_allclose(np.linalg.norm(at(x, 9)), np.linalg.norm(x))
    np.testing.assert_allclose((at(x, 9) * at(y, 4)).sum(), (at(x, 105) * at(y, 100)).sum())
    np.testing.assert_array_equal(at(x, 9)[..., 4:], x[..., 4:])


def test_the_two_styles_are_one_up_to_the_order_of_channels() -> None:
    x = RNG.normal(size=(1, 2, 3, 8))
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    half = RotarySpec(style=RotaryStyle.HALF, dim=8, theta=10.0)
    inter = RotarySpec(style=RotaryStyle.INTERLEAVED, dim=8, theta=10.0)
    cos, sin = rotary_tables(half, np.arange(3)[None])
    np.testing.assert_allclose(
        rotate(x, cos, sin, half, 0)[..., order], rotate(x[..., order], cos, sin, inter, 0)
    )


@pytest.mark.parametrize("style", list(RotaryStyle))
def test_tables_of_full_width_are_the_same_rotation(style: RotaryStyle) -> None:
    rotary = RotarySpec(style=style, dim=8, theta=10.0)
    x = RNG.normal(size=(1, 2, 3, 8))
    cos, sin = rotary_tables(rotary, np.arange(3)[None])
    if style is RotaryStyle.HALF:
        wide = [np.concatenate([table, table], axis=-1) for table in (cos, sin)]
    else:
        wide = [np.repeat(table, 2, axis=-1) for table in (cos, sin)]
    np.testing.assert_array_equal(
        rotate(x, cos, sin, rotary, 0), rotate(x, wide[0], wide[1], rotary, 0)
    )


def test_tables_ids_and_theta_say_the_same() -> None:
    base = make_spec(rotary=RotarySpec(dim=4, theta=50.0))
    inputs = draw(base, 2, 5, 5)
    expected = attention(base, inputs).output
    cos, sin = rotary_tables(RotarySpec(dim=4, theta=50.0), np.arange(20))
    ids = np.broadcast_to(np.arange(5), (2, 5))
    ways = {
        "ids": (RotarySpec(dim=4, theta=50.0, positions="input"), RotaryInputs(position_ids=ids)),
        "tables": (RotarySpec(dim=4), RotaryInputs(cos=cos[None, :5], sin=sin[None, :5])),
        "tables and ids": (
            RotarySpec(dim=4, positions="input"),
            RotaryInputs(cos=cos, sin=sin, position_ids=ids),
        ),
        "tables of the keys": (
            RotarySpec(dim=4),
            RotaryInputs(
                cos=cos[None, :5], sin=sin[None, :5], key_cos=cos[None, :5], key_sin=sin[None, :5]
            ),
        ),
    }
    for name, (rotary, arrays) in ways.items():
        found = attention(base.replace(rotary=rotary), inputs.replace(rotary=arrays)).output
        np.testing.assert_allclose(found, expected, atol=1e-14, err_msg=name)


def test_keys_rotated_after_the_cache_give_the_same_as_before_it() -> None:
    rotary = RotarySpec(dim=6, theta=50.0)
    spec = make_spec(rotary=rotary, cache=CacheSpec(), mask=MaskSpec(causal=BOTTOM_RIGHT))
    raw_past = RNG.normal(size=(1, 2, 3, 6))
    past_value = RNG.normal(size=(1, 2, 3, 6))
    cos, sin = rotary_tables(rotary, np.arange(5)[None])
    rotated_past = rotate(raw_past, cos[:, :3], sin[:, :3], rotary, 0)
    inputs = draw(spec, 1, 2, 2, past_key=rotated_past, past_value=past_value)
    before = attention(spec, inputs)
    tables = RotaryInputs(cos=cos[:, 3:], sin=sin[:, 3:], key_cos=cos, key_sin=sin)
    late = spec.replace(rotary=RotarySpec(dim=6))
    after = attention(late, inputs.replace(past_key=raw_past, rotary=tables))
    np.testing.assert_allclose(after.output, before.output, atol=1e-14)
    np.testing.assert_array_equal(after.present_key[:, :, 3:], inputs.key)


def test_keys_that_come_rotated_are_left_alone() -> None:
    spec = make_spec(rotary=RotarySpec(dim=6, theta=50.0, key=False))
    inputs = draw(spec, 1, 3, 3)
    np.testing.assert_array_equal(attention(spec, inputs).present_key, inputs.key)


# --- positions and the mask --------------------------------------------------------------------


def test_the_two_alignments() -> None:
    assert seen(make_spec(mask=MaskSpec(causal=TOP_LEFT)), 2, 4) == ["#...", "##.."]
    assert seen(make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT)), 2, 4) == ["###.", "####"]


def cached(p: int) -> dict[str, Any]:
    return {"past_key": np.zeros((1, 2, p, 6)), "past_value": np.zeros((1, 2, p, 6))}


@pytest.mark.parametrize(
    ("mask", "cache", "s", "n", "others", "rows"),
    [
        pytest.param(
            {"left_window": 1, "right_window": 0},
            None,
            3,
            4,
            {},
            ["#...", "##..", ".##."],
            id="none",
        ),
        pytest.param({"left_window": 1}, None, 2, 4, {}, ["####", "####"], id="left alone"),
        pytest.param({"left_window": 1}, "concat", 2, 2, cached(3), ["..###", "...##"], id="past"),
        pytest.param(
            {"causal": BOTTOM_RIGHT}, "concat", 3, 2, cached(2), ["###.", "####", "####"], id="odd"
        ),
        pytest.param(
            {"causal": TOP_LEFT}, "concat", 2, 2, cached(2), ["#...", "##.."], id="top-left past"
        ),
        pytest.param(
            {"causal": TOP_LEFT, "left_window": 0}, None, 2, 3, {}, ["#..", ".#."], id="diagonal"
        ),
        pytest.param(
            {"causal": BOTTOM_RIGHT, "left_window": 1}, None, 2, 4, {}, [".##.", "..##"], id="shift"
        ),
        pytest.param(
            {"lengths": True, "causal": BOTTOM_RIGHT, "empty_row": EmptyRow.ZERO},
            None,
            2,
            5,
            {"kv_lengths": np.array([3])},
            ["##...", "###.."],
            id="lengths",
        ),
        pytest.param(
            {"lengths": True, "causal": BOTTOM_RIGHT, "empty_row": EmptyRow.ZERO},
            None,
            3,
            4,
            {"kv_lengths": np.array([1])},
            ["....", "....", "#..."],
            id="fewer keys than queries",
        ),
        pytest.param(
            {"lengths": True, "causal": TOP_LEFT, "empty_row": EmptyRow.ZERO},
            None,
            3,
            4,
            {"kv_lengths": np.array([2])},
            ["#...", "##..", "##.."],
            id="lengths top-left",
        ),
        pytest.param(
            {"right_window": 1}, None, 3, 4, {}, ["##..", "###.", "####"], id="right window"
        ),
        pytest.param(
            {"causal": TOP_LEFT, "prefix": True},
            None,
            4,
            4,
            {"prefix_lengths": np.array([2])},
            ["##..", "##..", "###.", "####"],
            id="prefix",
        ),
        pytest.param(
            {"causal": TOP_LEFT, "prefix": True, "left_window": 1},
            None,
            4,
            4,
            {"prefix_lengths": np.array([2])},
            ["##..", "##..", ".##.", "..##"],
            id="prefix leaves the window",
        ),
        pytest.param({"block": 2}, None, 4, 4, {}, ["##..", "##..", "..##", "..##"], id="block"),
        pytest.param({"block": 3}, "concat", 2, 2, cached(2), ["###.", "...#"], id="block past"),
        pytest.param(
            {"documents": True},
            None,
            4,
            4,
            {"document_ids": np.array([[0, 1, 1, 0]])},
            ["#..#", ".##.", ".##.", "#..#"],
            id="documents",
        ),
        pytest.param(
            {"padding": True, "empty_row": EmptyRow.ZERO},
            None,
            1,
            5,
            {"key_padding": np.array([[0, 1, 0, 2, 1]])},
            [".#.##"],
            id="holes",
        ),
        pytest.param(
            {"keep": ("k",), "empty_row": EmptyRow.ZERO},
            None,
            2,
            4,
            {"keep": np.array([True, False])},
            ["#...", "#..."],
            id="short keep",
        ),
        pytest.param(
            {"keep": (1,), "empty_row": EmptyRow.ZERO},
            None,
            1,
            3,
            {"keep": np.array([True])},
            ["#.."],
            id="one key, not all",
        ),
        pytest.param(
            {"bias": ("q", "k")},
            None,
            2,
            3,
            {"bias": np.zeros((2, 2))},
            ["##.", "##."],
            id="short bias",
        ),
        pytest.param(
            {"bias": ("q", "k")},
            None,
            1,
            3,
            {"bias": np.array([[0.0, -np.inf, 0.0]])},
            ["###"],
            id="-inf is no rule",
        ),
    ],
)
def test_who_sees_whom(
    mask: dict[str, Any],
    cache: str | None,
    s: int,
    n: int,
    others: dict[str, Any],
    rows: list[str],
) -> None:
    spec = make_spec(
        mask=MaskSpec(**mask), cache=None if cache is None else CacheSpec(growth=cache)
    )
    assert seen(spec, s, n, **others) == rows


def test_a_static_cache_is_written_at_its_length_and_masked_beyond() -> None:
    for growth in ("static", "shared_buffer"):
        spec = make_spec(cache=CacheSpec(growth=growth), mask=MaskSpec(causal=BOTTOM_RIGHT))
        buffer = np.full((2, 2, 6, 6), 7.0)
        inputs = draw(
            spec, 2, 2, 2, past_key=buffer, past_value=buffer, kv_lengths=np.array([3, 6])
        )
        result = attention(spec, inputs)
        expected = buffer.copy()
        expected[0, :, 1:3], expected[1, :, 4:6] = inputs.key[0], inputs.key[1]
        np.testing.assert_array_equal(result.present_key, expected)
        np.testing.assert_array_equal(buffer, 7.0)
        assert result.hidden is not None
        assert result.hidden[0, 0].astype(int).tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
        assert result.hidden[1, 0].astype(int).tolist() == [[0, 0, 0, 0, 0, 1], [0] * 6]


def test_decoding_step_by_step_is_the_prefill() -> None:
    spec = make_spec(
        cache=CacheSpec(),
        mask=MaskSpec(causal=BOTTOM_RIGHT, left_window=3),
        rotary=RotarySpec(dim=6, theta=20.0),
        qk_norm=QkNormSpec(kind="rms"),
    )
    weights = {name: RNG.normal(size=6) for name in ("q_norm_weight", "k_norm_weight")}
    none = np.zeros((2, 2, 0, 6))
    whole = draw(spec, 2, 6, 6, past_key=none, past_value=none, **weights)
    expected = attention(spec, whole)
    past_key = past_value = none
    for at in range(6):
        step = slice(at, at + 1)
        result = attention(
            spec,
            OracleInputs(
                query=whole.query[:, :, step],
                key=whole.key[:, :, step],
                value=whole.value[:, :, step],  # type: ignore[index]
                past_key=past_key,
                past_value=past_value,
                **weights,
            ),
        )
        past_key, past_value = result.present_key, result.present_value
        np.testing.assert_allclose(result.output, expected.output[:, :, step], atol=1e-13)


def test_alibi_is_relative_to_the_query() -> None:
    slopes = (0.5, 0.25, 0.125, 1.0)
    spec = make_spec(scale=0.0, mask=MaskSpec(alibi_slopes=slopes), cache=CacheSpec())
    result = attention(spec, draw(spec, 1, 2, 2, **cached(1)))
    assert result.masked is not None
    np.testing.assert_allclose(result.masked[0, 0], [[-0.5, 0.0, 0.5], [-1.0, -0.5, 0.0]])
    np.testing.assert_allclose(result.masked[0, 3, 1], [-2.0, -1.0, 0.0])


def test_alibi_and_bias_add_up() -> None:
    bias = RNG.normal(size=(3, 3))
    both = make_spec(scale=0.0, mask=MaskSpec(alibi_slopes=(1.0,) * 4, bias=("q", "k")))
    result = attention(both, draw(both, 1, 3, 3, bias=bias))
    assert result.masked is not None
    distance = np.arange(3) - np.arange(3)[:, None]
    np.testing.assert_allclose(result.masked[0, 2], bias + distance)


# --- fill and empty rows -----------------------------------------------------------------------


def one_empty_row(fill: Any, policy: EmptyRow, **changes: Any) -> OracleResult:
    mask = MaskSpec(keep=("q", "k"), fill=fill, empty_row=policy)
    spec = make_spec(mask=mask, **changes)
    keep = np.array([[False, False, False], [True, False, True]])
    return attention(spec, draw(spec, 1, 2, 3, keep=keep))


@pytest.mark.parametrize(
    ("fill", "policy", "row"),
    [
        ("-inf", EmptyRow.ZERO, [0.0] * 3),
        ("-inf", EmptyRow.NAN, [math.nan] * 3),
        ("-inf", EmptyRow.UNIFORM, [1 / 3] * 3),
        ("-inf", EmptyRow.FINITE, [math.nan] * 3),
        ("min", EmptyRow.UNIFORM, [1 / 3] * 3),
        ("min", EmptyRow.FINITE, [1 / 3] * 3),
        ("min", EmptyRow.ZERO, [0.0] * 3),
        (-1e9, EmptyRow.ZERO, [0.0] * 3),
        (-1e9, EmptyRow.UNIFORM, [1 / 3] * 3),
    ],
)
def test_what_a_row_without_keys_gets(fill: Any, policy: EmptyRow, row: list[float]) -> None:
    result = one_empty_row(fill, policy)
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities[0, :, 0], [row] * 4)
    assert result.empty_rows.tolist() == [[[True, False]] * 4]
    assert result.probabilities[0, :, 1, 1].tolist() == [0.0] * 4


def test_a_finite_fill_is_added_and_can_be_outbid() -> None:
    result = one_empty_row(-10.0, EmptyRow.FINITE, scale=1.0)
    assert result.raw is not None
    assert result.masked is not None
    assert result.probabilities is not None
    np.testing.assert_allclose(result.masked[0, 0, 0], result.raw[0, 0, 0] - 10.0)
    expected = np.exp(result.raw[0, 0, 0]) / np.exp(result.raw[0, 0, 0]).sum()
    np.testing.assert_allclose(result.probabilities[0, 0, 0], expected)
    assert result.probabilities[0, 0, 1, 1] > 0


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (DType.FP16, -65504.0),
        (DType.FP32, float(np.finfo(np.float32).min)),
        (DType.BF16, -3.3895313892515355e38),
        (DType.FP64, float(np.finfo(np.float64).min)),
    ],
)
def test_min_is_the_least_number_of_the_io_dtype(dtype: DType, least: float) -> None:
    result = one_empty_row("min", EmptyRow.UNIFORM, io_dtype=dtype)
    assert result.scores(QkOutput.MASKED)[0, 0, 1, 1] == least


def test_biases_of_minus_infinity_empty_a_row_too() -> None:
    spec = make_spec(mask=MaskSpec(bias=("q", "k"), empty_row=EmptyRow.ZERO))
    bias = np.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    result = attention(spec, draw(spec, 1, 2, 2, bias=bias))
    assert result.empty_rows[0, 0].tolist() == [True, False]
    assert not result.output[:, :, 0].any()


def test_the_mean_of_one_hidden_key_is_that_key() -> None:
    spec = make_spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.UNIFORM))
    inputs = draw(spec, 1, 2, 1, key_padding=np.zeros((1, 1), int))
    result = attention(spec, inputs)
    assert result.probabilities is not None
    assert (result.probabilities == 1.0).all()


def test_no_keys_at_all() -> None:
    spec = make_spec(mask=MaskSpec(empty_row=EmptyRow.UNIFORM))
    result = attention(spec, draw(spec, 1, 2, 0))
    assert not result.output.any()
    assert result.empty_rows.all()


# --- the rest of the equation ------------------------------------------------------------------


def test_softcap_comes_before_the_mask() -> None:
    spec = make_spec(
        softcap=2.0, scale=6.0, mask=MaskSpec(keep=("k",), bias=("k",), empty_row=EmptyRow.ZERO)
    )
    keep = np.array([True, False, True])
    value = np.where(keep[:, None], RNG.normal(size=(1, 2, 3, 6)), 1e30)
    inputs = draw(spec, 1, 2, 3, keep=keep, bias=np.array([0.0, 9.0, 3.0])).replace(value=value)
    result = attention(spec, inputs)
    raw, capped = result.scores(QkOutput.RAW), result.scores(QkOutput.CAPPED)
    np.testing.assert_allclose(capped, 2 * np.tanh(raw / 2))
    np.testing.assert_allclose(result.scores(QkOutput.MASKED)[..., 2], capped[..., 2] + 3.0)
    assert np.abs(result.output).max() < 10


def test_a_sink_is_one_more_key_without_a_value() -> None:
    spec = make_spec(sinks=True)
    sinks = np.array([0.0, 1.0, -1.0, 80.0])
    inputs = draw(spec, 1, 2, 3, sinks=sinks)
    result = attention(spec, inputs)
    scores = np.concatenate(
        [result.scores(QkOutput.RAW), np.broadcast_to(sinks[None, :, None, None], (1, 4, 2, 1))],
        axis=-1,
    )
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(result.scores(QkOutput.PROBABILITIES), expected[..., :3])


def test_a_sink_takes_all_of_a_row_without_keys() -> None:
    mask = MaskSpec(keep=("k",), empty_row=EmptyRow.FINITE)
    spec = make_spec(sinks=True, mask=mask)
    result = attention(spec, draw(spec, 1, 1, 2, sinks=np.zeros(4), keep=np.zeros(2, bool)))
    assert not result.output.any()


def test_heads_interleave_and_do_not_tile() -> None:
    spec = make_spec()
    inputs = draw(spec, 1, 3, 3)
    wide = make_spec(kv_heads=4)
    assert inputs.value is not None
    repeated = inputs.replace(key=inputs.key.repeat(2, 1), value=inputs.value.repeat(2, 1))
    np.testing.assert_allclose(
        attention(spec, inputs).output, attention(wide, repeated).output, atol=1e-15
    )


@pytest.mark.parametrize("over", ["head", "hidden"])
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_qk_norm_is_that_of_torch(kind: str, over: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    bias = kind == "layer"
    spec = make_spec(qk_norm=QkNormSpec(kind=kind, over=over, epsilon=1e-3, bias=bias))  # type: ignore[arg-type]
    width = {"head": (6, 6), "hidden": (24, 12)}[over]
    weights = {f"{x}_norm_weight": RNG.normal(size=w) for x, w in zip("qk", width, strict=True)}
    if bias:
        weights |= {f"{x}_norm_bias": RNG.normal(size=w) for x, w in zip("qk", width, strict=True)}
    inputs = draw(spec, 2, 3, 3)
    found = attention(spec, inputs.replace(**weights)).present_key
    flat = inputs.key.swapaxes(1, 2)
    flat = torch.from_numpy(flat.reshape(2, 3, 12) if over == "hidden" else flat)
    weight = torch.from_numpy(weights["k_norm_weight"])
    if kind == "rms":
        normed = functional.rms_norm(flat, flat.shape[-1:], weight, 1e-3)
    elif kind == "layer":
        b = torch.from_numpy(weights["k_norm_bias"])
        normed = functional.layer_norm(flat, flat.shape[-1:], weight, b, 1e-3)
    else:
        normed = functional.normalize(flat, dim=-1, eps=1e-3) * weight
    expected = normed.numpy().reshape(2, 3, 2, 6).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_shared_keys_are_not_normalised_again() -> None:
    spec = make_spec(qk_norm=QkNormSpec(kind="l2", weight=False, key=False))
    inputs = draw(spec, 1, 2, 2)
    result = attention(spec, inputs)
    np.testing.assert_array_equal(result.present_key, inputs.key)
    assert not np.allclose(result.output, attention(spec.replace(qk_norm=None), inputs).output)


def test_the_value_may_be_a_prefix_of_the_key() -> None:
    spec = make_spec(value_source="key_prefix", v_head_dim=4, rotary=RotarySpec(dim=6, theta=9.0))
    inputs = draw(spec, 1, 3, 3)
    result = attention(spec, inputs)
    assert result.present_value is None
    plain = make_spec(v_head_dim=4, rotary=RotarySpec(dim=6, theta=9.0))
    same = attention(plain, inputs.replace(value=result.present_key[..., :4]))
    np.testing.assert_array_equal(result.output, same.output)


def test_the_mean_of_heads() -> None:
    inputs = draw(make_spec(), 2, 3, 3)
    apart = attention(make_spec(), inputs).output
    together = attention(make_spec(combine="mean"), inputs).output
    np.testing.assert_allclose(together, apart.mean(1))


def test_poison_behind_the_mask_stays_there() -> None:
    for fill in ("-inf", "min", -1e9):
        spec = make_spec(mask=MaskSpec(padding=True, fill=fill, empty_row=EmptyRow.ZERO))
        padding = np.array([[1, 0, 1]])
        inputs = draw(spec, 1, 2, 3, key_padding=padding)
        clean = attention(spec, inputs).output
        assert inputs.value is not None
        value = inputs.value.copy()
        value[:, :, 1] = 1e30
        np.testing.assert_array_equal(attention(spec, inputs.replace(value=value)).output, clean)


def test_huge_scores_do_not_overflow() -> None:
    spec = make_spec(scale=1e6)
    result = attention(spec, draw(spec, 1, 3, 5))
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities.sum(-1), 1.0)


# --- blocks ------------------------------------------------------------------------------------


def test_without_scores_the_output_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_export.oracle._attention._BLOCK_ELEMENTS", 40)
    mask = MaskSpec(
        causal=BOTTOM_RIGHT,
        keep=("b", 1, "q", "k"),
        bias=("q", "k"),
        empty_row=EmptyRow.ZERO,
        documents=True,
    )
    spec = make_spec(mask=mask, sinks=True)
    inputs = draw(
        spec,
        2,
        5,
        7,
        keep=RNG.random((2, 1, 5, 7)) < 0.5,
        bias=RNG.normal(size=(5, 7)),
        sinks=np.ones(4),
        document_ids=np.array([[0, 0, 0, 0, 1, 1, 1]] * 2),
    )
    whole, blocks = attention(spec, inputs), attention(spec, inputs, scores=False)
    np.testing.assert_allclose(blocks.output, whole.output, atol=1e-15)
    np.testing.assert_array_equal(blocks.empty_rows, whole.empty_rows)
    assert blocks.raw is blocks.probabilities is blocks.hidden is None
    with pytest.raises(InputError, match="scores=True"):
        blocks.scores(QkOutput.RAW)


def test_sixty_five_thousand_keys() -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=4)
    inputs = draw(spec, 1, 2, 65_536)
    ones = inputs.replace(value=np.ones((1, 1, 65_536, 4)))
    np.testing.assert_allclose(attention(spec, ones, scores=False).output, 1.0)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(attention_specs())
def test_probabilities_are_probabilities(spec: AttentionSpec) -> None:
    for case in cases(spec, battery="ordinary"):
        result = attention(spec, case.inputs)
        sums = result.scores(QkOutput.PROBABILITIES).sum(-1)[~result.empty_rows]
        assert (sums <= 1 + 1e-12).all()
        if not spec.sinks:
            np.testing.assert_allclose(sums, 1.0)
        lean = attention(spec, case.inputs, scores=False)
        np.testing.assert_allclose(lean.output, result.output, atol=1e-12)


# --- layers ------------------------------------------------------------------------------------


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


# --- refusals ----------------------------------------------------------------------------------

BATCH = {"b": 1, "s": 2, "n": 3}


@pytest.mark.parametrize(
    ("spec", "others", "words"),
    [
        (make_spec(sinks=True), {}, "sinks is missing"),
        (make_spec(), {"sinks": np.zeros(4)}, "sinks is given"),
        (make_spec(), {"value": None}, "value is missing"),
        (make_spec(), {"query": np.zeros((1, 3, 2, 6))}, r"query has shape \[1, 3, 2, 6\]"),
        (
            make_spec(),
            {"query": np.zeros((1, 2, 6))},
            r"query has shape \[1, 2, 6\]; expected \[any, 4, any, 6\]",
        ),
        (make_spec(), {"key": np.zeros((2, 2, 3, 6))}, "key has shape"),
        (make_spec(), {"value": np.zeros((1, 2, 3, 5))}, "value has shape"),
        (make_spec(cache=CacheSpec()), {}, "past_key is missing"),
        (
            make_spec(cache=CacheSpec()),
            {"past_key": np.zeros((1, 2, 1, 6)), "past_value": np.zeros((1, 2, 2, 6))},
            "past_value has shape",
        ),
        (
            make_spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
            {"kv_lengths": np.array([4])},
            "beyond the 3 keys",
        ),
        (
            make_spec(cache=CacheSpec(growth="static")),
            {
                "past_key": np.zeros((1, 2, 6, 6)),
                "past_value": np.zeros((1, 2, 6, 6)),
                "kv_lengths": np.array([2]),
            },
            "below the 3 new tokens",
        ),
        (
            make_spec(mask=MaskSpec(keep=("k",), empty_row=EmptyRow.ZERO)),
            {"keep": np.ones(4, bool)},
            "keep has shape",
        ),
        (make_spec(mask=MaskSpec(bias=("q", "k"))), {"bias": np.zeros((5, 3))}, "bias has shape"),
        (
            make_spec(mask=MaskSpec(bias=("q", "k"))),
            {"bias": np.zeros((1, 1, 1, 2, 3))},
            "bias has shape",
        ),
        (
            make_spec(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
            {"kv_lengths": np.array([1, 1])},
            r"kv_lengths has shape \[2\]",
        ),
        (
            make_spec(mask=MaskSpec(documents=True, causal=TOP_LEFT)),
            {"query": np.zeros((1, 4, 4, 6)), "document_ids": np.zeros((1, 3), int)},
            r"document_ids know 3 positions; a query stands at 0\.\.3",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(sin=np.zeros((1, 2, 2)))},
            "rotary.cos and rotary.sin are needed",
        ),
        (
            make_spec(mask=MaskSpec(documents=True, causal=BOTTOM_RIGHT)),
            {"query": np.zeros((1, 4, 4, 6)), "document_ids": np.zeros((1, 3), int)},
            "document_ids know 3 positions",
        ),
        (make_spec(), {"rotary": RotaryInputs()}, "rotary is given"),
        (make_spec(rotary=RotarySpec(dim=4)), {}, "rotary.cos and rotary.sin are needed"),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 2)))},
            "theta states them already",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0, positions="input")),
            {},
            "position_ids is missing",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4, theta=9.0)),
            {"rotary": RotaryInputs(position_ids=np.zeros((1, 2), int))},
            "position_ids is given",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 3)), sin=np.zeros((1, 2, 3)))},
            r"shape \[1, 2, 3\]",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {"rotary": RotaryInputs(cos=np.zeros((1, 2, 2)), sin=np.zeros((1, 2, 2)))},
            "do not fit the keys",
        ),
        (
            make_spec(rotary=RotarySpec(dim=4)),
            {
                "rotary": RotaryInputs(
                    cos=np.zeros((1, 2, 2)), sin=np.zeros((1, 2, 2)), key_cos=np.zeros((1, 3, 2))
                )
            },
            "key_sin is missing",
        ),
        (
            make_spec(qk_norm=QkNormSpec(kind="rms")),
            {"q_norm_weight": np.ones(5), "k_norm_weight": np.ones(6)},
            r"qk-norm weight has shape \[5\]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_fit_the_spec(
    spec: AttentionSpec, others: dict[str, Any], words: str
) -> None:
    inputs = draw(spec, **BATCH).replace(**others)
    with pytest.raises(InputError, match=words):
        attention(spec, inputs)


def test_cross_attention_counts_the_keys_positions_from_zero() -> None:
    spec = make_spec(cross=True, rotary=RotarySpec(dim=6, theta=9.0))
    inputs = draw(spec, 1, 3, 3)
    same = make_spec(rotary=RotarySpec(dim=6, theta=9.0))
    np.testing.assert_allclose(attention(spec, inputs).output, attention(same, inputs).output)


@pytest.mark.parametrize(
    ("rotary", "words"),
    [
        (RotarySpec(dim=4), "theta is not stated"),
        (RotarySpec(dim=2, theta=9.0, scaling=RotaryScaling(kind="ntk", factor=2.0)), "above 2"),
    ],
)
def test_frequencies_that_do_not_exist(rotary: RotarySpec, words: str) -> None:
    with pytest.raises(InputError, match=words):
        inverse_frequencies(rotary)


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


def test_names_of_arrays_are_those_of_operands() -> None:
    import onnx_ir as ir

    from mha_export.operands import Heads, Layout, Operands, RotaryTables

    def value(name: str) -> ir.Value:
        return ir.Value(name=name)

    def heads(name: str) -> Heads:
        return Heads(value=value(name), layout=Layout.BHSD, heads=1, dim=1)

    side = {f.name for f in dataclasses.fields(SideInputs)}
    tables = {f.name for f in dataclasses.fields(RotaryInputs)}
    assert side <= {f.name for f in dataclasses.fields(Operands)}
    assert tables <= {f.name for f in dataclasses.fields(RotaryTables)}
    operands = Operands(
        query=heads("q"),
        key=heads("k"),
        value=heads("v"),
        sinks=value("s"),
        rotary=RotaryTables(cos=value("cos"), sin=value("sin")),
    )
    arrays = OracleInputs(
        query=np.zeros(1),
        key=np.zeros(1),
        value=np.zeros(1),
        sinks=np.zeros(1),
        rotary=RotaryInputs(cos=np.zeros(1), sin=np.zeros(1)),
    )
    assert {n for n, _ in arrays.named()} == {n for n, _ in operands.values()}


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


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32, DType.FP64])
def test_the_minimum_of_each_dtype(dtype: DType) -> None:
    from mha_export.bounds import numpy_dtype
    from mha_export.oracle._mask import MINIMUM

    assert MINIMUM[dtype] == float(ml_dtypes.finfo(numpy_dtype(dtype)).min)


def test_queries_in_blocks_are_the_same_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha_export.oracle import _attention

    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=3)
    inputs = OracleInputs(
        query=RNG.normal(size=(1, 2, 7, 3)),
        key=RNG.normal(size=(1, 1, 5, 3)),
        value=RNG.normal(size=(1, 1, 5, 3)),
    )
    whole = attention(spec, inputs)
    monkeypatch.setattr(_attention, "_BLOCK_ELEMENTS", 20)
    np.testing.assert_allclose(attention(spec, inputs, scores=False).output, whole.output)
    kept = attention(spec, inputs)
    assert kept.raw is not None
    assert kept.raw.shape == (1, 2, 7, 5)


@pytest.mark.parametrize("queries", [2, 3])
@pytest.mark.parametrize("part", ["keep", "bias"])
def test_masks_by_query_are_cut_with_the_queries(
    monkeypatch: pytest.MonkeyPatch, part: str, queries: int
) -> None:
    from mha_export.oracle import _attention

    shapes: dict[str, Any] = {part: ("s", "t"), "empty_row": EmptyRow.ZERO}
    spec = make_spec(mask=MaskSpec(**shapes))
    mask = np.tril(np.ones((queries, 4), np.bool_), 1)
    operand = {part: mask if part == "keep" else np.where(mask, 0.5, -np.inf)}
    inputs = draw(spec, 1, queries, 4, **operand)
    whole = attention(spec, inputs)
    monkeypatch.setattr(_attention, "_BLOCK_ELEMENTS", 1)
    found = attention(spec, inputs, scores=False)
    np.testing.assert_allclose(found.output, whole.output)
    assert found.empty_rows.tolist() == whole.empty_rows.tolist()


def test_operands_are_named_and_mapped() -> None:
    tables = RotaryInputs(cos=np.ones((1, 2, 1)), sin=np.zeros((1, 2, 1)))
    side = SideInputs(sinks=np.ones(2), rotary=tables)
    assert [name for name, _ in side.named()] == ["sinks", "rotary.cos", "rotary.sin"]
    doubled = dict(side.map_arrays(lambda array: array + 1).named())
    assert doubled["sinks"].tolist() == [2.0, 2.0]
    assert doubled["rotary.cos"].max() == 2.0
    assert doubled["rotary.sin"].max() == 1.0
