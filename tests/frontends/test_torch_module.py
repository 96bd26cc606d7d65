"""Torch modules and programs: every flag of ``nn.MultiheadAttention``, factories, trust."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.frontends import LoadedModel, SourceOptions, open_source

torch = pytest.importorskip("torch")

MODULE = "MultiheadAttention"
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "no weights": ({"batch_first": True}, {"need_weights": False}),
    "weights per head": ({"batch_first": True}, {"average_attn_weights": False}),
    "no bias": ({"bias": False}, {"need_weights": False}),
    "other key and value widths": ({"kdim": 12, "vdim": 20, "batch_first": True}, {}),
    "bias_kv": ({"add_bias_kv": True}, {"need_weights": False}),
    "zero_attn": ({"add_zero_attn": True}, {"need_weights": False}),
    "dropout": ({"dropout": 0.5, "batch_first": True}, {"need_weights": False}),
    "float mask": (
        {"batch_first": True},
        {"attn_mask": np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)},
    ),
    "bool mask": (
        {"batch_first": True},
        {"attn_mask": np.eye(5, 7, dtype=bool), "need_weights": False},
    ),
    "mask per head": (
        {"batch_first": True},
        {"attn_mask": np.linspace(-1, 1, 280, dtype=np.float32).reshape(8, 5, 7)},
    ),
    "padding": (
        {"batch_first": True},
        {"key_padding_mask": np.array([[0] * 7, [0] * 4 + [1] * 3], dtype=bool)},
    ),
    "padding and mask": (
        {"batch_first": True},
        {
            "key_padding_mask": np.array([[0] * 7, [0] * 4 + [1] * 3], dtype=bool),
            "attn_mask": np.eye(5, 7, k=1, dtype=bool),
            "need_weights": False,
        },
    ),
}


def expected(module: Any, loaded: LoadedModel, flags: dict[str, Any]) -> list[np.ndarray]:
    """What torch's plain path gives for the loaded model's sample inputs."""
    assert loaded.sample_inputs is not None
    tensors = {name: torch.from_numpy(array) for name, array in loaded.sample_inputs.items()}
    fixed = {name: value for name, value in flags.items() if not isinstance(value, np.ndarray)}
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            result = module.eval()(**tensors, **fixed)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    results = result if isinstance(result, tuple) else (result,)
    return [item.numpy() for item in results if item is not None]


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_of_multihead_attention(name: str, run: Any) -> None:
    built, called = FLAGS[name]
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, **built)
    loaded = open_source(module, SourceOptions(inputs=called, exporter="legacy"))
    assert loaded.name == MODULE
    want = expected(module, loaded, called)
    got = run(loaded.model, loaded.sample_inputs)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("built", "called"), [FLAGS["padding and mask"], FLAGS["plain"]], ids=["masked", "plain"]
)
def test_torch_export_leaves_lengths_open(
    built: dict[str, Any], called: dict[str, Any], run: Any
) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, **built)
    loaded = open_source(module, SourceOptions(inputs=called, exporter="dynamo"))
    axes = [
        dim if isinstance(dim, int) else dim.value for dim in loaded.model.graph.inputs[1].shape
    ]
    assert axes == (["batch", "kv_seq", 16] if built else ["kv_seq", "batch", 16])
    got = run(loaded.model, loaded.sample_inputs)
    for ours, theirs in zip(got, expected(module, loaded, called), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("TransformerEncoderLayer", (16, 4, 32)),
        ("TransformerDecoderLayer", (16, 4, 32)),
        ("Transformer", (16, 4, 1, 1, 32)),
    ],
)
def test_transformer_layers_derive_their_inputs(
    kind: str, arguments: tuple[int, ...], batch_first: bool, run: Any
) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():  # torch tells that nested tensors are off: not of interest
        warnings.simplefilter("ignore")
        module = getattr(torch.nn, kind)(*arguments, batch_first=batch_first)
    loaded = open_source(module, SourceOptions(exporter="legacy"))
    (got,) = run(loaded.model, loaded.sample_inputs)
    np.testing.assert_allclose(got, expected(module, loaded, {})[0], atol=2e-6)


def test_an_encoder_derives_its_inputs(run: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    loaded = open_source(module, SourceOptions(exporter="legacy"))
    (got,) = run(loaded.model, loaded.sample_inputs)
    np.testing.assert_allclose(got, expected(module, loaded, {})[0], atol=2e-6)


class Scores(torch.nn.Module):  # type: ignore[misc]
    """``x + offset``, with a flag that must be fixed and an optional tensor."""

    def forward(self, x: Any, offset: Any = None, *, twice: bool = False) -> Any:
        total = x if offset is None else x + offset
        return 2 * total if twice else total


def test_values_that_are_not_tensors_are_fixed(run: Any) -> None:
    options = SourceOptions(inputs={"twice": True}, shapes={"x": (2, 3, 4)}, exporter="legacy")
    loaded = open_source(Scores(), options)
    x = np.ones((5, 6, 4), np.float32)
    (got,) = run(loaded.model, {"x": x})
    np.testing.assert_array_equal(got, 2 * x)
    assert [value.name for value in loaded.model.graph.outputs] == ["output"]


def test_a_tracer_names_axes_by_their_sizes() -> None:
    options = SourceOptions(
        shapes={"x": (2, 3, 4), "offset": (1, 3, 4)}, exporter="legacy", inputs={}
    )
    loaded = open_source(Scores(), options)
    axes = {value.name: list(map(str, value.shape)) for value in loaded.model.graph.inputs}
    assert axes == {"x": ["batch", "seq", "4"], "offset": ["offset_0", "seq", "4"]}


@pytest.mark.parametrize(
    ("options", "says", "fix"),
    [
        ({}, "nothing tells the shape of its input x", "--shape x=2,16,512"),
        ({"shapes": {"y": (2,)}}, "forward has no argument 'y'", "x, offset, twice"),
        ({"inputs": {"z": 1}}, "forward has no argument 'z'", "x, offset, twice"),
        ({"inputs": {"twice": True}}, "nothing tells the shape", "--shape x=2,16,512"),
    ],
)
def test_missing_inputs_are_one_clear_error(options: dict[str, Any], says: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        open_source(Scores(), SourceOptions(**options))
    assert says in caught.value.what
    assert fix in (caught.value.fix or "")


def test_a_shape_cannot_stand_for_token_ids(capfd: pytest.CaptureFixture[str]) -> None:
    options = SourceOptions(shapes={"input": (2, 3)})
    with pytest.raises(InputError) as caught:
        open_source(torch.nn.Embedding(5, 4), options)
    assert "could not be exported" in caught.value.what
    assert "(input) are floats" in (caught.value.fix or "")
    assert capfd.readouterr() == ("", "")


class Branches(torch.nn.Module):  # type: ignore[misc]
    """A branch on data: torch.export refuses it, tracing follows one side."""

    def forward(self, x: Any) -> Any:
        return x + 1 if float(x.sum()) > 0 else x - 1


def test_auto_falls_back_to_tracing_and_says_so() -> None:
    options = SourceOptions(inputs={"x": torch.ones(2, 3)})
    loaded = open_source(Branches(), options)
    assert loaded.notes[0].startswith(
        "exported by tracing (legacy), since torch.export failed: torch Branches could not be"
    )
    assert "test_torch_module.py" in loaded.notes[1]


def test_a_failed_export_is_one_clear_error() -> None:
    options = SourceOptions(inputs={"x": torch.ones(2, 3)}, exporter="dynamo")
    with pytest.raises(InputError, match="torch Branches could not be exported") as caught:
        open_source(Branches(), options)
    assert "\n" not in caught.value.what
    assert "exporter" in (caught.value.fix or "")


def test_a_module_in_training_is_exported_as_in_evaluation_and_left_as_it_was() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.5))
    module.train()
    loaded = open_source(module, SourceOptions(shapes={"input": (2, 3)}, exporter="legacy"))
    assert module.training
    assert not any(node.op_type == "Dropout" for node in loaded.model.graph)


def test_an_exported_program_keeps_its_own_axes(run: Any) -> None:
    module = torch.nn.Linear(4, 3)
    batch = torch.export.Dim("rows")
    program = torch.export.export(module, (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    loaded = open_source(program)
    assert [str(dim) for dim in loaded.model.graph.inputs[0].shape][1] == "4"
    x = np.ones((6, 4), np.float32)
    (got,) = run(loaded.model, {loaded.model.graph.inputs[0].name: x})
    np.testing.assert_allclose(got, module(torch.from_numpy(x)).detach().numpy(), atol=1e-6)
    assert loaded.sample_inputs is not None
    assert [array.shape for array in loaded.sample_inputs.values()] == [(2, 4)]


def test_a_saved_program_needs_trust(tmp_path: Path) -> None:
    path = tmp_path / "linear.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),)), path)
    with pytest.raises(InputError, match="runs the code in it"):
        open_source(path)
    assert open_source(path, SourceOptions(trust_code=True)).name == "linear"
    path.write_bytes(b"not a program")
    with pytest.raises(InputError, match=r"not a program of torch\.export"):
        open_source(path, SourceOptions(trust_code=True))


FACTORY = """
import torch

