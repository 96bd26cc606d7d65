"""A decoder's cache from outside: which inputs and outputs hold it, and how it grows.

The layout travels in the ONNX file itself, as JSON under :data:`KEY` of the model's
``metadata_props``, and in ``export.json``. See docs/caches.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mha_export.errors import InputError

KEY = "mha_export.cache"
VERSION = 1

Growth = Literal["concat", "static"]


@dataclass(frozen=True, kw_only=True)
class CacheTensor:
    """One tensor of the cache: an input, and the output that takes its place in the next step.

    Attributes:
        past: name of the input. present: name of the output.
        axis: the axis of the tokens.
        heads, dim: key/value heads, and the width of one.
    """

    past: str
    present: str
    axis: int
    heads: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The cache of one decoder.

    Attributes:
        growth: ``concat``: ``present = past ++ new``, past inputs start with 0 tokens. ``static``:
            buffers of a fixed length, of which ``present`` is the same buffer with the new tokens
            written in; one buffer may be bound as both.
        tensors: every cache tensor, keys and values of each layer in turn.
        tokens: inputs of the new tokens alone, [batch, new, ...]: ids or embeddings first.
        positions: input of the positions of the new tokens [batch, new], or None: the graph counts.
        mask: input [batch, t], nonzero where a token takes part; t is past and new tokens together,
            or with a static cache the length of the buffer. None: every token takes part.
        total_length: static only: input [1], tokens in all, the new ones counted.
        logits: output [batch, new, vocabulary] (or [batch, vocabulary], the last token's).
    """

    growth: Growth
    tensors: tuple[CacheTensor, ...]
    tokens: tuple[str, ...]
    positions: str | None = None
    mask: str | None = None
    total_length: str | None = None
    logits: str

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    def to_text(self) -> str:
        """As it stands in ``metadata_props``."""
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CacheLayout:
        """Read what :meth:`to_json` wrote.

        Errors:
            InputError: another version, or not a layout.
        """
        version = document.get("version")
        if version != VERSION:
            raise InputError(
                f"the cache layout is of version {version!r}; this package reads {VERSION}",
                fix="export the model again, or update mha_export",
            )
        fields = {key: value for key, value in document.items() if key != "version"}
        try:
            tensors = tuple(CacheTensor(**row) for row in fields.pop("tensors"))
            tokens = tuple(fields.pop("tokens"))
            return cls(tensors=tensors, tokens=tokens, **fields)
        except (KeyError, TypeError) as error:
            raise InputError(f"not a cache layout: {error}", fix="export the model again") from None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> CacheLayout | None:
        """The layout in a model's ``metadata_props``, or None where there is none.

        Errors:
            InputError: as :meth:`from_json`.
        """
        text = metadata.get(KEY)
        return None if text is None else cls.from_json(json.loads(text))
