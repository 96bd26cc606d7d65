"""Capabilities: features of specs, the matrix and its verdicts, judging what a probe returned."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_export.errors import InputError
from mha_export.feeds import merge_heads
from mha_export.forms import FormParams, all_forms, form_named
from mha_export.oracle import attention
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, DType, MaskSpec
from mha_export.targets import (
    FEATURES,
    Capabilities,
    Capability,
    Outcome,
    Placement,
    all_targets,
    capabilities_for,
    capabilities_from_json,
    features_of,
    probe,
    target_named,
)
from mha_export.targets._capabilities import read_cached, shipped, write_cached
from mha_export.targets._operator_probes import NODES, operator_probes
from mha_export.targets._probe import Findings, _judge, observe
from mha_export.targets._probe_cases import Probe, form_probes


@pytest.mark.parametrize("name", FEATURES)
def test_the_spec_of_a_feature_asks_for_it(name) -> None:
    assert name in features_of(FEATURES[name])


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_stated_by_primitive(name) -> None:
    assert form_named("primitive").supports(FEATURES[name], FormParams(opset=23))


def test_a_plain_spec_asks_for_nothing_else() -> None:
    assert features_of(AttentionSpec(q_heads=2, kv_heads=2, head_dim=8)) == ("plain",)


@pytest.mark.parametrize(
    ("change", "more", "fewer"),
    [
        ({"softcap": 3.0}, {"softcap"}, set()),
        ({"kv_heads": 1}, {"mqa"}, {"gqa"}),
        ({"scale": 0.25}, set(), {"scale"}),  # 1/sqrt(16): stated, but the convention
        ({"scale": 0.5}, {"scale"}, set()),
        ({"cache": CacheSpec(growth="static", max_length=8)}, {"static_cache"}, {"past"}),
        (
            {"mask": MaskSpec(causal=CausalAlignment.TOP_LEFT)},
            {"causal_top_left"},
            {"causal", "causal_past", "causal_bottom_right"},
        ),
        (
            {"mask": MaskSpec(causal=CausalAlignment.TOP_LEFT), "kv_len": "q_len"},
            {"causal"},
            {"causal_top_left"},
        ),
    ],
    ids=lambda value: None if isinstance(value, set) else ",".join(value),
)
def test_features_follow_the_spec(change, more, fewer) -> None:
    asked = set(features_of(AttentionSpec(q_heads=4, kv_heads=4, head_dim=16).replace(**change)))
    assert more <= asked
    assert not fewer & asked


ROWS = (
    Capability(form="ort-gqa", feature="causal", dtype="fp32", state="ok"),
    Capability(form="ort-gqa", feature="softcap", dtype="fp32", state="wrong", message="ignored"),
    Capability(form="ort-gqa", feature="gqa", dtype="fp32", state="imprecise"),
    Capability(form="onnx", feature="plain", dtype="fp32", state="fallback"),
)
MATRIX = Capabilities(target="t", version="1.0", rows=ROWS)
CAUSAL = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    kv_len="q_len",
    mask=MaskSpec(causal=CausalAlignment.TOP_LEFT),
)


@pytest.mark.parametrize(
    ("form", "spec", "says"),
    [
        pytest.param("ort-gqa", CAUSAL, None, id="ok-and-imprecise-may-be-used"),
        pytest.param("ort-gqa", CAUSAL.replace(softcap=1.0), "wrong: ignored", id="wrong"),
        pytest.param("onnx", CAUSAL, "plain in fp32 is fallback", id="fallback"),
        pytest.param("ort-mha", CAUSAL, "not probed", id="form-never-probed"),
        pytest.param("primitive", CAUSAL, None, id="primitive-is-the-last-resort"),
        pytest.param("tiled", CAUSAL, None, id="plain-operators-need-no-probe"),
        pytest.param(
            "ort-gqa", CAUSAL.replace(io_dtype=DType.FP16), "not probed", id="other-dtype"
        ),
    ],
)
def test_a_form_is_refused_by_one_bad_cell(form, spec, says) -> None:
    refusal = MATRIX.refusal(form, spec)
    if says is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert says in refusal


def test_where_nothing_is_known_nothing_is_refused() -> None:
    empty = Capabilities(target="t")
    assert empty.refusal("onnx", CAUSAL) is None
    assert empty.state("onnx", "plain", "fp32") == "not-probed"


def test_a_state_outside_the_contract_is_an_error() -> None:
    with pytest.raises(ValueError, match="'maybe'"):
        Capability(form="onnx", feature="plain", dtype="fp32", state="maybe")  # type: ignore[arg-type]


cells = st.builds(
    Capability,
    form=st.sampled_from(["onnx", "ort-mha"]),
    feature=st.sampled_from(list(FEATURES)),
    dtype=st.sampled_from(["fp32", "fp16"]),
    state=st.sampled_from(["ok", "wrong", "crash"]),
    max_err=st.none() | st.floats(0, 10),
    message=st.none() | st.text(max_size=20),
)


@given(st.lists(cells, max_size=5))
@settings(derandomize=True, max_examples=25, deadline=None)
def test_a_matrix_survives_json(rows) -> None:
    made = Capabilities(target="t", version="1", measured="2026-11-29", rows=tuple(rows))
    document = json.loads(json.dumps(made.to_json()))
    read = capabilities_from_json(document, source="probed here")
    assert read.rows == made.rows
    assert read.to_json() == made.to_json()


def test_the_cache_is_keyed_by_version_and_survives_damage(tmp_path, monkeypatch) -> None:
    import dataclasses

    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    target = target_named("cpu")
    here = target.availability()
    assert read_cached(target, None, here) is None
    write_cached(target, None, here, MATRIX)
    found = read_cached(target, None, here)
    assert found is not None
    assert found.rows == ROWS
    assert found.source == "probed here"
    assert capabilities_for(target).rows == ROWS
    assert read_cached(target, None, dataclasses.replace(here, version="0.0")) is None
    assert read_cached(target, "bf16", here) is None
    for file in (tmp_path / "capabilities").iterdir():
        file.write_text('{"target": ')
    assert read_cached(target, None, here) is None


def _capability_file(path, **row) -> str:
    cells = [cell.to_json() for cell in ROWS]
    document = {"targets": [{"target": "openvino:bf16", "capabilities": cells, **row}]}
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_a_capability_file_comes_before_all_else(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    target = target_named("openvino")
    monkeypatch.setenv(
        "MHA_EXPORT_CAPABILITIES", _capability_file(tmp_path / "caps.json", version="9.9")
    )
    found = capabilities_for(target, "bf16")
    assert (found.source, found.version, found.rows) == ("given", "9.9", ROWS)
    assert found.refusal("ort-gqa", CAUSAL.replace(softcap=1.0)) is not None
    assert capabilities_for(target).source == "shipped", "the file says nothing of f32"


@pytest.mark.parametrize(
    ("target", "precision", "has_it"),
    [
        ("openvino", "f32", True),
        ("openvino", "f16", True),
        ("browser", "wasm", True),
        ("browser", "webgpu", False),
    ],
)
def test_a_precision_has_the_matrix_of_its_target(
    target, precision, has_it, tmp_path, monkeypatch
) -> None:
    """Where it is a number format or the default; another provider is another runtime."""
    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    file = _capability_file(tmp_path / "caps.json", target=target)
    monkeypatch.setenv("MHA_EXPORT_CAPABILITIES", file)
    found = capabilities_for(target_named(target), precision)
    assert (found.source == "given") is has_it


@pytest.mark.parametrize("text", [None, "{", "{}", '{"targets": [{"target": "cpu"}]}'])
def test_a_capability_file_that_is_none_is_bad_input(text, tmp_path, monkeypatch) -> None:
    path = tmp_path / "caps.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("MHA_EXPORT_CAPABILITIES", str(path))
    with pytest.raises(InputError, match=r"caps\.json") as caught:
        capabilities_for(target_named("cpu"))
    assert "doctor -o" in str(caught.value.fix)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MHA_EXPORT_CACHE", str(blocked))
    target = target_named("cpu")
    write_cached(target, None, target.availability(), MATRIX)
    assert read_cached(target, None, target.availability()) is None
    assert blocked.read_text() == ""


def test_an_absent_target_probes_to_an_empty_matrix(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MHA_EXPORT_DIRECTML_LAB", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = probe(target_named("directml"))
    assert found.rows == ()
    assert found.source == "none"


@pytest.mark.parametrize("target", all_targets().values(), ids=lambda target: target.name)
def test_shipped_matrices_are_sound(target) -> None:
    known = set(all_forms())
    for precision in (None, *target.precisions):
        matrix = shipped(target.name, precision)
        if matrix is None:
            continue
        assert matrix.target == target.name
        assert matrix.measured is not None
        assert matrix.version is not None
        assert matrix.rows
        cells = [(row.form, row.feature, row.dtype) for row in matrix.rows]
        assert len(set(cells)) == len(cells)
        for row in matrix.rows:
            assert row.form in known or "." in row.form
            if row.form in known:
                assert row.feature in FEATURES


def test_targets_that_are_seldom_here_have_a_shipped_matrix() -> None:
    for name in ("directml", "tensorrt-rtx", "webgpu", "tract"):
        assert shipped(name) is not None, name


def test_a_probing_that_was_ended_goes_on(tmp_path, monkeypatch) -> None:
    from mha_export.targets import _probe as probing

    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    asked: list[str] = []

    def cell(worker, target, precision, one) -> Capability:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(f"{one.form}/{one.feature}")
        return Capability(form=one.form, feature=one.feature, dtype=one.dtype.value, state="ok")

    monkeypatch.setattr(probing, "probe_one", cell)
    with pytest.raises(KeyboardInterrupt):
        probe(target_named("cpu"), quick=True)
    (kept,) = (tmp_path / "capabilities").iterdir()
    kept.write_text(kept.read_text() + '{"probe": "cut off in mid-', encoding="utf-8")
    first = list(asked)
    asked.clear()
    monkeypatch.setattr(
        probing,
        "probe_one",
        lambda worker, target, precision, one: (
            asked.append(f"{one.form}/{one.feature}")
            or Capability(form=one.form, feature=one.feature, dtype="fp32", state="ok")
        ),
    )
    found = probe(target_named("cpu"), quick=True)
    assert not set(asked) & set(first)
    assert len(found.rows) == len(asked) + 3


# Judging


def _probe(feature: str, form: str = "primitive") -> Probe:
    return next(
        one for one in form_probes(DType.FP32, max_opset=23, forms=[form]) if one.feature == feature
    )


def _ran(*outputs: dict[str, np.ndarray], placement: Placement | None = None) -> Outcome[Findings]:
    findings = Findings(stage="ran", outputs=outputs, placement=placement)
    return Outcome(kind="ok", value=findings)


def _exact(one: Probe, **changes: float) -> list[dict[str, np.ndarray]]:
    outputs = []
    for run in one.runs():
        exact = {name: wanted.copy() for name, _, wanted in run.answer.outputs}
        for name, amount in changes.items():
            exact[name].flat[-1] += amount
        outputs.append({name: array.astype(np.float32) for name, array in exact.items()})
    return outputs


COMPLETE = Placement(float_compute_nodes=3, on_target=3)
PARTIAL = Placement(float_compute_nodes=3, on_target=2, elsewhere=("n (Softmax) -> CPU",))


@pytest.mark.parametrize(
    ("placement", "off", "state"),
    [
        (COMPLETE, 0.0, "ok"),
        (COMPLETE, 1.0, "wrong"),
        (COMPLETE, float("nan"), "wrong"),
        (COMPLETE, 2e-5, "imprecise"),
        (PARTIAL, 0.0, "fallback"),
        (PARTIAL, 1.0, "wrong"),
    ],
)
def test_value_comes_before_placement(placement, off, state) -> None:
    one = _probe("plain")
    outcome = _ran(*_exact(one, output=off), placement=placement)
    assert _judge(outcome, list(one.runs()))[0] == state


def test_a_wrong_cache_output_is_wrong() -> None:
    one = _probe("causal_past")
    outcome = _ran(*_exact(one, present_key=0.5), placement=COMPLETE)
    state, _, message = _judge(outcome, list(one.runs()))
    assert state == "wrong"
    assert message is not None
    assert "present_key" in message


@pytest.mark.parametrize("cut", [1, 16], ids=["no multiple of the heads", "one head less"])
def test_an_output_of_another_width_is_wrong(cut) -> None:
    one = _probe("plain")
    outputs = [{"output": merge_heads(exact["output"])[..., :-cut].copy()} for exact in _exact(one)]
    state, _, message = _judge(_ran(*outputs, placement=COMPLETE), list(one.runs()))
    assert state == "wrong"
    assert "expected [" in str(message)


def _found(**findings: Any) -> Outcome[Findings]:
    return Outcome(kind="ok", value=Findings(**findings))


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome(kind="crash", message="killed by SIGSEGV"), "crash"),
        (Outcome(kind="timeout", message="no answer"), "crash"),
        (Outcome(kind="error", message="the model"), "unsupported-at-load"),
        (
            Outcome(kind="ok", value=Findings(stage="load", message="no kernel")),
            "unsupported-at-load",
        ),
        (Outcome(kind="ok", value=Findings(stage="run", message="threw")), "unsupported-at-run"),
        (Outcome(kind="ok", value=Findings(stage="crash", message="node ended")), "crash"),
        (Outcome(kind="ok", value=Findings(stage="built", placement=COMPLETE)), "ok"),
        (
            Outcome(kind="ok", value=Findings(stage="built", unread=("kv_lengths",))),
            "wrong",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_every_end_has_its_state(outcome, state) -> None:
    one = _probe("plain")
    assert _judge(outcome, list(one.runs()))[0] == state


def test_the_message_of_a_refusal_is_the_line_that_says_something() -> None:
    from mha_export.targets._probe import _first_line

    text = (
        "Exception from src/inference/src/cpp/core.cpp:84:\n"
        "Check 'false' failed at src/frontends/report.cpp:151:\n"
        "FrontEnd API failed with OpConversionFailure:\n"
        "GroupQueryAttention: softcap is not supported.\n"
    )
    assert _first_line(text) == "GroupQueryAttention: softcap is not supported."
    assert _first_line("") == ""


def test_the_message_of_a_refusal_holds_no_address() -> None:
    from mha_export.targets._probe import _first_line

    text = (
        "running Cast node. Name:'Cast_3' Status Message: N:\\_work\\1\\dml\\AuthorImpl.cpp(2591)"
        "\\onnxruntime.dll!00006FFFF9F7C299: (caller: 00006FFFF9F7B93A) Exception(3) tid(24) "
        "80070057 The parameter is incorrect."
    )
    assert _first_line(text) == (
        "running Cast node. Name:'Cast_3' Status Message: 80070057 The parameter is incorrect."
    )


def test_every_operator_probe_can_be_built_and_fed() -> None:
    built = list(operator_probes(DType.FP32, max_opset=25))
    assert len(built) == len(NODES)
    for one in built:
        for run in one.runs():
            feeds = run.feeds()
            for value in one.model.graph.inputs:
                assert value.shape is not None
                assert feeds[str(value.name)].ndim == len(value.shape)
    old = list(operator_probes(DType.FP32, max_opset=22))
    assert not [one for one in old if one.form == "ai.onnx.Attention"]


def test_a_broken_runtime_is_caught_by_the_probes() -> None:
    """Plant a runtime that drops the softcap: the probe must say wrong."""

    one = _probe("softcap")
    outputs = []
    for run in one.runs():
        plain = one.spec.replace(softcap=None)
        exact = attention(plain, run.case.inputs)
        outputs.append({"output": exact.output.astype(np.float32)})
    assert _judge(_ran(*outputs, placement=COMPLETE), list(one.runs()))[0] == "wrong"


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_observe_in_this_process(name) -> None:
    from mha_export.targets._files import model_bytes

    one = _probe("causal")
    runs = list(one.runs())
    found = observe(name, None, model_bytes(one.model), [run.feeds() for run in runs])
    assert found.stage == "ran"
    assert _judge(Outcome(kind="ok", value=found), runs)[0] == "ok"
    bad = observe(name, None, b"not a model", [])
    assert bad.stage == "load"


def test_quick_probing_of_cpu_is_all_ok_and_not_remembered(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MHA_EXPORT_CACHE", str(tmp_path))
    seen: list[str] = []
    found = probe(
        target_named("cpu"), quick=True, progress=lambda cell, done, total: seen.append(cell)
    )
    assert {row.state for row in found.rows} == {"ok"}
    assert len(seen) == len(found.rows)
    assert "primitive/plain/fp32" in seen
    assert found.source == "probed here"
    assert not list(tmp_path.rglob("*.json"))
