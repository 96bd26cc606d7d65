"""Greedy decoding with a cache: one export, then a loop of steps.

    python docs/examples/greedy_decoding.py FOLDER_OF_A_LANGUAGE_MODEL

``FOLDER`` is what ``save_pretrained`` wrote (or any export of a decoder with logits). The decoder
gets a static cache and two graphs: one reads the prompt, one reads single tokens.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from mha_export.decode import DecodeSession
from mha_export.jobs import ExportSettings, SourceSettings, export_model


def export(source: str | Path, out: str | Path, *, cache: str = "static") -> Path:
    """Write the prefill and decode graphs of a decoder for ONNX Runtime on the CPU."""
    export_model(
        source,
        targets=["cpu"],
        out=out,
        source_settings=SourceSettings(task="text-generation"),
        settings=ExportSettings(cache=cache, split="prefill-decode"),
    )
    return Path(out)


def greedy(folder: Path, prompt: np.ndarray, new_tokens: int) -> np.ndarray:
    """The prompt [batch, n] and the most likely tokens after it, step by step."""
    session = DecodeSession(
        folder / "cpu.onnx",
        step_model=folder / "cpu.decode.onnx",
        max_length=prompt.shape[1] + new_tokens,
    )
    logits = session.prefill(prompt)
    found = [prompt]
    for _ in range(new_tokens):
        token = logits.argmax(axis=-1)
        found.append(token[:, None])
        if len(found) <= new_tokens:
            logits = session.step(token)
    return np.concatenate(found, axis=1)


def main() -> None:
    """Export the model named on the command line and decode a prompt of three tokens."""
    with tempfile.TemporaryDirectory() as out:
        folder = export(sys.argv[1], out)
        print(greedy(folder, np.array([[1, 2, 3]], np.int64), 16))


if __name__ == "__main__":
    main()
