"""The JavaScript targets: one Node process per runtime, tensors as files, a real browser."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import TargetUnavailableError
from mha_export.targets import (
    CompileOptions,
    Program,
    TargetWorker,
    Unavailable,
    _node,
    _platform,
    target_named,
)
from mha_export.targets import _javascript as javascript
from mha_export.targets._files import float_nodes, pack

TEXT = """
<ir_version: 10, opset_import: ["": 21]>
g (float[b, n] x, int64[1] k, bool[n] m) => (float[b, n] y, int64[2] s, bool[n] not_m, float[] z)
<float[3] w = {1.0, 2.0, 4.0}>
{
    y = Mul(x, w)
    s = Shape(y)
    not_m = Not(m)
    f = Cast<to = 1>(k)
    z = ReduceSum<keepdims = 0>(f)
}
"""
ONE_NODE = '<ir_version: 10, opset_import: ["": 18]> g (float[n] a) => (float[n] b) { b = %s(a) }'
X = np.arange(6, dtype=np.float32).reshape(2, 3)
FEEDS = {"x": X, "k": np.array([2**40], np.int64), "m": np.array([True, False, True])}


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "g.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return Program(graphs={"main": path})


@pytest.mark.parametrize(
    ("target", "precision"),
    [("node", None), ("wasm", None), ("browser", "wasm"), ("browser", "webgpu")],
)
def test_every_type_travels_both_ways(target, precision, program, needs_target) -> None:
    needs_target(target)
    with TargetWorker(target) as worker:
        worker.compile(program, CompileOptions(precision=precision, threads=1)).unwrap()
        outputs = worker.run(FEEDS).unwrap()
        assert list(outputs) == ["y", "s", "not_m", "z"]
        np.testing.assert_array_equal(outputs["y"], X * [1, 2, 4])
        np.testing.assert_array_equal(outputs["s"], [2, 3])
        np.testing.assert_array_equal(outputs["not_m"], [False, True, False])
        assert outputs["z"].shape == ()
        assert outputs["z"] == np.float32(2**40)
        assert len(worker.time(FEEDS, repeats=3, warmup=1).unwrap()) == 3
        placement = worker.placement().unwrap()
        assert placement.float_compute_nodes >= 1
        missing = worker.run({"x": X})
        assert missing.kind == "error"
        assert "no array for input ['k', 'm']" in missing.reason
        assert worker.run(FEEDS).ok, "an error is not the end of the session"


@pytest.mark.parametrize("target", ["node", "wasm", "browser"])
def test_a_refused_graph_is_told_in_the_runtimes_words_and_spoils_nothing(
    target, tmp_path, program, needs_target
) -> None:
    needs_target(target)
    path = tmp_path / "bad.onnx"
    onnx.save(onnx.parser.parse_model(ONE_NODE % "Nope"), path)
    with TargetWorker(target) as worker:
        worker.compile(program).unwrap()
        worker.run(FEEDS).unwrap()
        worker.compile(Program(graphs={"main": path})).unwrap()
        outcomes = [worker.load() for _ in range(2)]
        worker.compile(program).unwrap()
        worker.run(FEEDS).unwrap()
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert all("Nope" in outcome.reason for outcome in outcomes)


def test_sessions_take_turns_in_one_process(tmp_path, needs_target) -> None:
    needs_target("node")
    paths = {}
    for role, op in (("prefill", "Neg"), ("decode", "Abs")):
        paths[role] = tmp_path / f"{role}.onnx"
        onnx.save(onnx.parser.parse_model(ONE_NODE % op), paths[role])
    a = np.array([-2.0, 3.0], np.float32)
    with TargetWorker("node") as worker:
        worker.compile(Program(graphs=paths)).unwrap()
        for _ in range(2):
            np.testing.assert_array_equal(worker.run({"a": a}, "prefill").unwrap()["b"], -a)
            np.testing.assert_array_equal(worker.run({"a": a}, "decode").unwrap()["b"], abs(a))


def test_external_weights_are_packed_into_one_file(tmp_path) -> None:
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    source = tmp_path / "external.onnx"
    ir.save(model, source, external_data="weights.bin", size_threshold_bytes=0)
    assert (tmp_path / "weights.bin").is_file()
    packed = pack(source, tmp_path / "packed.onnx")
    (tmp_path / "weights.bin").unlink()
    (weight,) = onnx.load(packed).graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight), [1, 2, 4])


def test_float_nodes_are_counted_by_type(tmp_path, program) -> None:
    # Mul, Cast and ReduceSum compute in floating point; Shape and Not do not.
    assert float_nodes(program.graphs["main"]) == 3


def test_an_absent_package_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MHA_EXPORT_NODE", str(tmp_path))
    monkeypatch.setattr(_platform, "find_program", lambda *names: tmp_path / "node")
    for name in ("node", "wasm", "browser"):
        state = target_named(name).availability().run
        assert isinstance(state, Unavailable)
        assert "scripts/setup_targets" in state.fix
        assert str(tmp_path) in state.reason


def test_without_node_the_fix_is_node(tmp_path, monkeypatch) -> None:
    package = tmp_path / "node_modules" / "onnxruntime-node"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "9.9.9"}))
    monkeypatch.setenv("MHA_EXPORT_NODE", str(tmp_path))
    monkeypatch.setattr(_platform, "find_program", lambda *names: None)
    availability = target_named("node").availability()
    assert availability.version == "9.9.9"
    assert isinstance(availability.run, Unavailable)
    assert "Node.js" in availability.run.fix
    with pytest.raises(TargetUnavailableError):
        _node.NodeProcess("node")


LOG = """
2026-11-29 [V:onnxruntime:, session_state.cc] Node placements
2026-11-29 [V:onnxruntime:, session_state.cc]  Node(s) placed on [WebGpuExecutionProvider]. Number of nodes: 3
2026-11-29 [V:onnxruntime:, session_state.cc]   MatMul (mm)
2026-11-29 [V:onnxruntime:, session_state.cc]   MemcpyFromHost (Memcpy)
2026-11-29 [V:onnxruntime:, session_state.cc]   Add (add)
2026-11-29 [V:onnxruntime:, session_state.cc]  Node(s) placed on [CPUExecutionProvider]. Number of nodes: 2
2026-11-29 [V:onnxruntime:, session_state.cc]   Attention (attn)
2026-11-29 [V:onnxruntime:, session_state.cc]   Shape (shape)
"""  # noqa: E501


def test_the_log_of_node_placements_is_read() -> None:
    placement = javascript.webgpu_placement(LOG.splitlines(), {})
    assert placement.on_target == 2
    assert placement.elsewhere == ("attn (Attention) -> CPUExecutionProvider",)
    assert placement.float_compute_nodes == 3
    assert (placement.other_nodes, placement.other_on_target) == (1, 0)


@pytest.mark.parametrize(("computes", "complete"), [(True, False), (False, True)])
def test_a_node_that_makes_integers_may_be_elsewhere(computes, complete) -> None:
    placement = javascript.webgpu_placement(LOG.splitlines(), {"attn": computes, "mm": False})
    assert placement.complete is complete
    assert placement.on_target == 2
    assert placement.other_nodes == (1 if computes else 2)


@pytest.mark.parametrize(
    ("provider", "on_target"), [("WebGpuExecutionProvider", 4), ("CPUExecutionProvider", 0)]
)
def test_all_nodes_in_one_place(provider, on_target) -> None:
    line = f"[V]  All nodes placed on [{provider}]. Number of nodes: 4"
    placement = javascript.webgpu_placement([line], {})
    assert placement.on_target == on_target
    assert placement.complete is (on_target == 4)


def test_a_log_without_placements_proves_nothing() -> None:
    placement = javascript.webgpu_placement(["hello"], {})
    assert placement.float_compute_nodes == 0
    assert "no node placements" in placement.evidence
