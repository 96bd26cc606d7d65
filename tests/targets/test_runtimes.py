"""The targets that run everywhere: cpu, reference, openvino, through the same protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import TargetUnavailableError
from mha_export.targets import (
    Available,
    CompileOptions,
    EvaluationError,
    Program,
    TargetWorker,
    WorkerEvaluator,
    evaluator_of,
    target_named,
)
from mha_export.targets._ort import clash_among
from mha_export.targets._ort_profile import placement_of

HERE = ["cpu", "reference", "openvino"]

PLAIN = """
<ir_version: 10, opset_import: ["": 23]>
plain (float[b, s, 16] x) => (float[b, s, 16] y, int64[3] shape)
<float[16, 16] w = {%s}>
{
    q = MatMul(x, w)
    h = Attention<q_num_heads = 4, kv_num_heads = 4>(q, x, x)
    y = Add(h, x)
    shape = Shape(y)
}
"""


ONE_NODE = """
<ir_version: 10, opset_import: ["": 18, "mine": 1]>
g (%s[n] a) => (%s[n] b) { b = %s(a) }
"""


def _weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)


def _plain() -> onnx.ModelProto:
    return onnx.parser.parse_model(PLAIN % ", ".join(f"{x:.9g}" for x in _weights().ravel()))


def _expected(x: np.ndarray) -> np.ndarray:
    """Float64 attention of 4 heads of 4, written without the package."""
    x64 = x.astype(np.float64)
    split = lambda a: a.reshape(*a.shape[:2], 4, 4).swapaxes(1, 2)  # noqa: E731
    q, k = split(x64 @ _weights().astype(np.float64)), split(x64)
    scores = q @ k.swapaxes(-1, -2) / 2.0
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True)) @ k
    return out.swapaxes(1, 2).reshape(x.shape) + x64


@pytest.fixture
def program(tmp_path: Path) -> Program:
    path = tmp_path / "plain.onnx"
    onnx.save(_plain(), path)
    return Program(graphs={"main": path})


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)


@pytest.mark.parametrize("name", HERE)
def test_compile_load_run_time_placement(name, program, x, tmp_path) -> None:
    options = CompileOptions(threads=1, workdir=tmp_path / "built")
    artifact = target_named(name).compile(program, options)
    assert artifact.files
    assert all(path.is_file() for path in artifact.files)
    assert artifact.compile_ms > 0
    session = artifact.load()
    outputs = session.run({"x": x})
    assert list(outputs) == ["y", "shape"]
    np.testing.assert_allclose(outputs["y"], _expected(x), atol=2e-5)
    np.testing.assert_array_equal(outputs["shape"], x.shape)
    assert len(session.time({"x": x}, repeats=4, warmup=1)) == 4
    placement = session.placement()
    assert placement.float_compute_nodes >= 3
    assert placement.complete
    assert placement.evidence


@pytest.mark.parametrize("name", ["cpu", "openvino"])
def test_an_artifact_loads_again_after_its_source_is_gone(name, program, x, tmp_path) -> None:
    options = CompileOptions(threads=1, workdir=tmp_path / "built")
    artifact = target_named(name).compile(program, options)
    program.graphs["main"].unlink()
    np.testing.assert_allclose(artifact.load().run({"x": x})["y"], _expected(x), atol=2e-5)


@pytest.mark.parametrize("name", HERE)
def test_a_missing_input_is_named(name, program, x) -> None:
    session = target_named(name).compile(program, CompileOptions(threads=1)).load()
    with pytest.raises(ValueError, match="no array for input"):
        session.run({"z": x})


@pytest.mark.parametrize("name", HERE)
def test_external_weights(name, x, tmp_path) -> None:
    path = tmp_path / "external.onnx"
    ir.save(ir.from_proto(_plain()), path, external_data="weights.bin", size_threshold_bytes=16)
    assert (tmp_path / "weights.bin").stat().st_size >= 1024
    program = Program(graphs={"main": path})
    options = CompileOptions(threads=1, workdir=tmp_path / "built")
    session = target_named(name).compile(program, options).load()
    np.testing.assert_allclose(session.run({"x": x})["y"], _expected(x), atol=2e-5)
    evaluator = evaluator_of(name)
    outputs = evaluator.run(ir.load(path), {"x": x})
    np.testing.assert_allclose(outputs["y"], _expected(x), atol=2e-5)


def test_two_graphs_of_a_program_are_two_sessions(tmp_path, x) -> None:
    paths = {}
    for role, op in (("prefill", "Neg"), ("decode", "Abs")):
        text = ONE_NODE % ("float", "float", op)
        paths[role] = tmp_path / f"{role}.onnx"
        onnx.save(onnx.parser.parse_model(text), paths[role])
    a = np.array([-2.0, 3.0], np.float32)
    with TargetWorker("cpu") as worker:
        worker.compile(Program(graphs=paths)).unwrap()
        np.testing.assert_array_equal(worker.run({"a": a}, "prefill").unwrap()["b"], -a)
        np.testing.assert_array_equal(worker.run({"a": a}, "decode").unwrap()["b"], abs(a))


def test_the_cpu_artifact_is_the_optimised_model_and_its_weights(program, tmp_path) -> None:
    options = CompileOptions(threads=3, workdir=tmp_path / "built")
    artifact = target_named("cpu").compile(program, options)
    names = sorted(path.name for path in artifact.files)
    assert names == ["main.ort-optimised.onnx", "main.ort-optimised.onnx.data"]
    assert artifact.setup.optimise is False, "loading must not optimise again"
    assert artifact.notes == {"threads": "3", "spinning": "off"}


@pytest.mark.parametrize(("precision", "bound"), [("f32", 2e-5), ("bf16", 0.2)])
def test_openvino_runs_in_the_precision_it_was_told(precision, bound, program, x) -> None:
    """On a processor with AMX the runtime would choose bf16 by itself."""
    options = CompileOptions(precision=precision, threads=1)
    artifact = target_named("openvino").compile(program, options)
    assert artifact.settings["INFERENCE_PRECISION_HINT"] == precision
    assert artifact.notes["precision"] == precision
    session = artifact.load()
    np.testing.assert_allclose(session.run({"x": x})["y"], _expected(x), atol=bound)
    assert f"hint {precision}" in session.placement().evidence


@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_openvino_says_so_where_it_takes_the_other_half(precision, program, x) -> None:
    options = CompileOptions(precision=precision, threads=1)
    session = target_named("openvino").compile(program, options).load()
    session.run({"x": x})
    (other,) = {"f16", "bf16"} - {precision}
    found = session.placement()
    assert found.complete is (f" in {other}" not in found.evidence)
    assert all(f"in {other}, not {precision}" in node for node in found.elsewhere)


def test_openvino_is_told_f32_where_nothing_is_asked(program) -> None:
    artifact = target_named("openvino").compile(program, CompileOptions(threads=1))
    assert artifact.settings["INFERENCE_PRECISION_HINT"] == "f32"


PORTABLE = """
<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
portable (float[2, 3] x, float[3] y) => (float[2, 3] a, float[2, 3] b)
{
    a = com.microsoft.Fused<gain = 3.0>(x, y)
    b = com.microsoft.Fused(x)
}
<domain: "com.microsoft", opset_import: ["": 21]>
Fused<gain: float = 2.0>(x, y) => (out)
{
    g = Constant<value_float: float = @gain>()
    out = Mul(x, g)
}
"""


def test_reference_runs_functions_with_omitted_inputs_and_default_attributes() -> None:
    """onnx's evaluator alone refuses both; the ``portable`` file needs both."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    model = ir.from_proto(onnx.parser.parse_model(PORTABLE))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    outputs = evaluator_of("reference").run(model, {"x": x, "y": x[0]})
    np.testing.assert_array_equal(outputs["a"], 3 * x)
    np.testing.assert_array_equal(outputs["b"], 2 * x)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


