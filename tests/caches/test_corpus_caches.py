"""Real exports: which decoders get a cache, and why the others do not.

The files of ``graphs/corpus``; ``scripts/corpus_check`` holds a larger folder to more.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from mha_export.caches import Cached, layout_of, prove_steps, with_cache
from mha_export.recognise import recognise
from mha_export.targets import evaluator_of

CORPUS = Path(__file__).parents[2] / "graphs/corpus"

DECODERS = (
    "clip_text", "deepseek_v3-eager.dynamo", "gemma2", "gpt2-", "gpt_oss", "llama", "mistral",
    "nanogpt", "phi3", "qwen", "sdpa_causal", "sdpa_gqa",
)  # fmt: skip
"""Beginnings of the files that hold a decoder."""
CACHED = ("gpt2_kv", "llama_kv")
ENCODERS = ("bert", "deberta", "mha_kpm", "t5_enc", "timm", "unet")


def _files(beginnings: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in CORPUS.glob("*.onnx") if path.name.startswith(beginnings))


def _name(path: Path) -> str:
    return path.stem


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["concat", "static"])
@pytest.mark.parametrize(
    "path", [p for p in _files(DECODERS) if not p.name.startswith(CACHED)], ids=_name
)
def test_a_decoder_gets_a_cache(path: Path, growth: str) -> None:
    model = ir.load(path)
    cached = with_cache(recognise(model), growth)  # type: ignore[arg-type]
    assert isinstance(cached, Cached), cached
    proof = prove_steps(model, cached, evaluator=evaluator_of("cpu"))
    assert proof.status == "pass", proof.reason


@pytest.mark.slow
@pytest.mark.parametrize("path", _files(CACHED), ids=_name)
def test_a_concat_cache_is_described_and_becomes_static(path: Path) -> None:
    model = ir.load(path)
    found = recognise(model)
    layout = layout_of(found)
    assert layout is not None
    static = with_cache(found, "static")
    assert isinstance(static, Cached), static
    assert [t.past for t in static.layout.tensors] == [t.past for t in layout.tensors]
    proof = prove_steps(model, static, evaluator=evaluator_of("cpu"))
    assert proof.status == "pass", proof.reason


@pytest.mark.parametrize("path", _files(ENCODERS), ids=_name)
def test_an_encoder_gets_none(path: Path) -> None:
    found = with_cache(recognise(ir.load(path)), "concat")
    assert not isinstance(found, Cached)
    assert found.code in ("bidirectional", "cross-attention", "length-fixed")
