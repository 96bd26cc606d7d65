"""``genai_config.json``: its field names, and tokens where onnxruntime-genai is here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mha_export.bundle import genai_config
from mha_export.decode import CacheLayout, CacheTensor
from mha_export.errors import InputError

FIELDS = {
    "": {"model", "search"},
    "model": {
        *("type", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"),
        *("context_length", "decoder"),
    },
    "model.decoder": {
        *("filename", "hidden_size", "num_attention_heads", "num_key_value_heads"),
        *("num_hidden_layers", "head_size", "session_options", "inputs", "outputs"),
    },
    "model.decoder.session_options": {"log_id", "provider_options"},
    "model.decoder.inputs": {
        *("input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"),
    },
    "model.decoder.outputs": {"logits", "present_key_names", "present_value_names"},
    "search": {"do_sample", "max_length", "past_present_share_buffer"},
}
"""Names that onnxruntime-genai 0.18 reads (src/config.h, src/config.cpp); it refuses others."""

CONFIG = {
    "model_type": "llama",
    "eos_token_id": [2, 3],
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def layout(*, past: str = "past_{kind}_{layer}", **more: Any) -> CacheLayout:
    tensors = tuple(
        CacheTensor(
            past=past.format(kind=kind, layer=layer),
            present=f"present.{layer}.{kind}",
            axis=2,
            heads=2,
            dim=16,
        )
        for layer in range(2)
        for kind in ("key", "value")
    )
    return CacheLayout(
        **{
            "growth": "concat",
            "tensors": tensors,
            "tokens": ("input_ids",),
            "positions": "position_ids",
            "mask": "attention_mask",
            "logits": "logits",
            **more,
        }
    )


def objects(document: dict[str, Any], path: str = "") -> dict[str, set[str]]:
    found = {path: set(document)}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= objects(value, f"{path}.{name}".lstrip("."))
    return found


def test_it_states_names_that_are_read_and_no_others() -> None:
    document = genai_config(CONFIG, layout(), "cpu.onnx")
    assert objects(document) == FIELDS
    decoder = document["model"]["decoder"]
    assert decoder["inputs"]["past_key_names"] == "past_key_%d"
    assert decoder["outputs"]["present_value_names"] == "present.%d.value"
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (2, 16)
    assert (decoder["num_hidden_layers"], decoder["filename"]) == (2, "cpu.onnx")
    assert document["model"]["pad_token_id"] == 2


def test_inputs_that_the_graph_has_not_are_left_out() -> None:
    document = genai_config(CONFIG, layout(positions=None, mask=None), "cpu.onnx")
    stated = set(document["model"]["decoder"]["inputs"])
    assert stated == {"input_ids", "past_key_names", "past_value_names"}


@pytest.mark.parametrize(
    ("cache", "config", "words"),
    [
        pytest.param(None, CONFIG, "keeps no cache", id="no cache"),
        pytest.param(
            layout(growth="static", total_length="total_length"),
            CONFIG,
            "does not drive a static cache",
            id="static cache",
        ),
        pytest.param(layout(past="p_{kind}"), CONFIG, "not numbered by layer", id="no numbers"),
        pytest.param(
            layout(),
            {name: value for name, value in CONFIG.items() if name != "vocab_size"},
            "states no vocab_size",
            id="a number missing",
        ),
    ],
)
def test_what_it_cannot_drive_is_refused(
    cache: CacheLayout | None, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        genai_config(config, cache, "cpu.onnx")


PROGRAM = """
import json, sys
import numpy as np
import onnxruntime_genai as genai

folder, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = genai.Model(folder)
parameters = genai.GeneratorParams(model)
parameters.set_search_options(max_length=len(prompt) + count)
generator = genai.Generator(model, parameters)
generator.append_tokens(np.array([prompt], np.int32))
tokens = []
while not generator.is_done():
    generator.generate_next_token()
    tokens.append(int(generator.get_next_tokens()[0]))
print(json.dumps(tokens))
"""


def test_onnxruntime_genai_generates_the_known_tokens(decoder: Path) -> None:
    if importlib.util.find_spec("onnxruntime_genai") is None:
        pytest.skip("onnxruntime-genai is not installed: pip install onnxruntime-genai")
    known = json.loads((decoder / "manifest.json").read_bytes())["generation"]
    words = [str(decoder / "model"), json.dumps(known["prompt"]), str(len(known["tokens"]))]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == known["tokens"]