def linear():
    return torch.nn.Linear(4, 3), {"input": torch.ones(2, 4)}

def bare():
    return torch.nn.Linear(4, 3)

def wrong():
    return 3

def broken():
    raise ValueError("no such thing")
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return path


def test_a_factory_is_called_only_when_trusted(factory: Path) -> None:
    with pytest.raises(InputError, match="is not run unasked") as caught:
        open_source(f"{factory}:linear")
    assert "--trust-code" in (caught.value.fix or "")
    options = SourceOptions(trust_code=True, exporter="legacy")
    assert open_source(f"{factory}:linear", options).name == "linear"


@pytest.mark.parametrize(
    ("name", "says", "fix"),
    [
        ("bare", "nothing tells the shape of its input input", "--shape"),
        ("wrong", "made a int, expected a torch.nn.Module", "return the module"),
        ("broken", "broken failed: ValueError: no such thing", "traceback"),
        ("absent", "has no 'absent'", "linear, bare, wrong, broken"),
    ],
)
def test_a_bad_factory_is_one_clear_error(factory: Path, name: str, says: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        open_source(f"{factory}:{name}", SourceOptions(trust_code=True))
    assert says in caught.value.what
    assert fix in (caught.value.fix or "")


def test_a_missing_module_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        open_source(f"{tmp_path / 'absent.py'}:make", SourceOptions(trust_code=True))


def test_a_transformers_model_is_exported_for_its_task() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    loaded = open_source(model, SourceOptions(exporter="legacy", task="text-generation"))
    assert next(value.name for value in loaded.model.graph.inputs) == "input_ids"
    assert [value.name for value in loaded.model.graph.outputs] == ["logits"]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    open_source(torch.nn.MultiheadAttention(16, 4), SourceOptions(exporter="legacy"))
    assert capfd.readouterr() == ("", "")


def test_the_command_line_gives_shapes_and_chooses_the_exporter(factory: Path) -> None:
    from mha_export.jobs import SourceSettings

    settings = SourceSettings(shapes=("input=2,4",), exporter="legacy", trust_code=True)
    loaded = open_source(f"{factory}:bare", settings.for_frontend())
    assert loaded.sample_inputs is not None
    assert loaded.sample_inputs["input"].shape == (2, 4)
