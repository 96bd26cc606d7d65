"""DecodeSession: the same tokens as the whole model, one cache, errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_decoders import MASKED, Decoder

from mha_export.caches import Cached, with_cache
from mha_export.decode import CacheLayout, DecodeSession
from mha_export.errors import InputError
from mha_export.recognise import recognise
from mha_export.targets import evaluator_of

GROWTHS = ("concat", "static")
PROMPT = np.array([[3, 1, 4, 1], [5, 9, 2, 6]])


def _saved(decoder: Decoder, growth: str, path: Path) -> Path:
    cached = with_cache(recognise(decoder.model()), growth)  # type: ignore[arg-type]
    assert isinstance(cached, Cached)
    ir.save(cached.model, path)
    return path


def _session(decoder: Decoder, growth: str, folder: Path, room: int = 16) -> DecodeSession:
    path = _saved(decoder, growth, folder / f"{growth}.onnx")
    return DecodeSession(path, max_length=room if growth == "static" else None)


def _whole(decoder: Decoder, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    inputs = {"input_ids": ids.astype(np.int64)}
    if decoder is MASKED:
        inputs["attention_mask"] = (np.ones(ids.shape) if mask is None else mask).astype(np.int64)
    logits: np.ndarray = evaluator_of("cpu").run(decoder.model(), inputs)["logits"]
    return logits[:, -1]


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("decoder", [Decoder(), MASKED], ids=["plain", "masked"])
def test_generate_gives_the_tokens_of_the_whole_model(
    decoder: Decoder, growth: str, tmp_path: Path
) -> None:
    session = _session(decoder, growth, tmp_path)
    want = PROMPT
    for _ in range(6):
        want = np.concatenate([want, _whole(decoder, want).argmax(-1)[:, None]], axis=1)
    for _ in range(2):  # generate begins anew each time
        np.testing.assert_array_equal(session.generate(PROMPT, new_tokens=6), want)
    assert session.length == 9


@pytest.mark.parametrize("growth", GROWTHS)
def test_prompts_of_different_lengths_are_padded_on_the_left(growth: str, tmp_path: Path) -> None:
    session = _session(MASKED, growth, tmp_path)
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    got = session.prefill(PROMPT, mask=mask)
    np.testing.assert_allclose(got, _whole(MASKED, PROMPT, mask), atol=1e-4)
    got = session.step([7, 8])
    ids = np.concatenate([PROMPT, [[7], [8]]], axis=1)
    wide = np.concatenate([mask, np.ones((2, 1))], axis=1)
    np.testing.assert_allclose(got, _whole(MASKED, ids, wide), atol=1e-4)


def test_a_static_cache_stays_where_it_is(tmp_path: Path) -> None:
    session = _session(MASKED, "static", tmp_path)
    session.prefill(PROMPT)
    cache = session._cache
    assert cache is not None
    before = {name: value.data_ptr() for name, value in cache.buffers.items()}  # type: ignore[attr-defined]
    session.step([1, 2])
    session.step([3, 4])
    after = {name: value.data_ptr() for name, value in cache.buffers.items()}  # type: ignore[attr-defined]
    assert before == after
    rows = np.abs(next(iter(cache.buffers.values())).numpy()).sum((0, 1, 3))  # type: ignore[attr-defined]
    assert (rows[:6] > 0).all()
    assert (rows[6:] == 0).all()


def test_generation_ends_when_every_row_has_stopped(tmp_path: Path) -> None:
    session = _session(Decoder(), "concat", tmp_path)
    first = _whole(Decoder(), PROMPT[:1]).argmax(-1)
    got = session.generate(PROMPT[:1], new_tokens=6, stop_id=int(first[0]))
    assert got.shape == (1, 5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda s: s.prefill([1, 2]), "takes whole numbers", id="one axis"),
        pytest.param(lambda s: s.prefill([[1.5]]), "takes whole numbers", id="fractions"),
        pytest.param(lambda s: s.prefill([[1, 24]]), "id 24 at [0, 1]", id="beyond vocabulary"),
        pytest.param(lambda s: s.prefill([[-1]]), "id -1 at [0, 0]", id="negative"),
        pytest.param(lambda s: s.prefill([[1] * 17]), "the cache is full", id="too long"),
        pytest.param(lambda s: s.generate([[1, 2]], new_tokens=16), "cache is full", id="no room"),
        pytest.param(lambda s: (s.prefill([[1]]), s.step([1, 2])), "of 2 rows", id="other batch"),
        pytest.param(
            lambda s: s.prefill([[1, 2]], mask=[[1, 0]]), "the last token", id="padded right"
        ),
        pytest.param(lambda s: s.prefill([[1, 2]], mask=[[1]]), "has shape [1, 1]", id="mask"),
    ],
)
def test_an_error_says_what_was_expected(call: object, words: str, tmp_path: Path) -> None:
    session = _session(MASKED, "static", tmp_path)
    with pytest.raises(InputError) as caught:
        call(session)  # type: ignore[operator]
    assert words in str(caught.value)


def test_after_an_error_the_session_goes_on(tmp_path: Path) -> None:
    session = _session(MASKED, "static", tmp_path)
    session.prefill(PROMPT)
    with pytest.raises(InputError):
        session.step([99, 99])
    ids = np.concatenate([PROMPT, [[7], [8]]], axis=1)
    np.testing.assert_allclose(session.step([7, 8]), _whole(MASKED, ids), atol=1e-4)


def test_a_model_without_a_cache_is_told_how_to_get_one(tmp_path: Path) -> None:
    path = MASKED.saved(tmp_path / "bare.onnx")
    with pytest.raises(InputError, match="keeps no cache") as caught:
        DecodeSession(path)
    assert "--cache static" in str(caught.value)


def test_an_open_buffer_needs_a_length(tmp_path: Path) -> None:
    path = _saved(Decoder(), "static", tmp_path / "static.onnx")
    with pytest.raises(InputError, match="give max_length"):
        DecodeSession(path)


@pytest.mark.parametrize("room", [0, -1, True, 2.5, "16"])
@pytest.mark.parametrize("growth", GROWTHS)
def test_a_length_is_a_whole_number(growth: str, room: object, tmp_path: Path) -> None:
    path = _saved(Decoder(), growth, tmp_path / "decoder.onnx")
    with pytest.raises(InputError, match=r"max_length is .*; expected a whole number, 1 or more"):
        DecodeSession(path, max_length=room)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, 1.5, "2"])
def test_new_tokens_are_a_whole_number(count: object, tmp_path: Path) -> None:
    session = _session(Decoder(), "concat", tmp_path)
    with pytest.raises(InputError, match=r"new_tokens is .*; expected a whole number, 0 or more"):
        session.generate(PROMPT, new_tokens=count)  # type: ignore[arg-type]
    assert session.generate(PROMPT, new_tokens=0).shape == PROMPT.shape


def test_graphs_of_different_caches_are_not_mixed(tmp_path: Path) -> None:
    one = _saved(Decoder(), "concat", tmp_path / "one.onnx")
    other = _saved(Decoder(), "static", tmp_path / "other.onnx")
    with pytest.raises(InputError, match="different caches"):
        DecodeSession(one, step_model=other)


def test_a_layout_of_another_version_is_refused() -> None:
    with pytest.raises(InputError, match="version 2"):
        CacheLayout.from_json({"version": 2})
