"""``mha-export build``: from a preset, a file and flags; what it explains; what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result

from mha_export.cli._group import cli
from mha_export.errors import InputError
from mha_export.forms import all_forms
from mha_export.presets import preset_names

SPEC = """
q_heads: 4
kv_heads: 2
head_dim: 16
mask: {causal: bottom_right, left_window: 3}
cache: {growth: concat}
"""
FLAGS = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def build(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["build", *map(str, arguments)])


def op_types(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.mark.skipif(sys.platform == "win32", reason="reads the processor time as POSIX gives it")
def test_a_preset_of_full_width_is_built_in_two_seconds_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "llama.onnx"
    program = "from mha_export.cli import main; main()"
    arguments = ["build", "--preset", "llama-3-8b", "-f", "ort-gqa", "-o", str(path)]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 2.0
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes["hidden_states"] == ["batch", "q_len", 4096]
    assert shapes["w_k"] == [4096, 1024]
    assert op_types(path).count("GroupQueryAttention") == 1


def test_a_file_and_flags_and_a_preset_are_three_ways_to_say_a_spec(tmp_path: Path) -> None:
    source = tmp_path / "spec.yaml"
    source.write_text(SPEC)
    for name, arguments in {
        "file": [source],
        "flags": [*FLAGS, "--causal", "bottom_right", "--left-window", 3],
        "preset": ["--preset", "mistral-7b"],
    }.items():
        path = tmp_path / f"{name}.onnx"
        result = build(*arguments, "--json", "-o", path)
        assert result.exit_code == 0, result.output
        spec = json.loads(result.stdout)["spec"]
        assert (spec["causal"], spec["left_window"] is not None) == ("bottom_right", True)
        assert "Softmax" in op_types(path)


def test_flags_change_a_preset() -> None:
    stated = json.loads(build("--preset", "llama-3-8b", "--softcap", 30, "--json").stdout)["spec"]
    assert (stated["q_heads"], stated["softcap"]) == (32, 30.0)


@pytest.mark.parametrize(
    ("form", "opset", "words"),
    [
        ("onnx", 23, "left_window: said by boolean mask"),
        ("onnx", 25, "all natively"),
        ("ort-gqa", 23, "all natively"),
    ],
)
def test_explain_prints_the_spec_the_verdict_and_the_other_means(
    tmp_path: Path, form: str, opset: int, words: str
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    result = build(tmp_path / "spec.yaml", "-f", form, "--opset", opset, "--explain")
    assert result.exit_code == 0, result.output
    assert "kv_heads: 2" in result.output
    assert f"form: {form}" in result.output
    assert words in result.output


def test_what_a_form_cannot_say_is_refused_with_the_feature(tmp_path: Path) -> None:
    path = tmp_path / "never.onnx"
    refused = build(*FLAGS, "--softcap", 2, "-f", "ort-mha", "-o", path).exception
    assert isinstance(refused, InputError)
    assert "softcap: needs" in str(refused)
    assert not path.exists()


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_of_full_width_is_explained_in_every_form_or_refused(preset: str) -> None:
    for form in all_forms():
        result = build("--preset", preset, "-f", form, "--explain")
        if result.exit_code == 0:
            assert "verdict: supported" in result.output
        else:
            assert isinstance(result.exception, InputError)
            assert "cannot state" in str(result.exception)


def test_without_a_file_it_says_that_nothing_was_written() -> None:
    result = build(*FLAGS)
    assert result.exit_code == 0
    assert "nothing was written" in result.output
    assert "nothing was written" not in build(*FLAGS, "--explain").output
