"""Whole models in ``bench_speed``: a Hugging Face folder as exported, and as we rewrite it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from _speed_work import Candidate, Work

VARIANTS = {"raw": "original", "peer": "original", "fused": "original"}
"""Which file of an export a family runs; another is the target's own."""


def is_decoder(folder: Path) -> bool:
    """Whether the model predicts tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return any("CausalLM" in name for name in config.get("architectures", []))


def model_file(work: Work, candidate: Candidate) -> Path | str:
    """The graph that ``candidate`` runs, or why there is none.

    It is exported beside the model's folder the first time, and found there from then on.
    """
    from mha_export.jobs import SourceSettings, export_model

    target = candidate.runtime.partition(":")[0]
    out = Path(work.model).parent / f"{Path(work.model).name}-{target}"
    if not out.exists():
        task = "text-generation" if is_decoder(Path(work.model)) else "feature-extraction"
        made = export_model(
            work.model, targets=[target], out=out, source_settings=SourceSettings(task=task)
        )
        if not made.ok:
            return "; ".join(made.notices)
    return out / f"{VARIANTS.get(candidate.family, target)}.onnx"


def token_arrays(work: Work, file: Path | None, seed: int) -> dict[str, np.ndarray]:
    """Tokens without padding: those of the usual inputs that ``file`` has, or, without, torch's."""
    shape = (work.batch, work.length)
    rng = np.random.default_rng(seed + 1)
    found = {
        "input_ids": rng.integers(5, 1000, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
        "position_ids": np.broadcast_to(np.arange(work.length), shape).copy(),
    }
    if file is None:
        return {name: found[name] for name in ("input_ids", "attention_mask")}
    names = {value.name for value in ir.load(file).graph.inputs}
    return {name: array for name, array in found.items() if name in names}


def torch_model(work: Work, arrays: dict[str, Any]) -> Callable[[], Any]:
    """One forward pass of the model itself."""
    import transformers

    folder = Path(work.model)
    kind = transformers.AutoModelForCausalLM if is_decoder(folder) else transformers.AutoModel
    model = kind.from_pretrained(folder).eval()
    options = {"use_cache": False} if is_decoder(folder) else {}
    return lambda: model(**arrays, **options)[0]