BF16 = """
<ir_version: 10, opset_import: ["": 23]>
g (bfloat16[b, s, 16] x) => (bfloat16[b, s, 16] y)
{ y = Attention<q_num_heads = 4, kv_num_heads = 4>(x, x, x) }
"""


@pytest.mark.parametrize("name", ["reference", "openvino"])
def test_bfloat16_goes_in_and_out(name, x) -> None:
    x16 = x.astype(ml_dtypes.bfloat16)
    (y,) = evaluator_of(name).run(ir.from_proto(onnx.parser.parse_model(BF16)), {"x": x16}).values()
    assert y.dtype == ml_dtypes.bfloat16
    (exact,) = (
        evaluator_of("reference")
        .run(
            ir.from_proto(onnx.parser.parse_model(BF16.replace("bfloat16", "double"))),
            {"x": x16.astype(np.float64)},
        )
        .values()
    )
    np.testing.assert_allclose(y.astype(np.float64), exact, atol=0.05)


def test_bfloat16_passes_through_onnx_runtime() -> None:
    text = ONE_NODE % ("bfloat16", "bfloat16", "Identity")
    a = np.array([1.5, -3.25, 1e30], ml_dtypes.bfloat16)
    (b,) = evaluator_of("cpu").run(ir.from_proto(onnx.parser.parse_model(text)), {"a": a}).values()
    assert b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(b.astype(np.float32), a.astype(np.float32))


BAD = ONE_NODE % ("float", "float", "mine.Nothing")


@pytest.mark.parametrize("name", HERE)
def test_a_model_that_does_not_load_is_an_evaluation_error_in_the_runtimes_words(name) -> None:
    model = ir.from_proto(onnx.parser.parse_model(BAD))
    evaluator = evaluator_of(name)
    with pytest.raises(EvaluationError, match="Nothing") as caught:
        evaluator.run(model, {"a": np.zeros(2, np.float32)})
    assert evaluator.name in str(caught.value)


