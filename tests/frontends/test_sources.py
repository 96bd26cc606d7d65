"""Which frontend takes which source, and what is said of a source that none takes."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.frontends import Frontend, SourceOptions, all_frontends, open_source
from mha_export.spec import AttentionSpec


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "no_suffix").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("model.onnx", "onnx"),
        ("model.ONNX", "onnx"),
        ("model.onnxtxt", "onnx"),
        ("weights.safetensors", "onnx"),
        ("no_suffix", "onnx"),
        ("folder", "huggingface"),
        ("absent-org/absent-name", "huggingface"),
        ("model.py:factory", "torch"),
        ("program.pt2", "torch"),
        ("spec.yaml", "specification"),
        ("spec.yml", "specification"),
        ("preset:gpt2", "specification"),
        ("notes.txt", None),
        ("absent", None),
        ("a/b/c", None),
    ],
)
def test_a_source_is_taken_by_its_kind(
    places: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str | None
) -> None:
    monkeypatch.chdir(places)
    takers = [name for name, frontend in all_frontends().items() if frontend.accepts(source)]
    assert takers == ([] if expected is None else [expected])


def test_objects_are_taken_by_their_type() -> None:
    torch = pytest.importorskip("torch")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    for source, expected in (
        (torch.nn.Linear(2, 2), "torch"),
        (program, "torch"),
        (onnx.ModelProto(), "onnx"),
        (AttentionSpec(q_heads=2, kv_heads=1, head_dim=4), "specification"),
        (ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), "onnx"),
    ):
        takers = [name for name, item in all_frontends().items() if item.accepts(source)]
        assert takers == [expected], source


@pytest.mark.parametrize("frontend", all_frontends().values(), ids=all_frontends().keys())
def test_every_frontend_keeps_the_protocol(frontend: Frontend) -> None:
    assert isinstance(frontend, Frontend)
    assert frontend.name
    assert frontend.summary
    assert not frontend.accepts(3)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("absent", "absent: no such file or folder"),
        ("notes.txt", "notes.txt: not a kind of file known here"),
        (3, "builtins.int is not a kind of model"),
        (None, "builtins.NoneType is not a kind of model"),
    ],
)
def test_an_unknown_source_is_one_clear_error(
    places: Path, monkeypatch: pytest.MonkeyPatch, source: object, says: str
) -> None:
    monkeypatch.chdir(places)
    with pytest.raises(InputError) as caught:
        open_source(source, SourceOptions())
    assert caught.value.what == says
    for frontend in all_frontends().values():
        assert frontend.summary in (caught.value.fix or "")


def test_an_empty_source_is_not_the_current_folder(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)
    with pytest.raises(InputError, match="the source is empty"):
        open_source("")


def test_a_preset_without_its_prefix_is_pointed_out() -> None:
    with pytest.raises(InputError, match="but a preset") as caught:
        open_source("gpt2")
    assert caught.value.fix == "write preset:gpt2"
