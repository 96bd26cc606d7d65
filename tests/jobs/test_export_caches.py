"""``export --cache`` and ``--split``: what is written, what it says, and that it decodes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from tiny_decoders import MASKED, Decoder

from mha_export.decode import KEY, CacheLayout, DecodeSession
from mha_export.errors import CheckFailedError, InputError
from mha_export.jobs import ExportSettings, SourceSettings, export_model, run_models
from mha_export.jobs._subject import open_subject

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "greedy_decoding.py"
PROMPT = np.array([[3, 1, 4], [1, 5, 9]])


def _export(
    source: Path, out: Path, opset: int | None = None, **settings: object
) -> dict[str, object]:
    result = export_model(
        source,
        targets=["cpu"],
        out=out,
        source_settings=SourceSettings(opset=opset),
        settings=ExportSettings(**settings),  # type: ignore[arg-type]
    )
    assert result.ok, result.notices
    document: dict[str, object] = json.loads((out / "export.json").read_text())
    return document


def _ops(path: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(path, load_external_data=False).graph.node)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MASKED.saved(tmp_path_factory.mktemp("decoders") / "decoder.onnx")


@pytest.mark.parametrize(("cache", "opset"), [("concat", 23), ("static", 24)])
def test_two_graphs_of_one_decoder_share_weights_and_cache(
    decoder: Path, cache: str, opset: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    document = _export(decoder, out, cache=cache, split="prefill-decode")
    graphs = {v["graph"]: v for v in document["variants"]}  # type: ignore[attr-defined, index]
    assert {g: v["file"] for g, v in graphs.items()} == {
        "prefill": "cpu.onnx",
        "decode": "cpu.decode.onnx",
    }
    forms = {g: {s["form"] for s in v["sites"].values()} for g, v in graphs.items()}
    assert forms == {"prefill": {"tiled"}, "decode": {"grouped"}}
    assert {v["opset"] for v in graphs.values()} == {opset}
    in_place = [node.op_type for node in _ops(out / "cpu.decode.onnx")].count("TensorScatter")
    assert in_place == (2 if cache == "static" else 0)
    assert document["cache"]["state"] == "added"  # type: ignore[index]
    assert document["cache"]["proof"]["status"] == "pass"  # type: ignore[index]
    assert [p.name for p in out.glob("*.bin")] == ["weights.bin"]
    session = DecodeSession(out / "cpu.onnx", step_model=out / "cpu.decode.onnx", max_length=12)
    alone = DecodeSession(out / "original.onnx", max_length=12)
    np.testing.assert_array_equal(
        session.generate(PROMPT, new_tokens=6), alone.generate(PROMPT, new_tokens=6)
    )
    assert len(open_subject(out, ["cpu"]).candidates) == 2


def test_no_concat_of_a_past_remains_outside_the_attention(decoder: Path, tmp_path: Path) -> None:
    _export(decoder, tmp_path / "out", cache="concat", form="onnx", opset=23)
    nodes = _ops(tmp_path / "out" / "cpu.onnx")
    assert [n.op_type for n in nodes].count("Attention") == 1
    assert not [n for n in nodes if n.op_type == "Concat" and any("past" in i for i in n.input)]


@pytest.mark.parametrize(("opset", "op"), [(18, "ScatterElements"), (24, "TensorScatter")])
def test_a_static_cache_is_written_in_place(
    decoder: Path, opset: int, op: str, tmp_path: Path
) -> None:
    _export(decoder, tmp_path / "out", cache="static", form="grouped", opset=opset)
    assert [n.op_type for n in _ops(tmp_path / "out" / "cpu.onnx")].count(op) == 2


def test_a_cache_is_kept_as_it_is_and_described(decoder: Path, tmp_path: Path) -> None:
    first = _export(decoder, tmp_path / "first", cache="concat")
    again = _export(tmp_path / "first" / "original.onnx", tmp_path / "again")
    assert again["cache"]["state"] == "kept"  # type: ignore[index]
    assert again["cache"]["layout"] == first["cache"]["layout"]  # type: ignore[index]
    model = onnx.load(tmp_path / "again" / "cpu.onnx", load_external_data=False)
    metadata = {p.key: p.value for p in model.metadata_props}
    assert CacheLayout.from_json(json.loads(metadata[KEY])).growth == "concat"


def test_without_the_option_inputs_and_outputs_are_as_they_were(
    decoder: Path, tmp_path: Path
) -> None:
    document = _export(decoder, tmp_path / "out")
    assert document["cache"] is None
    before, after = (onnx.load(p).graph for p in (decoder, tmp_path / "out" / "cpu.onnx"))
    assert list(after.input) == list(before.input)
    assert list(after.output) == list(before.output)


def test_an_encoder_is_refused_and_nothing_is_written(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bidirectional"):
        _export(encoder, tmp_path / "out", cache="concat")
    assert not (tmp_path / "out").exists()


def test_a_failed_proof_writes_nothing(tmp_path: Path) -> None:
    mixed = Decoder(
        parts={
            "hidden": """
                end = Constant<value_ints: ints = [-1]>()
                last = Gather<axis: int = 1>(embedded, end)
                hidden = Add(embedded, last)
            """
        }
    )
    source = mixed.saved(tmp_path / "mixed.onnx")
    with pytest.raises(CheckFailedError, match="steps-differ"):
        _export(source, tmp_path / "out", cache="concat")
    assert not (tmp_path / "out").exists()


def test_two_graphs_need_a_cache(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a cache"):
        _export(decoder, tmp_path / "out", split="prefill-decode")


@pytest.mark.slow
def test_both_graphs_run_and_agree_with_the_original(decoder: Path, tmp_path: Path) -> None:
    _export(decoder, tmp_path / "out", cache="concat", split="prefill-decode")
    from mha_export.jobs._settings import RunSettings

    result = run_models(tmp_path / "out", targets=["cpu"], settings=RunSettings(quick=True))
    assert [r["graph"] for r in result.document["results"]] == ["prefill", "decode"]
    assert {r["status"] for r in result.document["results"]} == {"pass"}


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("greedy_decoding", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_decodes_what_the_session_generates(decoder: Path, tmp_path: Path) -> None:
    example = _example()
    folder = example.export(decoder, tmp_path / "out")
    want = DecodeSession(folder / "original.onnx", max_length=9).generate(PROMPT, new_tokens=6)
    np.testing.assert_array_equal(example.greedy(folder, PROMPT, 6), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_language_models_decode_the_tokens_that_torch_does(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**small, **grouped),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64
        ),
        "gemma2": lambda: transformers.Gemma2Config(
            **small, **grouped, head_dim=16, sliding_window=5, query_pre_attn_scalar=16
        ),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[name]()).eval()
    model.save_pretrained(tmp_path / "model")
    example = _example()
    folder = example.export(tmp_path / "model", tmp_path / "out")
    with torch.no_grad():
        want = PROMPT
        for _ in range(10):
            last = model(input_ids=torch.tensor(want)).logits[:, -1].argmax(-1)
            want = np.concatenate([want, last.numpy()[:, None]], axis=1)
    np.testing.assert_array_equal(example.greedy(folder, PROMPT, 10), want)
