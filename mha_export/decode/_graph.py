"""One decoder graph on ONNX Runtime: what it reads and gives, checked before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_export.decode.layout import CacheLayout
from mha_export.errors import InputError

if TYPE_CHECKING:
    from mha_export.decode._cache import Cache

_DTYPES = {
    "tensor(bool)": np.bool_,
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}


class DecoderGraph:
    """A session and the layout of its cache.

    Errors:
        InputError: not a model that ONNX Runtime loads, or one that does not say how it keeps keys
            and values.
    """

    def __init__(self, path: Path, providers: Sequence[str], options: Any) -> None:
        import onnxruntime

        if not path.is_file():
            raise InputError(f"{path}: no such file", fix="give an exported .onnx file")
        self.path = path
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=list(providers)
            )
        except Exception as error:  # the runtime's own kinds
            raise InputError(f"{path} does not load: {error}") from error
        layout = CacheLayout.from_metadata(self.session.get_modelmeta().custom_metadata_map)
        if layout is None:
            raise InputError(
                f"{path.name} keeps no cache that it describes",
                fix=f"mha-export export {path.name} --cache static -t cpu -o DIR, "
                "then use DIR/cpu.onnx",
            )
        self.layout: CacheLayout = layout
        self._inputs = {item.name: item for item in self.session.get_inputs()}
        outputs = {item.name: item for item in self.session.get_outputs()}
        last = outputs[layout.logits].shape[-1]
        self._vocabulary = last if isinstance(last, int) else None

    def dtype(self, name: str) -> np.dtype:
        """The element type of an input.

        Errors:
            InputError: one that numpy has no name for.
        """
        kind = self._inputs[name].type
        if kind not in _DTYPES:
            raise InputError(
                f"{self.path.name}: input '{name}' is {kind}, which numpy can't hold",
                fix="export with --dtype fp16 or fp32",
            )
        return np.dtype(_DTYPES[kind])

    def buffer_length(self) -> int | None:
        """The length of a static cache, where the file fixes it."""
        tensor = self.layout.tensors[0]
        size = self._inputs[tensor.past].shape[tensor.axis]
        return size if isinstance(size, int) else None

    def checked_tokens(self, tokens: Any) -> np.ndarray:
        """Ids or embeddings as the graph reads them.

        Errors:
            InputError: another rank or kind, no tokens, or an id beyond the vocabulary.
        """
        name = self.layout.tokens[0]
        array, dtype = np.asarray(tokens), self.dtype(name)
        rank = len(self._inputs[name].shape)
        kinds = "iu" if dtype.kind in "iu" else "f"
        if array.ndim != rank or array.dtype.kind not in kinds or not array.size:
            wanted = "whole numbers [batch, n]" if kinds == "iu" else "numbers [batch, n, width]"
            raise InputError(
                f"'{name}' takes {wanted}; got {array.dtype} of shape {list(array.shape)}",
                fix="give one row a sequence: [[5, 7, 9]] is one of three tokens",
            )
        wrong = array < 0 if kinds == "iu" else np.zeros(1, np.bool_)
        if kinds == "iu" and self._vocabulary is not None and self._is_logits():
            wrong |= array >= self._vocabulary
        if wrong.any():
            row, place = np.argwhere(wrong)[0][:2]
            raise InputError(
                f"id {array[row, place]} at [{row}, {place}] is none of the vocabulary's "
                f"{self._vocabulary}"
            )
        return np.ascontiguousarray(array, dtype)

    def feeds(
        self,
        tokens: np.ndarray,
        keep: np.ndarray,
        *,
        start: int,
        room: int | None,
        more: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Every input but the cache, for tokens that come after ``start`` others.

        Errors:
            InputError: an input that nothing is known of was not given.
        """
        layout, count = self.layout, tokens.shape[1]
        found: dict[str, np.ndarray] = {**more, layout.tokens[0]: tokens}
        if layout.positions is not None:
            places = np.maximum(np.cumsum(keep, axis=1) - 1, 0)[:, start:]
            found[layout.positions] = places.astype(self.dtype(layout.positions))
        if layout.mask is not None:
            mask = keep.astype(self.dtype(layout.mask))
            if layout.growth == "static":
                assert room is not None
                mask = np.pad(mask, [(0, 0), (0, room - mask.shape[1])])
            found[layout.mask] = mask
        if layout.total_length is not None:
            found[layout.total_length] = np.array([start + count], np.int64)
        caches = {tensor.past for tensor in layout.tensors}
        missing = [name for name in self._inputs if name not in found and name not in caches]
        if missing:
            raise InputError(
                f"{self.path.name} also reads {', '.join(missing)}",
                fix=f"give them: inputs={{'{missing[0]}': ...}}",
            )
        return found

    def run(self, feeds: Mapping[str, np.ndarray], cache: Cache, count: int) -> np.ndarray:
        """One run; the cache then holds ``count`` tokens more. Returns the logits."""
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(self.layout.logits)
        cache.bind(binding)
        self.session.run_with_iobinding(binding)
        bound = [self.layout.logits, *cache.presents]  # in the order in which they were bound
        values = dict(zip(bound, binding.get_outputs(), strict=True))
        cache.advance(values, count)
        logits: np.ndarray = values[self.layout.logits].numpy()
        return logits

    def _is_logits(self) -> bool:
        """Whether the last axis of the output is a vocabulary, and no hidden state."""
        return self.layout.logits == "logits"
