"""Small Hugging Face folders with seeded random weights, and one way to run what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

Run = Callable[[ir.Model, Mapping[str, Any]], list[np.ndarray]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a model on ONNX Runtime's CPU provider and return its outputs in order."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="runs what was exported")
    folder = tmp_path_factory.mktemp("run")

    def call(model: ir.Model, inputs: Mapping[str, Any]) -> list[np.ndarray]:
        path = folder / "model.onnx"
        ir.save(model, path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        feeds = {name: np.asarray(value) for name, value in inputs.items()}
        outputs: list[np.ndarray] = session.run(None, feeds)
        return outputs

    return call


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers", reason="writes the folders under test")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return _saved(transformers.BertModel, config, tmp_path_factory.mktemp("hf") / "tiny-bert")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers", reason="writes the folders under test")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    return _saved(transformers.LlamaForCausalLM, config, folder)


def _saved(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model_class(config).eval().save_pretrained(folder)
    return folder
