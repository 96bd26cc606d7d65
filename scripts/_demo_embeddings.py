"""Compare sentence embeddings before and after: ``_demo_embeddings.py HF_FOLDER EXPORT_FOLDER``.

An embedding is the mean over the tokens of the last hidden state, scaled to length 1, as the
model's card says. Before: PyTorch. After: each exported file on its own runtime. Exits 1 where a
file is missing or a cosine is not above 0.999999.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt above a sleeping hound.",
    "Attention is a weighted mean of values.",
    "Bring an umbrella: the forecast says rain all afternoon, and wind from the west.",
    "Rain is expected.",
    "Where is the nearest train station?",
    "Multi-head attention lets the model attend to information from different representation "
    "subspaces at different positions.",
    "Yes.",
)
FLOOR = 0.999999

Inputs = dict[str, np.ndarray]


def tokenise(folder: Path) -> Inputs:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    return {
        "input_ids": np.array([item.ids for item in encodings], dtype=np.int64),
        "attention_mask": np.array([item.attention_mask for item in encodings], dtype=np.int64),
        "token_type_ids": np.array([item.type_ids for item in encodings], dtype=np.int64),
    }


def with_torch(folder: Path, inputs: Inputs) -> np.ndarray:
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        result = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    hidden: np.ndarray = result.last_hidden_state.numpy()
    return hidden


def with_onnxruntime(file: Path, inputs: Inputs) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    hidden: np.ndarray = session.run(["last_hidden_state"], inputs)[0]
    return hidden


def with_openvino(file: Path, inputs: Inputs) -> np.ndarray:
    import openvino

    # Without the hint OpenVINO computes in bfloat16 on a processor that has it.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", options)
    hidden: np.ndarray = compiled(inputs)["last_hidden_state"]
    return hidden


RUNTIMES: dict[str, Callable[[Path, Inputs], np.ndarray]] = {
    "cpu": with_onnxruntime,
    "openvino": with_openvino,
}


def embedding(hidden_bsm: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Unit vectors [b, m], in float64."""
    weights = mask[..., None].astype(np.float64)
    mean = (hidden_bsm * weights).sum(axis=1) / weights.sum(axis=1)
    unit: np.ndarray = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    return unit


def main(folder: Path, exported: Path) -> int:
    inputs = tokenise(folder)
    before = embedding(with_torch(folder, inputs), inputs["attention_mask"])
    worst = 1.0
    for target, run in RUNTIMES.items():
        file = exported / f"{target}.onnx"
        if not file.is_file():
            print(f"  {target:10} {file}: not exported")
            worst = 0.0
            continue
        after = embedding(run(file, inputs), inputs["attention_mask"])
        cosine = float((before * after).sum(axis=-1).min())
        worst = min(worst, cosine)
        print(f"  {target:10} least cosine over {len(SENTENCES)} sentences: {cosine:.9f}")
    if worst <= FLOOR:
        print(f"  expected a cosine above {FLOOR} on every runtime")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
