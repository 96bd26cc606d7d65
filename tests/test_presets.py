"""Specs from mappings and files, and the presets that ship."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from strategies import attention_specs

from mha_export import presets
from mha_export.cases import cases
from mha_export.errors import InputError
from mha_export.oracle import attention
from mha_export.presets import (
    describe_preset,
    load_preset,
    preset_names,
    spec_from_mapping,
    spec_from_yaml,
    spec_to_mapping,
)
from mha_export.spec import AttentionSpec, DType

HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_what_it_is_and_where_its_numbers_come_from(name: str) -> None:
    preset = describe_preset(name)
    assert len(preset.about) > 20
    assert "arXiv" in preset.source or "huggingface" in preset.source
    assert load_preset(name) == preset.spec == spec_from_yaml(preset.path)


def test_the_presets_asked_for_are_there() -> None:
    assert set(preset_names()) >= {
        "bert-base",
        "deepseek-v3-mla",
        "deepseek-v3-mla-absorbed",
        "gemma-2-9b",
        "gemma-2-9b-local",
        "gpt-oss-20b",
        "gpt2",
        "llama-3-8b",
        "minilm-l6",
        "mistral-7b",
        "qwen3-8b",
        "sd3-joint",
        "t5-base",
        "textbook-4096x32",
        "textbook-512x8",
        "vit-b16",
        "whisper-base",
        "whisper-base-cross",
    }


@pytest.mark.parametrize(
    ("name", "heads", "d_model"),
    [
        ("bert-base", (12, 12, 64), 768),
        ("minilm-l6", (12, 12, 32), 384),
        ("gpt2", (12, 12, 64), 768),
        ("llama-3-8b", (32, 8, 128), 4096),
        ("mistral-7b", (32, 8, 128), 4096),
        ("qwen3-8b", (32, 8, 128), 4096),
        ("gemma-2-9b", (16, 8, 256), 3584),
        ("gpt-oss-20b", (64, 8, 64), 2880),
        ("t5-base", (12, 12, 64), 768),
        ("whisper-base", (8, 8, 64), 512),
        ("textbook-512x8", (8, 8, 64), 512),
        ("textbook-4096x32", (32, 32, 128), 4096),
        ("deepseek-v3-mla", (128, 128, 192), 7168),
        ("falcon-7b", (71, 1, 64), 4544),
    ],
)
def test_published_widths(name: str, heads: tuple[int, int, int], d_model: int) -> None:
    spec = load_preset(name)
    assert (spec.q_heads, spec.kv_heads, spec.head_dim) == heads
    assert spec.projections is not None
    assert spec.projections.d_model == d_model


@pytest.mark.parametrize(
    ("name", "config_class"),
    [
        ("gpt-oss-20b", "GptOssConfig"),
        ("gemma-2-9b-local", "Gemma2Config"),
        ("deepseek-v3-mla", "DeepseekV3Config"),
    ],
)
def test_what_the_model_library_has_as_default_agrees(name: str, config_class: str) -> None:
    transformers = pytest.importorskip("transformers")
    spec, config = load_preset(name), getattr(transformers, config_class)()
    if name == "gpt-oss-20b":
        assert (spec.q_heads, spec.kv_heads) == (
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        assert spec.mask.left_window == config.sliding_window - 1
    if name == "gemma-2-9b-local":
        assert spec.softcap == config.attn_logit_softcapping
        assert spec.scale == config.query_pre_attn_scalar**-0.5
        assert spec.mask.left_window == config.sliding_window - 1
    if name == "deepseek-v3-mla":
        assert spec.latent is not None
        assert spec.latent.kv_rank == config.kv_lora_rank
        assert spec.latent.q_rank == config.q_lora_rank
        assert spec.latent.rope_dim == config.qk_rope_head_dim
        assert spec.latent.nope_dim == config.qk_nope_head_dim
        assert spec.v_head_dim == config.v_head_dim
        assert spec.q_heads == config.num_attention_heads


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_can_be_evaluated(name: str) -> None:
    spec = load_preset(name)
    case = next(cases(spec, battery="quick"))
    result = attention(spec, case.inputs)
    assert result.output.shape == (
        case.dims["batch"],
        spec.q_heads,
        case.dims["q_len"],
        spec.value_dim,
    )


@settings(derandomize=True, max_examples=150, deadline=None)
@given(attention_specs(dtypes=tuple(DType)))
def test_a_spec_written_and_read_is_the_same(spec: AttentionSpec) -> None:
    assert spec_from_mapping(spec_to_mapping(spec)) == spec


@settings(derandomize=True, max_examples=30, deadline=None)
@given(attention_specs())
def test_a_spec_survives_yaml(
    tmp_path_factory: pytest.TempPathFactory, spec: AttentionSpec
) -> None:
    import yaml

    path = tmp_path_factory.mktemp("spec") / "spec.yaml"
    path.write_text(yaml.safe_dump(spec_to_mapping(spec)))
    assert spec_from_yaml(path) == spec


def test_defaults_are_left_out_and_not_stated_stays_not_stated() -> None:
    spec = spec_from_mapping(HEADS)
    assert spec_to_mapping(spec) == HEADS
    assert spec.scale is None
    assert spec_to_mapping(spec.replace(scale=8**-0.5))["scale"] == 8**-0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softcp": 1.0}, ["softcp", "softcap"]),
        ({"mask": {"causl": "top_left"}}, ["mask", "causl", "causal"]),
        ({"mask": {"causal": "left"}}, ["top_left", "bottom_right", "'left'"]),
        ({"mask": {"fill": "low"}}, ["fill", "-inf", "min", "number"]),
        ({"mask": {"keep": "batch"}}, ["keep", "a list"]),
        ({"mask": {"keep": [1.5]}}, ["keep[0]", "1.5", "whole number"]),
        ({"mask": 3}, ["mask", "mapping"]),
        ({"mask": None}, ["mask", "mapping"]),
        ({"rotary": {"theta": 1e4}}, ["rotary", "dim missing"]),
        ({"rotary": {"dim": True}}, ["dim", "True", "whole number"]),
        ({"rotary": {"dim": 4, "theta": "big"}}, ["theta", "'big'", "number"]),
        ({"rotary": {"dim": 4, "theta": float("nan")}}, ["theta", "nan"]),
        ({"sinks": "yes"}, ["sinks", "true or false"]),
        ({"q_len": 1.5}, ["q_len", "1.5"]),
        ({"kv_source": 4}, ["kv_source", "name"]),
        ({"cache": {"growth": "slow"}}, ["growth", "concat", "shared_buffer"]),
        ({"q_heads": 3}, ["q_heads 3", "kv_heads 2"]),
        ({"q_heads": "3"}, ["q_heads", "'3'"]),
        ({3: 4}, ["unknown key 3", "known: q_heads, kv_heads"]),
        ({"causal": "bottom_right"}, ["'causal'", "belongs under 'mask'", "{mask: {causal: ...}}"]),
        ({"theta": 1e4}, ["'theta'", "belongs under 'rotary'"]),
        ({"mask": {"casual": "top_left"}}, ["'casual'", "did you mean 'causal'?"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_mappings_say_what_and_where(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        spec_from_mapping({**HEADS, **changes})
    for word in words:
        assert word in str(caught.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(InputError, match="kv_heads, head_dim missing"):
        spec_from_mapping({"q_heads": 4})


def test_a_number_written_as_yaml_takes_for_text() -> None:
    mapping = {**HEADS, "qk_norm": {"kind": "rms", "epsilon": "1e-6"}}
    norm = spec_from_mapping(mapping).qk_norm
    assert norm is not None
    assert norm.epsilon == 1e-6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"# only a remark\n", "the file is empty"),
        (b"- 1\n- 2\n", "a list"),
        (b"just text", "text"),
        (b"a: [1, 2", "not YAML"),
        (b"a: b: c", "not YAML"),
        (b"\xff\xfe\x00", "cannot be read as text"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        spec_from_yaml(path)
    assert words in str(caught.value)
    assert "spec.yaml" in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        spec_from_yaml(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        spec_from_yaml(tmp_path)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError, match="llama-3-8b"):
        load_preset("llama3")
    with pytest.raises(InputError, match="one of bert-base"):
        load_preset("zzzzzzzz")


def test_presets_that_did_not_ship(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(presets, "_PLACES", (tmp_path / "absent",))
    presets._folder.cache_clear()
    try:
        with pytest.raises(InputError, match="install"):
            preset_names()
    finally:
        presets._folder.cache_clear()


def test_an_installed_wheel_finds_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("q_heads: 2\nkv_heads: 1\nhead_dim: 4\n")
    monkeypatch.setattr(presets, "_PLACES", (tmp_path / "absent", tmp_path))
    presets._folder.cache_clear()
    try:
        assert preset_names() == ("tiny",)
        assert load_preset("tiny").q_heads == 2
    finally:
        presets._folder.cache_clear()


def test_the_documented_file_is_a_spec(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "dimensions.md"
    (text,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "attention.yaml"
    file.write_text(text, encoding="utf-8")
    spec = spec_from_yaml(file)
    assert (spec.mask.left_window, spec.rotary is not None, spec.cache is not None) == (128, 1, 1)
