"""``grouped``: a decode step by step, the cache in place, the queries of a group as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from runtimes import OrtSession, ReferenceSession, compare, mistakes
from strategies import attention_specs

from mha_export.cases import cases
from mha_export.feeds import feeds, merge_heads, oracle_outputs
from mha_export.forms import FormParams, Unsupported, build_model, form_named
from mha_export.forms import grouped as module
from mha_export.forms._grouping import Groups
from mha_export.oracle import OracleInputs, attention
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkOutput,
)

BOTTOM_RIGHT = CausalAlignment.BOTTOM_RIGHT
FORM = form_named("grouped")
CAUSAL = MaskSpec(causal=BOTTOM_RIGHT)
WRITES = [(24, "TensorScatter"), (23, "ScatterElements"), (13, "ScatterElements")]
LENGTH = 12


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 6, "kv_heads": 2, "head_dim": 8, "mask": CAUSAL} | fields)


def _static(**cache: Any) -> AttentionSpec:
    return _spec(q_len=1, cache=CacheSpec(**{"growth": "static", "max_length": LENGTH} | cache))


def _model(spec: AttentionSpec, *, opset: int = 18) -> ir.Model:
    return build_model(FORM, spec, FormParams(opset=opset))


def _types(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def _tokens(steps: int, *, batch: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [b, heads, steps, d] of a whole sequence."""
    rng = np.random.default_rng(4)
    query, key, value = (
        rng.standard_normal((batch, heads, steps, 8)).astype(np.float32) for heads in (6, 2, 2)
    )
    return query, key, value


