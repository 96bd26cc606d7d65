"""Hugging Face folders: what is exported, under which names, and what a damaged folder says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.frontends import LoadedModel, SourceOptions, open_source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAST_NAMES = [f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value")]


def names(values: Any) -> list[str]:
    return [value.name for value in values]


def axes(value: Any) -> list[object]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


@pytest.fixture(scope="module", params=["dynamo", "legacy"])
def bert(request: pytest.FixtureRequest, bert_folder: Path) -> LoadedModel:
    return open_source(bert_folder, SourceOptions(exporter=request.param))


@pytest.fixture(scope="module", params=["dynamo", "legacy"])
def llama_with_past(request: pytest.FixtureRequest, llama_folder: Path) -> LoadedModel:
    return open_source(llama_folder, SourceOptions(exporter=request.param))


def test_an_encoder_has_named_inputs_and_open_axes(bert: LoadedModel, bert_folder: Path) -> None:
    graph = bert.model.graph
    assert names(graph.inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert names(graph.outputs) == ["last_hidden_state"]
    assert all(axes(value) == ["batch", "seq"] for value in graph.inputs)
    assert axes(graph.outputs[0]) == ["batch", "seq", 32]
    assert bert.name == "tiny-bert"
    assert "BertModel, task feature-extraction" in bert.origin


def test_an_encoder_equals_torch_at_other_sizes(
    bert: LoadedModel, bert_folder: Path, run: Any
) -> None:
    ids = np.random.default_rng(1).integers(1, 64, (3, 11))
    mask = np.ones_like(ids)
    mask[1, 6:] = 0
    model = transformers.BertModel.from_pretrained(bert_folder).eval()
    with torch.no_grad():
        want = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (got,) = run(bert.model, feeds)
    np.testing.assert_allclose(got, want.last_hidden_state.numpy(), atol=2e-6)


def test_sample_inputs_fit_the_graph(bert: LoadedModel, run: Any) -> None:
    assert bert.sample_inputs is not None
    (got,) = run(bert.model, bert.sample_inputs)
    assert got.shape == (*bert.sample_inputs["input_ids"].shape, 32)
    assert 0 in bert.sample_inputs["attention_mask"]


def test_no_torch_type_and_no_local_path_is_left(bert: LoadedModel) -> None:
    graph = bert.model.graph
    for value in graph.initializers.values():
        assert value.const_value is not None
        assert isinstance(value.const_value.numpy(), np.ndarray)
        assert "torch" not in type(value.const_value).__module__
    for node in graph:
        assert not any("site-packages" in text for text in node.metadata_props.values())


def test_a_decoder_has_a_cache_by_default(llama_with_past: LoadedModel) -> None:
    graph = llama_with_past.model.graph
    assert names(graph.inputs) == ["input_ids", "attention_mask", "position_ids", *PAST_NAMES]
    present = [name.replace("past_key_values", "present") for name in PAST_NAMES]
    assert names(graph.outputs) == ["logits", *present]
    by_name = {value.name: axes(value) for value in (*graph.inputs, *graph.outputs)}
    assert by_name["input_ids"] == ["batch", "seq"]
    assert by_name["attention_mask"] == ["batch", "total_seq"]
    assert by_name["past_key_values.0.key"] == ["batch", 2, "past_seq", 8]
    assert by_name["present.1.value"] == ["batch", 2, "total_seq", 8]
    assert by_name["logits"] == ["batch", "seq", 64]


def test_decoding_by_steps_equals_the_whole(
    llama_with_past: LoadedModel, llama_folder: Path, run: Any
) -> None:
    """Three tokens onto an empty cache, then one by one, with the first row left-padded."""
    ids = np.random.default_rng(2).integers(1, 64, (2, 6))
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    model = transformers.LlamaForCausalLM.from_pretrained(llama_folder).eval()
    with torch.no_grad():
        want = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(positions),
        ).logits.numpy()
    past = {name: np.zeros((2, 2, 0, 8), np.float32) for name in PAST_NAMES}
    got = []
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        feeds = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
            **past,
        }
        logits, *present = run(llama_with_past.model, feeds)
        past = dict(zip(PAST_NAMES, present, strict=True))
        got.append(logits)
    seen = mask.astype(bool)
    np.testing.assert_allclose(np.concatenate(got, axis=1)[seen], want[seen], atol=2e-6)


def test_a_decoder_without_cache(llama_folder: Path) -> None:
    loaded = open_source(llama_folder, SourceOptions(task="text-generation", exporter="legacy"))
    assert names(loaded.model.graph.inputs) == ["input_ids", "attention_mask", "position_ids"]
    assert names(loaded.model.graph.outputs) == ["logits"]
    assert axes(loaded.model.graph.inputs[1]) == ["batch", "seq"]


def test_the_same_folder_gives_the_same_digest(bert_folder: Path) -> None:
    options = SourceOptions(exporter="legacy", opset=17)
    first, second = (open_source(bert_folder, options) for _ in range(2))
    assert first.sha256 == second.sha256
    assert first.model.opset_imports[""] == 17


def test_sample_sizes_can_be_chosen(bert_folder: Path) -> None:
    options = SourceOptions(exporter="legacy", dims={"batch": 3, "seq": 9})
    loaded = open_source(bert_folder, options)
    assert loaded.sample_inputs is not None
    assert loaded.sample_inputs["input_ids"].shape == (3, 9)


def test_nothing_is_printed(bert_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_source(bert_folder, SourceOptions(exporter="legacy"))
    assert capfd.readouterr() == ("", "")


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
TASKS = {
    "fill-mask": ("BertForMaskedLM", "BertConfig", {}, ["logits"]),
    "text-classification": ("BertForSequenceClassification", "BertConfig", {}, ["logits"]),
    "token-classification": ("BertForTokenClassification", "BertConfig", {}, ["logits"]),
    "question-answering": (
        "BertForQuestionAnswering",
        "BertConfig",
        {},
        ["start_logits", "end_logits"],
    ),
    "image-classification": (
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 8, "patch_size": 4},
        ["logits"],
    ),
    "image-feature-extraction": (
        "ViTModel",
        "ViTConfig",
        {"image_size": 8, "patch_size": 4},
        ["last_hidden_state"],
    ),
    "text2text-generation": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        ["logits"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_task_is_read_off_the_config(tmp_path: Path, run: Any, task: str) -> None:
    model_name, config_name, extra, outputs = TASKS[task]
    config = getattr(transformers, config_name)(**{**SMALL, **extra})
    getattr(transformers, model_name)(config).save_pretrained(tmp_path / "m")
    loaded = open_source(tmp_path / "m", SourceOptions(exporter="legacy"))
    assert f"task {task})" in loaded.origin
    assert names(loaded.model.graph.outputs) == outputs
    assert loaded.sample_inputs is not None
    assert all(np.isfinite(array).all() for array in run(loaded.model, loaded.sample_inputs))


@pytest.fixture
def damaged(bert_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(bert_folder, folder)
    return folder


def _config(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        path.write_text(json.dumps(kept))

    return change


def _weights(damage: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(damage(path.read_bytes()))

    return change


def _lost_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "config not json": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: not readable as JSON",
    ),
    "config a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "states no model_type",
    ),
    "no model_type": (_config(model_type=None), "states no model_type"),
    "unknown model_type": (_config(model_type="nosuch"), "transformers can't use it"),
    "sizes changed": (_config(hidden_size=16), "can't be loaded for task feature-extraction"),
    "remote code": (
        _config(auto_map={"AutoModel": "modeling_x.Model"}),
        "needs Python code that comes with it",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "weights cut off": (_weights(lambda data: data[:-10]), "model.safetensors: cut off"),
    "weights empty": (_weights(lambda data: b""), "not safetensors, or cut off (0 bytes)"),
    "weights are text": (_weights(lambda data: b"version https://git-lfs"), "not safetensors"),
    "header damaged": (
        _weights(lambda data: data[:8] + b"#" + data[9:]),
        "its safetensors header is damaged",
    ),
    "a shard missing": (_lost_shard, "1 of 1 weight files are missing"),
    "index damaged": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
        "not a weight index",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_clear_error(damaged: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    damage(damaged)
    with pytest.raises(InputError) as caught:
        open_source(damaged)
    assert says in caught.value.what
    assert str(damaged) in caught.value.what
    assert "\n" not in caught.value.what
    assert caught.value.fix


def test_weights_are_never_made_up(bert_folder: Path) -> None:
    with pytest.raises(InputError, match="holds no weights for cls") as caught:
        open_source(bert_folder, SourceOptions(task="fill-mask"))
    assert "--task feature-extraction" in (caught.value.fix or "")


def test_an_unread_pooler_may_be_missing(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL)
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained(tmp_path / "masked")
    options = SourceOptions(task="feature-extraction", exporter="legacy")
    loaded = open_source(tmp_path / "masked", options)
    assert names(loaded.model.graph.outputs) == ["last_hidden_state"]


def test_half_precision_weights_are_loaded_as_float32_and_said(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL)
    transformers.BertModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    loaded = open_source(tmp_path / "half", SourceOptions(exporter="legacy"))
    assert loaded.notes[0] == "weights stored as bfloat16, loaded as float32"


def test_an_unknown_task_names_those_there_are(bert_folder: Path) -> None:
    with pytest.raises(InputError, match="unknown task 'translate'") as caught:
        open_source(bert_folder, SourceOptions(task="translate"))
    assert "text-generation-with-past" in (caught.value.fix or "")


def test_a_hub_name_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="models are not downloaded from here") as caught:
        open_source("some-org/some-model")
    assert caught.value.fix == (
        "hf download some-org/some-model --local-dir some-model, then give that folder"
    )


def test_a_folder_with_an_onnx_file_points_to_it(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(InputError) as caught:
        open_source(tmp_path)
    assert str(tmp_path / "model.onnx") in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("path", "stated", "name"),
    [
        ("models--org--the-name/snapshots/0123abcd", None, "the-name"),
        ("all-MiniLM-L6-v2", "x/y", "all-MiniLM-L6-v2"),
        ("package/model", "org/the-name", "the-name"),
        ("package/model", None, "bert"),
    ],
)
def test_a_name_that_says_something(
    bert_folder: Path, tmp_path: Path, path: str, stated: str | None, name: str
) -> None:
    folder = tmp_path / path
    shutil.copytree(bert_folder, folder)
    _config(_name_or_path=stated)(folder)
    assert open_source(folder, SourceOptions(exporter="legacy")).name == name


def test_old_weights_are_read_as_data_only(bert_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(bert_folder, folder)
    state = transformers.BertModel.from_pretrained(bert_folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    options = SourceOptions(exporter="legacy", opset=17)
    assert open_source(folder, options).sha256 == open_source(bert_folder, options).sha256

    ran = tmp_path / "ran"
    torch.save({"weight": Payload(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="can't be loaded"):
        open_source(folder, options)
    assert not ran.exists()


class Payload:
    """What a hostile pickle does: it runs something when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
