"""Defects of runtimes that the probes must find by themselves.

The table pins versions: a runtime of another version is a new row, written after looking at what it
does. So a broken probe cannot pass by agreeing with itself.
"""

from __future__ import annotations

import pytest

from mha_export.spec import DType
from mha_export.targets import Worker, target_named
from mha_export.targets._capabilities import shipped
from mha_export.targets._operator_probes import GQA, MHA, ONNX, operator_probes
from mha_export.targets._probe import probe_one
from mha_export.targets._probe_cases import form_probes

OK, WRONG, FALLBACK = "ok", "wrong", "fallback"
AT_LOAD, AT_RUN = "unsupported-at-load", "unsupported-at-run"

EXPECTED = {
    ("cpu", "1.32.0"): {
        (MHA, "key_padding_mask"): OK,
        (MHA, "unidirectional"): OK,
        (GQA, "softcap"): OK,
        (GQA, "past"): OK,
        (ONNX, "past_is_causal"): OK,
        (ONNX, "nonpad_kv_seqlen"): OK,
        (ONNX, "left_window_size"): OK,
        ("onnx", "rotary_half"): OK,
    },
    ("reference", "1.23.2"): {
        (MHA, "plain"): AT_LOAD,
        (ONNX, "past_is_causal"): OK,
        (ONNX, "softcap"): OK,
        (ONNX, "left_window_size"): OK,
    },
    ("openvino", "2026.4.0"): {
        (GQA, "past"): OK,
        (GQA, "softcap"): AT_LOAD,
        (GQA, "prompt"): AT_LOAD,
        (GQA, "fixed_past"): WRONG,
        (MHA, "key_padding_mask"): OK,
        (ONNX, "past_is_causal"): OK,
        (ONNX, "left_window_size"): WRONG,
        ("onnx", "rotary_half"): OK,
    },
    ("webgpu", "0.4.0 (onnxruntime 1.32.0)"): {
        # On SwiftShader; from 32 queries on these take another kernel, which is wrong there.
        (GQA, "prompt"): WRONG,
        (GQA, "softcap"): WRONG,
        (MHA, "plain"): WRONG,
        (MHA, "attention_bias"): WRONG,
        (MHA, "key_padding_mask"): AT_RUN,
        (ONNX, "plain"): FALLBACK,
        ("primitive", "plain"): OK,
    },
    ("tract", "0.23.9"): {
        (MHA, "plain"): OK,
        (MHA, "unidirectional"): WRONG,
        # A query that may see none of the first 32 keys is NaN.
        ("ort-gqa", "left_window"): WRONG,
        ("ort-gqa", "causal"): OK,
        (ONNX, "plain"): OK,
        (ONNX, "past_is_causal"): WRONG,
        (ONNX, "softcap"): AT_LOAD,
    },
    ("node", "1.30.0"): {
        (MHA, "key_padding_mask"): OK,
        (GQA, "softcap"): OK,
        (ONNX, "past_is_causal"): OK,
    },
    ("wasm", "1.30.0"): {
        (MHA, "key_padding_mask"): OK,
        (GQA, "past"): OK,
        (GQA, "fixed_past"): AT_LOAD,
    },
}
LAB = {
    ("directml", "1.30.0 (DirectML 1.15.4)"): {
        (MHA, "plain"): OK,
        (MHA, "attention_bias"): OK,
        (MHA, "unidirectional"): WRONG,
        (GQA, "prompt"): OK,
        (GQA, "softcap"): WRONG,
        (GQA, "local_window_size"): WRONG,
        (GQA, "attention_bias"): WRONG,
        (GQA, "head_sink"): WRONG,
        ("ort-mha", "padding"): OK,
        ("ort-mha", "causal"): OK,
        ("primitive", "plain"): OK,
    },
}
"""DirectML: minutes where its lab is, and in the shipped matrix everywhere."""
BUILT = {
    ("tensorrt-rtx", "1.7.1.116"): {
        (ONNX, "plain"): OK,
        (ONNX, "nonpad_kv_seqlen"): WRONG,
        (ONNX, "past_is_causal"): AT_LOAD,
        (ONNX, "softcap"): AT_LOAD,
        (GQA, "prompt"): AT_LOAD,
        (MHA, "plain"): OK,
    },
}


def _found(target: str, wanted: set[tuple[str, str]], dtype: DType) -> dict[tuple[str, str], str]:
    asked = target_named(target)
    opset = asked.max_opset
    forms = [form for form, _ in wanted if "." not in form]
    probes = [
        *operator_probes(dtype, max_opset=opset),
        *form_probes(dtype, max_opset=opset, forms=forms, told=asked.form_options),
    ]
    with Worker() as worker:
        return {
            (one.form, one.feature): probe_one(worker, target, None, one).state
            for one in probes
            if (one.form, one.feature) in wanted
        }


def _rows(table: dict, target: str) -> dict[tuple[str, str], str]:
    version = target_named(target).availability().version
    rows = table.get((target, version))
    if rows is None:
        pytest.fail(f"{target} {version} has no row: look at what it does, then add one")
    return rows


@pytest.mark.parametrize("target", [name for name, _ in EXPECTED])
def test_the_probes_find_what_is_known(target, needs_target) -> None:
    needs_target(target)
    rows = _rows(EXPECTED, target)
    assert _found(target, set(rows), DType.FP32) == rows


@pytest.mark.slow
def test_the_probes_find_what_is_known_of_directml(needs_target) -> None:
    needs_target("directml")
    rows = _rows(LAB, "directml")
    assert _found("directml", set(rows), DType.FP32) == rows


@pytest.mark.parametrize(
    ("target", "version"),
    [
        *EXPECTED,
        *LAB,
        *BUILT,
    ],
)
def test_the_shipped_matrix_says_what_is_known(target, version) -> None:
    matrix = shipped(target)
    assert matrix is not None
    assert matrix.version == version
    rows = (EXPECTED | LAB | BUILT)[target, version]
    assert {cell: matrix.state(*cell, "fp32") for cell in rows} == rows


def test_an_ahead_of_time_build_shows_what_the_engine_ignores(needs_target) -> None:
    needs_target("tensorrt-rtx", to_run=False)
    rows = _rows(BUILT, "tensorrt-rtx")
    assert _found("tensorrt-rtx", set(rows), DType.FP16) == rows