def _whole(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The causal attention of the sequence at once, by the oracle."""
    spec = _spec(q_len="s", kv_len="s")
    return attention(spec, OracleInputs(query=query, key=key, value=value)).output


def _at(x_bhsd: np.ndarray, step: int) -> np.ndarray:
    return np.ascontiguousarray(merge_heads(x_bhsd[:, :, step : step + 1]))


def test_a_loop_that_concatenates_is_the_whole_attention() -> None:
    query, key, value = _tokens(7)
    expected = _whole(query, key, value)
    session = OrtSession(_model(_spec(q_len=1, cache=CacheSpec())))
    past = {name: np.zeros((2, 2, 0, 8), np.float32) for name in ("past_key", "past_value")}
    for step in range(7):
        given_ = {"query": _at(query, step), "key": _at(key, step), "value": _at(value, step)}
        found = session.run(given_ | past)
        np.testing.assert_allclose(found["output"], _at(expected, step), rtol=1e-5, atol=1e-6)
        past = {"past_key": found["present_key"], "past_value": found["present_value"]}
    np.testing.assert_array_equal(past["past_key"], key)


@pytest.mark.parametrize(("opset", "write"), WRITES)
def test_a_loop_in_one_buffer_is_the_whole_attention(opset: int, write: str) -> None:
    """The same memory is bound as past and present: nothing is copied, nothing else is touched."""
    model = _model(_static(), opset=opset)
    assert _types(model).count(write) == 2
    query, key, value = _tokens(LENGTH)
    expected = _whole(query, key, value)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    junk = 1e30  # what lies beyond the lengths must not be seen
    buffers = {
        name: ort.OrtValue.ortvalue_from_numpy(np.full((2, 2, LENGTH, 8), junk, np.float32))
        for name in ("key", "value")
    }
    for step in range(LENGTH):
        binding = session.io_binding()
        binding.bind_output("output")
        for name, array in (("query", query), ("key", key), ("value", value)):
            binding.bind_cpu_input(name, _at(array, step))
        binding.bind_cpu_input("kv_lengths", np.full(2, step + 1, np.int64))
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(f"past_{name}", buffer)
            binding.bind_ortvalue_output(f"present_{name}", buffer)
        session.run_with_iobinding(binding)
        output = binding.get_outputs()[0].numpy()
        np.testing.assert_allclose(output, _at(expected, step), rtol=1e-5, atol=1e-6)
        for name, whole in (("key", key), ("value", value)):
            held = buffers[name].numpy()
            np.testing.assert_array_equal(held[:, :, : step + 1], whole[:, :, : step + 1])
            assert (held[:, :, step + 1 :] == np.float32(junk)).all()


@pytest.mark.parametrize("opset", [24, 18])
def test_the_present_is_the_whole_buffer(opset: int) -> None:
    model = _model(_static(growth="shared_buffer"), opset=opset)
    shapes = {value.name: list(value.shape) for value in model.graph.outputs}
    inputs = {value.name: list(value.shape) for value in model.graph.inputs}
    assert shapes["present_key"] == inputs["past_key"]
    assert inputs["past_key"][2] == LENGTH


def test_rows_of_a_batch_have_lengths_of_their_own() -> None:
    spec = _static()
    session = OrtSession(_model(spec, opset=24))
    case = next(iter(cases(spec, battery="quick", dims={"batch": 3})))
    inputs = case.inputs.replace(kv_lengths=np.array([1, 7, LENGTH]))
    wrong = mistakes(spec, session, dataclasses.replace(case, inputs=inputs))
    assert not wrong, str(wrong[0])


def test_the_queries_of_a_group_are_rows() -> None:
    """One product a key/value head, the cache neither repeated nor moved."""
    for spec in (_static(), _spec(q_len=1, cache=CacheSpec())):
        model = _model(spec, opset=24)
        assert not {"Expand", "Tile"} & set(_types(model))
        (first, _) = (node for node in model.graph if node.op_type == "MatMul")
        rows = first.inputs[0].producer()
        assert rows.op_type == "Reshape"
        assert list(rows.inputs[1].const_value.numpy()) == [0, 2, -1, 8]
        turned = [node for node in model.graph if node.op_type == "Transpose"]
        cache = {"present_key", "present_value"}
        moved = [node for node in turned if node.inputs[0].name in cache]
        # Runtimes fold the swap of the last two axes into the product.
        assert [list(node.attributes["perm"].as_ints()) for node in moved] == [[0, 1, 3, 2]]


@pytest.mark.parametrize(
    ("spec", "compares"),
    [
        (_spec(q_len=1, cache=CacheSpec()), 0),
        (_static(), 0),
        (_spec(q_len="s", cache=CacheSpec()), 1),
        (_spec(q_len=1, kv_len=9, cache=CacheSpec()), 1),
        (_spec(q_len=1, kv_len="t"), 1),
        (_spec(q_len=1, cache=CacheSpec(), mask=MaskSpec(causal=CausalAlignment.TOP_LEFT)), 1),
    ],
    ids=["concat", "static", "many-queries", "open-new-length", "no-cache", "top-left"],
)
def test_one_query_at_the_end_needs_no_diagonal(spec: AttentionSpec, compares: int) -> None:
    assert _types(_model(spec)).count("LessOrEqual") == compares
    for case in cases(spec, battery="ordinary"):
        wrong = mistakes(spec, OrtSession(_model(spec)), case)
        assert not wrong, str(wrong[0])


@pytest.mark.parametrize(
    "policy", [EmptyRow.ZERO, EmptyRow.NAN, EmptyRow.UNIFORM], ids=lambda policy: policy.value
)
@pytest.mark.parametrize("fill", ["-inf", "min"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=["fp32", "fp16"])
def test_rows_without_a_key(fill: Any, policy: EmptyRow, dtype: DType) -> None:
    mask = MaskSpec(padding=True, fill=fill, empty_row=policy)
    spec = _spec(q_len="s", kv_len="s", mask=mask, io_dtype=dtype)
    case = next(iter(cases(spec, battery="quick", dims={"batch": 2, "q_len": 5})))
    padding = np.array([[1, 0, 1, 1, 0], [0] * 5])
    case = dataclasses.replace(case, inputs=case.inputs.replace(key_padding=padding))
    wrong = mistakes(spec, OrtSession(_model(spec)), case)
    assert not wrong, str(wrong[0])


def test_an_absorbing_fill_needs_no_pass_over_the_values() -> None:
    """The mean of an empty row comes of the softmax, not of a second read of the cache."""
    mask = MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM)
    assert "ReduceMean" not in _types(_model(_spec(mask=mask)))
    apart = MaskSpec(padding=True, fill="-inf", empty_row=EmptyRow.UNIFORM)
    assert "ReduceMean" in _types(_model(_spec(mask=apart)))


def test_a_sink_does_not_copy_the_values() -> None:
    model = _model(_static().replace(sinks=True), opset=24)
    readers = [use.node.op_type for value in model.graph.outputs for use in value.uses()]
    assert sorted(readers) == ["MatMul", "Transpose"]


@pytest.mark.parametrize("opset", [18, 24])
def test_what_is_said_around_the_products(opset: int) -> None:
    verdict = FORM.supports(_static(), FormParams(opset=opset))
    assert verdict
    write = "TensorScatter" if opset == 24 else "ScatterElements"
    assert verdict.by_other_means == {"cache": write}


def test_refusals() -> None:
    scores = FORM.supports(_spec(qk_output=QkOutput.RAW), FormParams(opset=18))
    assert isinstance(scores, Unsupported)
    assert scores.feature == "qk_output"
    old = FORM.supports(_spec(), FormParams(opset=12))
    assert isinstance(old, Unsupported)
    assert old.feature == "opset"


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=attention_specs(without=("projections", "qk_output")))
def test_any_spec(spec: AttentionSpec) -> None:
    spec = spec.replace(io_dtype=DType.FP32, softmax_dtype=None)
    if not FORM.supports(spec, FormParams(opset=24)):
        return
    session = OrtSession(_model(spec, opset=24))
    for case in cases(spec, battery="quick"):
        wrong = mistakes(spec, session, case)
        assert not wrong, str(wrong[0])


RUNS = {
    "concat": (_spec(cache=CacheSpec()), 18),
    "static": (_spec(cache=CacheSpec(growth="static")), 18),
    "sinks": (_spec(sinks=True, cache=CacheSpec()), 18),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_reference_evaluator_agrees(name: str) -> None:
    spec, opset = RUNS[name]
    session = ReferenceSession(_model(spec, opset=opset))
    for case in cases(spec, battery="quick"):
        wrong = mistakes(spec, session, case)
        assert not wrong, str(wrong[0])


@pytest.mark.parametrize("name", RUNS)
def test_openvino_agrees(name: str, openvino_run: Callable[..., dict]) -> None:
    spec, opset = RUNS[name]
    model = _model(spec, opset=opset)
    for case in cases(spec, battery="quick"):
        outputs = openvino_run(model, feeds(spec, case.inputs))
        wrong = list(compare(spec, case, oracle_outputs(spec, outputs)))
        assert not wrong, f"{case.name}: {wrong[0]}"


# Planted bugs


def _tiled(queries: Callable) -> Callable:
    """[b, h, s, d] as [b, g, k, s, d]: heads tile where they interleave."""

    def planted(self: Groups, q_bhsd: ir.Value) -> ir.Value:
        k, g = self.spec.kv_heads, self.spec.group
        apart = self._reshape(q_bhsd, 0, g, k, -1, 8)
        turned = self.scope.op("Transpose", [apart], {"perm": [0, 2, 1, 3, 4]}, dtype=apart.dtype)
        return self._reshape(turned, 0, k, -1, 8)

    return planted


def test_planted_tiled_heads_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _static()
    case = next(iter(cases(spec, battery="quick")))
    assert not mistakes(spec, OrtSession(_model(spec)), case)
    monkeypatch.setattr(Groups, "queries", _tiled(Groups.queries))
    assert mistakes(spec, OrtSession(_model(spec)), case)


def test_planted_dropped_lengths_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _static()
    case = next(iter(cases(spec, battery="quick")))
    lengths = np.full(case.dims["batch"], 5)
    case = dataclasses.replace(case, inputs=case.inputs.replace(kv_lengths=lengths))
    assert not mistakes(spec, OrtSession(_model(spec)), case)
    monkeypatch.setattr(module, "_needed", lambda spec, operands: frozenset())
    assert mistakes(spec, OrtSession(_model(spec)), case)


def test_a_planted_dropped_diagonal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three queries: what holds for one query at the end does not hold for them."""
    spec = _static().replace(q_len=3)
    case = next(iter(cases(spec, battery="quick")))
    assert not mistakes(spec, OrtSession(_model(spec)), case)
    monkeypatch.setattr(module, "_needed", lambda spec, operands: frozenset({"lengths"}))
    assert mistakes(spec, OrtSession(_model(spec)), case)
