"""Rotary in the oracle against transformers, and what a rotation must keep."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_specs import BOTTOM_RIGHT, draw, make_spec

from mha_export.oracle import RotaryInputs, attention, inverse_frequencies, rotary_tables, rotate
from mha_export.spec import CacheSpec, MaskSpec, RotaryScaling, RotarySpec, RotaryStyle

RNG = np.random.default_rng(7)
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
