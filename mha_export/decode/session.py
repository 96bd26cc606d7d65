"""A decoder on ONNX Runtime that keeps its cache: prefill, step, generate.

Needs onnxruntime and numpy, and a file that carries its cache layout (:mod:`.layout`). The cache
never passes through Python: presents of a concat cache are bound as the next pasts where they lie;
a static cache is one buffer, bound as past and present, and written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.decode._cache import Cache, ConcatCache, StaticCache
from mha_export.decode._graph import DecoderGraph
from mha_export.decode.layout import CacheLayout
from mha_export.errors import InputError

PROVIDERS = ("CPUExecutionProvider",)


class DecodeSession:
    """One sequence (or a batch of them) being decoded.

    Example::

        session = DecodeSession("out/cpu.onnx", max_length=512)
        tokens = session.generate(prompt, new_tokens=32)

    Args:
        model: an exported decoder with a cache.
        step_model: the decoder's graph for single tokens, where it was exported as two; it reads
            the same cache.
        max_length: length of a static cache, in tokens. Required where the file leaves it open.
        providers: execution providers of ONNX Runtime, best first.
        options: ``onnxruntime.SessionOptions``.

    Errors:
        InputError: no such file; a model without a cache layout; two graphs with different caches;
            a ``max_length`` that is no whole number of 1 or more.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        step_model: str | Path | None = None,
        max_length: int | None = None,
        providers: Sequence[str] = PROVIDERS,
        options: Any = None,
    ) -> None:
        self._prefill = DecoderGraph(Path(model), providers, options)
        self._step = self._prefill
        if step_model is not None:
            self._step = DecoderGraph(Path(step_model), providers, options)
            if self._step.layout != self._prefill.layout:
                raise InputError(
                    f"{step_model} and {model} have different caches",
                    fix="use the two graphs of one export",
                )
        self.layout: CacheLayout = self._prefill.layout
        self._max_length = self._room(max_length)
        self._cache: Cache | None = None
        self._mask: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self._cache is None else self._cache.length

    @property
    def max_length(self) -> int | None:
        """Tokens a static cache has room for; None: it grows."""
        return self._max_length

    def reset(self) -> None:
        """Forget the sequence. The buffers of a static cache are kept."""
        self._mask = None
        if self._cache is not None:
            self._cache.reset()

    def prefill(
        self,
        tokens: Any,
        *,
        mask: Any = None,
        inputs: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Read a prompt, after what is in the cache already.

        Args:
            tokens: ids [batch, n], or embeddings [batch, n, m] where the model reads those.
            mask: [batch, n], nonzero where a token takes part: prompts of different lengths are
                padded on the left. None: all do.
            inputs: what else the graph reads, by name.

        Returns:
            Logits of the last token, [batch, vocabulary].

        Errors:
            InputError: tokens of another shape, kind or batch than expected; a full cache.
        """
        return self._run(self._prefill, tokens, mask, inputs or {})

    def step(self, tokens: Any, *, inputs: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Read one more token of each row, ids [batch] or [batch, 1].

        Returns:
            Its logits, [batch, vocabulary].

        Errors:
            InputError: as :meth:`prefill`.
        """
        array = np.asarray(tokens)
        if array.ndim == 1:
            array = array[:, None]
        return self._run(self._step, array, None, inputs or {})

    def generate(
        self,
        tokens: Any,
        *,
        new_tokens: int,
        mask: Any = None,
        stop_id: int | None = None,
    ) -> np.ndarray:
        """The prompt and the most likely ``new_tokens`` after it, ids [batch, n + new].

        A row that has come to ``stop_id`` repeats it; when all have, the loop ends.

        Errors:
            InputError: as :meth:`prefill`; the cache has no room for all of them; ``new_tokens`` is
            no whole number of 0 or more.
        """
        prompt = np.asarray(tokens)
        _require_count("new_tokens", new_tokens, least=0)
        self.reset()
        if self._max_length is not None and prompt.ndim == 2:
            self._check_room(prompt.shape[1] + new_tokens - 1)
        logits = self.prefill(prompt, mask=mask)
        found = [prompt.astype(np.int64)]
        done = np.zeros(prompt.shape[0], np.bool_)
        for count in range(new_tokens):
            chosen = np.argmax(logits, axis=-1)
            if stop_id is not None:
                chosen = np.where(done, stop_id, chosen)
                done |= chosen == stop_id
            found.append(chosen[:, None].astype(np.int64))
            if count + 1 == new_tokens or done.all():
                break
            logits = self.step(chosen)
        return np.concatenate(found, axis=1)

    def _run(
        self,
        graph: DecoderGraph,
        tokens: Any,
        mask: Any,
        inputs: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        array = graph.checked_tokens(tokens)
        batch, count = array.shape[:2]
        if self._cache is None or (self._cache.length == 0 and self._cache.batch != batch):
            self._cache = self._new_cache(batch)
        cache = self._cache
        if batch != cache.batch:
            raise InputError(
                f"the tokens are of {batch} rows; the cache holds {cache.batch}",
                fix="call reset() before another batch",
            )
        self._check_room(cache.length + count)
        keep = self._longer_mask(mask, batch, count)
        feeds = graph.feeds(array, keep, start=cache.length, room=self._max_length, more=inputs)
        logits = graph.run(feeds, cache, count)
        self._mask = keep
        return logits if logits.ndim == 2 else logits[:, -1]

    def _new_cache(self, batch: int) -> Cache:
        if self.layout.growth == "concat":
            return ConcatCache(self._prefill, batch)
        assert self._max_length is not None
        return StaticCache(self._prefill, batch, self._max_length)

    def _room(self, asked: int | None) -> int | None:
        if asked is not None:
            _require_count("max_length", asked, least=1)
        if self.layout.growth == "concat":
            return asked
        fixed = self._prefill.buffer_length()
        if asked is None and fixed is None:
            raise InputError(
                f"{self._prefill.path.name} leaves the length of its cache open",
                fix="give max_length: the most tokens, the prompt counted, of one sequence",
            )
        if asked is not None and fixed is not None and asked != fixed:
            raise InputError(
                f"{self._prefill.path.name} has a cache of {fixed} tokens; max_length is {asked}",
                fix=f"leave max_length out, or make it {fixed}",
            )
        return asked or fixed

    def _check_room(self, wanted: int) -> None:
        if self._max_length is not None and wanted > self._max_length:
            raise InputError(
                f"the cache is full: it has room for {self._max_length} tokens, {self.length} are "
                f"in it, and {wanted} would be",
                fix="make the session with a larger max_length, or call reset()",
            )

    def _longer_mask(self, mask: Any, batch: int, count: int) -> np.ndarray:
        """Which of all tokens take part, [batch, length + count]."""
        if mask is None:
            new = np.ones((batch, count), np.bool_)
        else:
            if self.layout.mask is None:
                raise InputError(
                    f"{self._prefill.path.name} has no mask: every token takes part",
                    fix="give prompts of one length, without a mask",
                )
            new = np.asarray(mask) != 0
            if new.shape != (batch, count):
                raise InputError(
                    f"the mask has shape {list(new.shape)}; expected [{batch}, {count}], "
                    "as the tokens"
                )
            if not new[:, -1].all():
                raise InputError(
                    "the mask leaves out the last token of a prompt",
                    fix="pad shorter prompts on the left",
                )
        return new if self._mask is None else np.concatenate([self._mask, new], axis=1)


def _require_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number, {least} or more")
