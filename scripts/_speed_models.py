"""Whole models in ``bench_speed``: a Hugging Face folder as exported, and as we rewrite it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from _speed_work import Candidate, Work


@dataclass(frozen=True)
class Decoder:
    """``read``: the prompt, into an empty cache. ``steps``: every new token; the last's logits."""

    read: Callable[[], None]
    steps: Callable[[], np.ndarray]


VARIANTS = {"raw": "original", "peer": "original", "fused": "original"}
"""Which file of an export a family runs; another is the target's own."""


def is_decoder(folder: Path) -> bool:
    """Whether the model predicts tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return any("CausalLM" in name for name in config.get("architectures", []))


def model_file(work: Work, candidate: Candidate) -> Path | str:
    """The graph that ``candidate`` runs, or why there is none.

    It is exported beside the model's folder the first time, and found there from then on. Of a
    decoder that generates it is the prompt's graph; :func:`step_file` is that of the steps.
    """
    from mha_export.errors import InputError
    from mha_export.jobs import ExportSettings, SourceSettings, export_model

    target = candidate.runtime.partition(":")[0]
    generates = work.kind == "generate"
    said = [candidate.form, candidate.cache if generates else "", candidate.weights]
    parts = [Path(work.model).name, target, *(part for part in said if part not in ("", "keep"))]
    out = Path(work.model).parent / "-".join(parts)
    if not out.exists():
        settings = ExportSettings(
            form=candidate.form or None,
            weights=candidate.weights,
            cache=candidate.cache if generates else "keep",
            split="prefill-decode" if generates else "none",
        )
        task = "text-generation" if is_decoder(Path(work.model)) else "feature-extraction"
        try:
            made = export_model(
                work.model,
                targets=[target],
                out=out,
                source_settings=SourceSettings(task=task),
                settings=settings,
            )
        except InputError as error:
            return str(error)
        if not made.ok:
            return "; ".join(made.notices)
    same = candidate.family == "fused" and candidate.form
    return out / f"{target if same else VARIANTS.get(candidate.family, target)}.onnx"


def step_file(file: Path) -> Path:
    """The graph of single tokens beside the prompt's; one graph may be both."""
    step = file.with_name(f"{file.stem}.decode.onnx")
    return step if step.exists() else file


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


def prompt_and_new(work: Work, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompt and of the steps after it, ids [1, n]: the same for everyone."""
    ids = np.random.default_rng(seed + 1).integers(5, 1000, (1, work.length + work.new))
    return ids[:, : work.length], ids[:, work.length :]


def session_decoder(work: Work, file: Path, options: Any, seed: int) -> Decoder:
    """Prompt and steps of an exported decoder."""
    from mha_export.decode import DecodeSession

    session = DecodeSession(
        file, step_model=step_file(file), max_length=work.length + work.new, options=options
    )
    prompt, new = prompt_and_new(work, seed)

    def read() -> None:
        session.reset()
        session.prefill(prompt)

    def steps() -> np.ndarray:
        for token in new.T:
            logits = session.step(token)
        return logits

    return Decoder(read=read, steps=steps)


def torch_decoder(work: Work, seed: int) -> Decoder:
    """Prompt and steps of the model itself, with the cache it comes with."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(work.model).eval()
    prompt, new = (torch.from_numpy(ids) for ids in prompt_and_new(work, seed))
    held: list[Any] = []

    def read() -> None:
        with torch.inference_mode():
            held[:] = [model(prompt, use_cache=True, logits_to_keep=1).past_key_values]

    def steps() -> np.ndarray:
        with torch.inference_mode():
            for token in new.T:
                made = model(token[:, None], past_key_values=held[0], use_cache=True)
        logits: np.ndarray = made.logits[:, -1].numpy()
        return logits

    return Decoder(read=read, steps=steps)
