"""Bare specifications: presets, YAML files and objects become canonical graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.frontends import SourceOptions, open_source
from mha_export.presets import preset_names
from mha_export.spec import AttentionSpec, DType

SPEC = AttentionSpec(q_heads=4, kv_heads=2, head_dim=8)
YAML = "q_heads: 4\nkv_heads: 2\nhead_dim: 8\n"


def test_a_spec_in_yaml_and_as_an_object_are_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(YAML)
    from_file, from_object = open_source(path), open_source(SPEC)
    assert from_file.sha256 == from_object.sha256
    assert from_file.name == "tiny"


def test_the_form_the_seed_and_the_dtype_are_chosen(run: Any) -> None:
    primitive = open_source(SPEC)
    fused = open_source(SPEC, SourceOptions(form="onnx", opset=23))
    assert [node.op_type for node in fused.model.graph].count("Attention") == 1
    random = np.random.default_rng(0)
    inputs = {
        name: random.standard_normal((2, 3, heads * 8)).astype(np.float32)
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    }
    (ours,), (theirs,) = run(primitive.model, inputs), run(fused.model, inputs)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    half = open_source(SPEC, SourceOptions(dtype=DType.FP16))
    assert half.model.graph.inputs[0].dtype == ir.DataType.FLOAT16


def test_drawn_weights_follow_the_seed() -> None:
    first, again = (open_source("preset:minilm-l6", SourceOptions(seed=1)) for _ in range(2))
    other = open_source("preset:minilm-l6", SourceOptions(seed=2))
    assert first.sha256 == again.sha256 != other.sha256


@pytest.mark.parametrize("preset", ["gpt2", "t5-base", "vit-b16", "whisper-base-cross"])
def test_a_preset_can_be_opened(preset: str) -> None:
    assert preset in preset_names()
    assert open_source(f"preset:{preset}").name == preset


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("q_heads: 3\nkv_heads: 2\nhead_dim: 8\n", "not a multiple of kv_heads 2"),
        ("q_heads: [", "YAML"),
        ("", "empty"),
        ("q_headz: 3\n", "q_headz"),
    ],
)
def test_a_bad_spec_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert says in caught.value.what


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("absent.yaml", {}, "no such file"),
        ("preset:gpt3", {}, "gpt3"),
        (SPEC, {"form": "nosuch"}, "unknown form 'nosuch'"),
    ],
)
def test_a_bad_request_is_one_clear_error(
    source: object, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        open_source(source, SourceOptions(**options))
    assert caught.value.fix
