"""TensorRT: reading the builder's report of layers, ranges of dimensions, and a real build."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from mha_export.targets import (
    Available,
    CannotRun,
    CompileOptions,
    Program,
    target_named,
)
from mha_export.targets._tensorrt import dimension_range
from mha_export.targets._tensorrt_layers import parse_layers

REPORT = """Layers:
Name: __myl_Resh_myl0_1, LayerType: kgen, Inputs: [ { Name: k, Dimensions: [-1,4,-1,16], Datatype: Half }], Constants: [], Outputs: [ { Name: __r, Datatype: Half }], TacticName: a
Name: _gemm_mha_v2_myl0_2, LayerType: kgen, Inputs: [ { Name: q, Dimensions: [1] }, { Name: __r, Dimensions: [1] }, { Name: v, Dimensions: [1] }], Constants: [], Outputs: [ { Name: y, Datatype: Half }], TacticName: b

I/O Tensors:
 Name: q, IOMode: Input, DataType: Half
 Name: lengths, IOMode: Input, DataType: Int64
"""  # noqa: E501


def test_a_report_is_read() -> None:
    layers = parse_layers(REPORT)
    assert layers.names == ("__myl_Resh_myl0_1", "_gemm_mha_v2_myl0_2")
    assert layers.fused == ("_gemm_mha_v2_myl0_2",)
    assert layers.unread(("q", "k", "v", "lengths")) == ("lengths",)
    assert layers.unread(("past",), {"past": "__r"}) == (), "read under its output's name"
    assert layers.unread(("past",), {"past": "elsewhere"}) == ("past",)
    assert parse_layers("").names == ()


@pytest.mark.parametrize("name", ["_gemm_mha_v2_myl0_2", "_gemv_mha_v1_myl0_3", "fmha_v2_fp16"])
def test_fused_kernels_are_known_by_name(name) -> None:
    assert parse_layers(f"Layers:\nName: {name}, LayerType: kgen, Inputs: []").fused == (name,)


@pytest.mark.parametrize("name", ["__myl_Fc_0x1", "gemm_v2", "softmax_mha"])
def test_other_kernels_are_not(name) -> None:
    assert parse_layers(f"Layers:\nName: {name}, LayerType: kgen, Inputs: []").fused == ()


@pytest.mark.parametrize(
    ("name", "extra", "expected"),
    [
        ("batch", {}, (1, 1, 32)),
        ("q_len", {}, (1, 128, 2048)),
        ("past_len", {}, (0, 127, 2047)),
        ("batch", {"profile.batch": "2:4:8"}, (2, 4, 8)),
        (None, {}, (1, 128, 2048)),
    ],
)
def test_ranges_of_symbolic_dimensions(name, extra, expected) -> None:
    assert dimension_range(name, extra) == expected


@pytest.mark.parametrize("text", ["8:4:2", "1:2", "a:b:c", "-1:2:3"])
def test_a_bad_range_is_refused(text) -> None:
    with pytest.raises(RuntimeError, match="least:best:most"):
        dimension_range("s", {"profile.s": text})


RTX = target_named("tensorrt-rtx")
builds = pytest.mark.skipif(
    not isinstance(RTX.availability().build, Available),
    reason="tensorrt-rtx is not installed here (an optional, proprietary extra)",
)

ATTENTION = """
<ir_version: 10, opset_import: ["": %d]>
g (%s[b, 4, s, 16] q, %s[b, 4, s, 16] k, %s[b, 4, s, 16] v%s) => (%s[b, 4, s, 16] y)
{ y = Attention%s(q, k, v%s) }
"""


def _program(tmp_path, dtype="float16", *, opset=23, attributes="", more=("", "")) -> Program:
    text = ATTENTION % (opset, dtype, dtype, dtype, more[0], dtype, attributes, more[1])
    path = tmp_path / "attention.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return Program(graphs={"main": path})


@builds
@pytest.mark.parametrize("attributes", ["", "<is_causal = 1>"])
def test_half_precision_attention_is_fused(tmp_path, attributes) -> None:
    program = _program(tmp_path, attributes=attributes)
    artifact = RTX.compile(program, CompileOptions(workdir=tmp_path / "built"))
    assert artifact.notes["fused_attention"] == "1 of 1"
    assert artifact.notes["decomposed"] == "false"
    assert artifact.notes["compute_capabilities"].startswith("SM80,")
    assert [path.name for path in artifact.files] == ["main.tensorrt-rtx.engine"]
    assert artifact.files[0].stat().st_size > 1000
    assert "1 fused of 1" in artifact.placement().evidence


@builds
def test_single_precision_attention_is_built_decomposed(tmp_path) -> None:
    artifact = RTX.compile(_program(tmp_path, "float"), CompileOptions(workdir=tmp_path / "b"))
    assert artifact.notes["decomposed"] == "true"
    assert artifact.notes["fused_attention"] == "0 of 1"


@builds
def test_an_engine_does_not_run_without_a_gpu(tmp_path) -> None:
    if isinstance(RTX.availability().run, Available):
        pytest.skip("this machine has a GPU: the engine would run")
    artifact = RTX.compile(_program(tmp_path), CompileOptions(workdir=tmp_path / "built"))
    cannot = artifact.load()
    assert isinstance(cannot, CannotRun)
    assert "GPU" in cannot.reason
    assert cannot.placement == artifact.placement()


@builds
def test_named_compute_capabilities(tmp_path) -> None:
    options = CompileOptions(
        workdir=tmp_path / "built", extra={"compute_capabilities": "sm89, SM120"}
    )
    artifact = RTX.compile(_program(tmp_path), options)
    assert artifact.notes["compute_capabilities"] == "SM89,SM120"
    unknown = CompileOptions(workdir=tmp_path / "built", extra={"compute_capabilities": "SM13"})
    with pytest.raises(RuntimeError, match="SM13"):
        RTX.compile(_program(tmp_path), unknown)


@builds
def test_an_ignored_input_is_found_in_the_engine(tmp_path) -> None:
    """nonpad_kv_seqlen is accepted by the parser and read by no layer: results would be wrong."""
    program = _program(
        tmp_path, opset=24, more=(", int64[b] lengths", ",,,, lengths".replace(",,,,", ", , , ,"))
    )
    artifact = RTX.compile(program, CompileOptions(workdir=tmp_path / "built"))
    assert artifact.unread["main"] == ("lengths",)
    loaded = artifact.load()
    assert not isinstance(loaded, CannotRun) or loaded.unread == ("lengths",)


@builds
def test_a_graph_that_is_refused_says_why(tmp_path) -> None:
    path = tmp_path / "bad.onnx"
    text = '<ir_version: 10, opset_import: ["": 18]> g (float[n] a) => (float[n] b) { b = Nope(a) }'
    onnx.save(onnx.parser.parse_model(text), path)
    with pytest.raises(RuntimeError, match=r"parse: Nope"):
        RTX.compile(Program(graphs={"main": path}), CompileOptions(workdir=tmp_path / "built"))


TABLE = """
<ir_version: 10, opset_import: ["": 18]>
g (float16[b, s, 4] x, float16[48, 4] t) => (float16[b, s, 4] y)
{
    shape = Shape<start = 1, end = 2>(x)
    zero = Constant<value_ints = [0]>()
    axis = Constant<value_ints = [0]>()
    rows = Slice(t, zero, shape, axis)
    y = Add(x, rows)
}
"""


@builds
def test_the_range_of_a_dimension_ends_where_a_table_of_positions_does(tmp_path) -> None:
    path = tmp_path / "table.onnx"
    onnx.save(onnx.parser.parse_model(TABLE), path)
    options = CompileOptions(workdir=tmp_path / "built")
    artifact = RTX.compile(Program(graphs={"main": path}), options)
    assert artifact.notes["profile.s"] == "1:32:64", "the best length is within the table"
    assert artifact.notes["profile.b"] == "1:1:32"


class _FakeDevice:
    """A device in memory: what the session uploads is what the fake engine computes from."""

    stream = 7

    def __init__(self) -> None:
        self.held: dict[str, np.ndarray] = {}

    def buffer(self, name, size):
        return hash(name) & 0xFFFF

    def upload(self, name, array):
        self.held[name] = array
        return hash(name) & 0xFFFF

    def download(self, name, array):
        array[...] = self.held[name]
        return array

    def synchronise(self):
        pass

    def event(self):
        return object()

    def record(self, event):
        pass

    def elapsed_ms(self, start, end):
        return 0.25


class _FakeTensorRt:
    """The part of the module that a session touches: an engine that doubles ``x``."""

    class TensorIOMode:
        INPUT, OUTPUT = "in", "out"

    class Logger:
        ERROR = 1

        def __init__(self, level):
            pass

    def __init__(self, device):
        self.device = device
        self.shape = None
        self.num_io_tensors = 2

    def Runtime(self, logger):  # noqa: N802 - the module's own name
        return self

    def deserialize_cuda_engine(self, data):
        return self if data == b"engine" else None

    def create_execution_context(self):
        return self

    def get_tensor_name(self, index):
        return ("x", "y")[index]

    def get_tensor_mode(self, name):
        return "in" if name == "x" else "out"

    def get_tensor_dtype(self, name):
        return type("FLOAT", (), {"name": "FLOAT"})

    def set_input_shape(self, name, shape):
        self.shape = shape
        return shape[0] <= 4

    def set_tensor_address(self, name, address):
        return True

    def infer_shapes(self):
        return []

    def get_tensor_shape(self, name):
        return self.shape

    def execute_async_v3(self, stream):
        assert stream == 7
        self.device.held["y"] = self.device.held["x"] * 2
        return True


@pytest.fixture
def fake_session(tmp_path, monkeypatch):
    import sys

    from mha_export.targets import _tensorrt_session
    from mha_export.targets._tensorrt import TensorRtArtifact

    device = _FakeDevice()
    monkeypatch.setitem(sys.modules, "tensorrt", _FakeTensorRt(device))
    monkeypatch.setattr(_tensorrt_session, "Device", lambda: device)
    engine = tmp_path / "main.engine"
    engine.write_bytes(b"engine")
    artifact = TensorRtArtifact(
        files=(engine,),
        compile_ms=1.0,
        models={"main": engine},
        module="tensorrt",
        runs=True,
        layers={"main": parse_layers(REPORT)},
        attentions={"main": 1},
        unread={"main": ()},
        outputs={"main": ("y",)},
    )
    return _tensorrt_session.TensorRtSession(artifact, "main")


def test_the_session_binds_runs_and_times(fake_session) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(fake_session.run({"x": x})["y"], 2 * x)
    assert fake_session.time({"x": x}, repeats=3, warmup=1) == [0.25, 0.25, 0.25]
    assert fake_session.placement().float_compute_nodes == 2


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.zeros((8, 3), np.float32), "outside the engine's profile"),
        (np.zeros((2, 3), np.float64), "expects float32"),
    ],
)
def test_the_session_says_what_does_not_fit(fake_session, x, says) -> None:
    with pytest.raises((RuntimeError, ValueError), match=says):
        fake_session.run({"x": x})


def test_the_session_names_a_missing_input(fake_session) -> None:
    with pytest.raises(ValueError, match="no array for input"):
        fake_session.run({})
