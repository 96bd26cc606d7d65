"""ONNX files: good ones in every storage, and one clear error for each kind of bad one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from mha_export.errors import InputError
from mha_export.frontends import open_source


def small_model(weight: float = 2.0) -> onnx.ModelProto:
    """``y = x W`` inside an If, with W of 64 floats in the main graph."""
    value = np.full((8, 8), weight, dtype=np.float32)
    then = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["then_y"])],
        "then",
        [],
        [helper.make_tensor_value_info("then_y", TensorProto.FLOAT, ["n", 8])],
    )
    other = helper.make_graph(
        [
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(value, "c")),
            helper.make_node("MatMul", ["x", "c"], ["else_y"]),
        ],
        "else",
        [],
        [helper.make_tensor_value_info("else_y", TensorProto.FLOAT, ["n", 8])],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["go"], ["y"], then_branch=then, else_branch=other, name="if")],
        "small",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(value, "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path)
    return path


def test_a_file_is_read(saved: Path) -> None:
    loaded = open_source(saved)
    assert loaded.name == "small"
    assert loaded.origin == f"ONNX file {saved}"
    assert [value.name for value in loaded.model.graph.inputs] == ["x", "go"]
    assert loaded.sample_inputs is None


@pytest.mark.parametrize("suffix", [".onnx", ".onnxtxt", ".textproto", ".onnxjson", ".pb", ""])
def test_every_storage_gives_the_same_digest(saved: Path, tmp_path: Path, suffix: str) -> None:
    copy = tmp_path / f"copy{suffix}"
    formats = {".onnxtxt": "onnxtxt", ".textproto": "textproto", ".onnxjson": "json"}
    onnx.save(small_model(), copy, format=formats.get(suffix, "protobuf"))
    assert open_source(copy).sha256 == open_source(saved).sha256


def test_external_data_stays_on_disk_and_gives_the_same_digest(saved: Path) -> None:
    model = small_model()
    path = saved.with_name("external.onnx")
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        location="external.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    loaded = open_source(path)
    assert isinstance(loaded.model.graph.initializers["W"].const_value, ir.ExternalTensor)
    assert loaded.sha256 == open_source(saved).sha256


def test_objects_give_the_same_digest(saved: Path) -> None:
    proto = onnx.load(saved)
    digests = {open_source(item).sha256 for item in (saved, proto, ir.from_proto(proto))}
    assert len(digests) == 1


def _change_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.full((8, 8), 2.5, dtype=np.float32), "W")
    )


def _change_branch_weight(model: onnx.ModelProto) -> None:
    (other,) = [item.g for item in model.graph.node[0].attribute if item.name == "else_branch"]
    other.node[0].attribute[0].t.CopyFrom(
        numpy_helper.from_array(np.full((8, 8), 3.0, dtype=np.float32), "c")
    )


def _change_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 19


def _change_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4


@pytest.mark.parametrize(
    "change", [_change_weight, _change_branch_weight, _change_opset, _change_shape]
)
def test_what_matters_changes_the_digest(change: Callable[[onnx.ModelProto], None]) -> None:
    model = small_model()
    before = open_source(model).sha256
    change(model)
    assert open_source(model).sha256 != before


def test_node_names_and_producer_do_not_change_the_digest() -> None:
    model = small_model()
    before = open_source(model).sha256
    model.producer_name = "someone"
    model.graph.node[0].name = "renamed"
    model.graph.node[0].doc_string = "text"
    assert open_source(model).sha256 == before


def _write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _with(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        model = small_model()
        change(model)
        path.write_bytes(model.SerializeToString())

    return write


def _external(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        onnx.save(
            small_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0
        )
        damage(path.with_name("w.bin"))

    return write


def _move_out_and_link(data: Path) -> None:
    outside = data.parent.with_name(f"{data.parent.name}-outside.bin")
    data.rename(outside)
    data.symlink_to(outside)


def _outside(path: Path) -> None:
    model = small_model()
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../w.bin"
    path.write_bytes(model.SerializeToString())


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "no such file"),
    "folder": (lambda path: path.mkdir(), "not a Hugging Face folder, it has no config.json"),
    "empty": (_write(b""), "empty file"),
    "text": (_write(b"<html><body>Not found</body></html>"), "not ONNX, or cut off"),
    "zeros": (_write(bytes(4096)), "not ONNX, or cut off"),
    "png": (_write(b"\x89PNG\r\n\x1a\n" + bytes(64)), "not ONNX, or cut off"),
    "truncated": (
        _write(small_model().SerializeToString()[:-200]),
        "not ONNX, or cut off",
    ),
    "no graph": (
        _write(onnx.ModelProto(ir_version=9, producer_name="x").SerializeToString()),
        "holds no graph",
    ),
    "future ir": (_with(lambda model: setattr(model, "ir_version", 99)), "ONNX IR version 99"),
    "ancient ir": (_with(lambda model: setattr(model, "ir_version", 1)), "ONNX IR version 1"),
    "no opset": (_with(lambda model: model.ClearField("opset_import")), "imports no operator set"),
    "future opset": (
        _with(lambda model: setattr(model.opset_import[0], "version", 999)),
        "ai.onnx opset 999",
    ),
    "dangling input": (
        _with(lambda model: model.graph.node[0].input.__setitem__(0, "nowhere")),
        "reads 'nowhere', which nothing produces",
    ),
    "dangling output": (
        _with(lambda model: setattr(model.graph.output[0], "name", "nowhere")),
        "output 'nowhere' is produced by no node",
    ),
    "weights missing": (_external(lambda data: data.unlink()), "w.bin is missing"),
    "weights cut off": (_external(lambda data: data.write_bytes(b"x")), "w.bin is cut off"),
    "weights outside": (_outside, "../w.bin leads out of the model's folder, which"),
    "weights behind a link": (
        _external(_move_out_and_link),
        "w.bin leads out of the model's folder through a link",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    write, says = BAD_FILES[name]
    path = tmp_path / "bad.onnx"
    write(path)
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert says in caught.value.what
    assert str(path) in caught.value.what
    assert "\n" not in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model.onnxtxt", "not ONNX text"),
        ("model.textproto", "not ONNX text"),
        ("model.safetensors", "weights alone"),
        ("model.gguf", "weights alone"),
        ("model.ort", "ONNX Runtime's own format"),
    ],
)
def test_other_suffixes_are_judged_by_their_own_kind(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).write_bytes(b"no such thing")
    with pytest.raises(InputError, match=says):
        open_source(tmp_path / file)


def test_text_that_is_cut_off_is_told_where(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnxtxt"
    path.write_text('<ir_version: 10, opset_import: ["" : 21]>\nmain (float[1] x', encoding="utf-8")
    with pytest.raises(InputError, match=r"line: 2 column: \d+") as caught:
        open_source(path)
    assert "b'" not in caught.value.what


def test_a_missing_file_names_what_lies_beside_it(saved: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_source(saved.with_name("smal.onnx"))
    assert "small.onnx" in (caught.value.fix or "")


def test_functions_are_read_with_their_weights_and_subgraphs(tmp_path: Path) -> None:
    body = helper.make_function(
        "local",
        "Scale",
        ["x"],
        ["y"],
        [
            helper.make_node(
                "Constant",
                [],
                ["two"],
                value=numpy_helper.from_array(np.float32(2.0), "two"),
            ),
            helper.make_node("Mul", ["x", "two"], ["y"]),
        ],
        [helper.make_opsetid("", 18)],
    )
    graph = helper.make_graph(
        [helper.make_node("Scale", ["x"], ["y"], domain="local")],
        "calls",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, functions=[body], opset_imports=imports, ir_version=10)
    path = tmp_path / "calls.onnx"
    onnx.save(model, path)
    first = open_source(path)
    assert len(first.model.functions) == 1
    body.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(3.0), "two"))
    changed = helper.make_model(graph, functions=[body], opset_imports=imports, ir_version=10)
    assert open_source(changed).sha256 != first.sha256