@pytest.mark.parametrize("name", HERE)
def test_an_evaluator_says_which_runtime_it_is(name) -> None:
    version = target_named(name).availability().version
    assert version is not None
    assert version in evaluator_of(name).name
    assert evaluator_of(name).name.startswith(name)


def test_risky_targets_are_evaluated_in_one_worker_for_all_models(x) -> None:
    evaluator = evaluator_of("openvino")
    assert isinstance(evaluator, WorkerEvaluator)
    model = ir.from_proto(_plain())
    first = evaluator.run(model, {"x": x})["y"]
    pid = evaluator._worker.pid
    np.testing.assert_array_equal(evaluator.run(model, {"x": x})["y"], first)
    assert evaluator._worker.pid == pid
    evaluator.close()


def test_a_worker_without_a_program_says_so() -> None:
    with TargetWorker("cpu") as worker, pytest.raises(RuntimeError, match="call compile first"):
        worker.run({})


def test_a_worker_that_died_loads_the_artifact_again(program, x) -> None:
    with TargetWorker("cpu") as worker:
        worker.compile(program, CompileOptions(threads=1)).unwrap()
        first = worker.run({"x": x}).unwrap()["y"]
        process = worker._worker._process
        assert process is not None
        process.kill()
        process.wait()
        np.testing.assert_array_equal(worker.run({"x": x}).unwrap()["y"], first)
        folder = worker._folder
        assert folder is not None
    assert not folder.exists(), "files compiled into a folder of ours are removed"


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        ({"onnxruntime", "onnxruntime-gpu", "numpy"}, "pip install onnxruntime-gpu"),
        ({"onnxruntime", "onnxruntime-directml"}, "pip install onnxruntime-directml"),
        ({"onnxruntime-gpu"}, None),
        ({"onnxruntime", "onnxruntime-ep-webgpu", "onnxruntime-extensions"}, None),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_distributions_that_overwrite_each_other_are_found(names, fix) -> None:
    found = clash_among(names)
    if fix is None:
        assert found is None
        return
    assert found is not None
    assert "installed over each other" in found[0]
    assert found[1].startswith("pip uninstall -y onnxruntime ")
    assert found[1].endswith(fix)


def test_a_clash_makes_the_target_unavailable_with_the_repair(monkeypatch) -> None:
    from mha_export.targets import _ort

    monkeypatch.setattr(_ort, "clash", lambda: ("both are installed", "pip uninstall"))
    state = target_named("cpu").availability().run
    assert not isinstance(state, Available)
    assert state.to_json() == {
        "status": "unavailable",
        "reason": "both are installed",
        "fix": "pip uninstall",
    }


def test_a_runtime_that_is_not_installed_is_an_exit_3_error(program, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(TargetUnavailableError) as caught:
        target_named("cpu").compile(program, CompileOptions())
    assert caught.value.exit_code == 3
    assert "mha-export[cpu]" in str(caught.value.fix)


def _event(name: str, op: str, provider: str, *types: str) -> dict[str, Any]:
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "args": {
            "op_name": op,
            "provider": provider,
            "output_type_shape": [{kind: [1]} for kind in types],
        },
    }


def _cast(name: str, before: str, after: str) -> dict[str, Any]:
    event = _event(name, "Cast", "CPUExecutionProvider", after)
    event["args"]["input_type_shape"] = [{before: [1]}]
    return event


def test_placement_counts_float_compute_and_names_what_fell_back() -> None:
    events = [
        _event("mm", "MatMul", "WebGpu", "float"),
        _event("mm", "MatMul", "WebGpu", "float"),  # a second run of the same node
        _event("soft", "Softmax", "CPUExecutionProvider", "float16"),
        _event("shape", "Shape", "CPUExecutionProvider", "int64"),
        _event("view", "Reshape", "CPUExecutionProvider", "float"),
        _event("add", "Add", "CPUExecutionProvider", "int64"),
        _event("greater", "Greater", "WebGpu", "bool"),
        _event("copy", "MemcpyToHost", "WebGpu", "float"),
        _cast("positions", "int64", "float"),
        _cast("narrow", "float", "float16"),
        {"cat": "Session", "name": "model_run", "args": {}},
    ]
    placement = placement_of(json.loads(json.dumps(events)), provider="WebGpu")
    assert (placement.float_compute_nodes, placement.on_target) == (3, 1)
    assert (placement.other_nodes, placement.other_on_target) == (5, 1)
    assert placement.elsewhere == (
        "soft (Softmax) -> CPUExecutionProvider",
        "narrow (Cast) -> CPUExecutionProvider",
    )
    assert not placement.complete
