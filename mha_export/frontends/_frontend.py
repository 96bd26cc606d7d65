"""What a frontend is: one kind of source, read into one ``onnx_ir.Model``.

A frontend is one file of this package that defines ``FRONTEND``. Sources tell by what they *are*
(a folder, a suffix, a type), so at most one frontend accepts a source; torch and transformers are
imported inside ``load``, never to answer ``accepts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir

from mha_export.spec import DType

ExporterName = Literal["auto", "dynamo", "legacy"]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How a source is read. Options that a source has no use for are ignored by its frontend.

    Attributes:
        task: what a Hugging Face model is exported for (``text-generation-with-past``); None
            takes what ``config.json`` says the weights were made for.
        dims: sizes of the sample inputs by axis name (``batch``, ``seq``, ``past_seq``). They
            are sizes of a sample, not of the export: its axes stay symbolic.
        shapes: sizes of the sample inputs by input name, for a torch module.
        inputs: values of a torch module's arguments by parameter name; tensors or arrays become
            inputs of the graph, anything else (a flag, None) is fixed in it.
        opset: ``ai.onnx`` version an exporter or a form writes; None: its own default. It does
            not change an ``.onnx`` source.
        exporter: ``dynamo`` (torch.export), ``legacy`` (tracing), or ``auto``: dynamo, and legacy
            where that fails, with a note.
        form: what a bare specification is stated in.
        dtype: element type of a bare specification; other sources keep their own.
        trust_code: a source may run code that comes with it.
        seed: of every sample input and random weight.
    """

    task: str | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    opset: int | None = None
    exporter: ExporterName = "auto"
    form: str = "primitive"
    dtype: DType | None = None
    trust_code: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A source as the rest of the package sees it.

    Attributes:
        model: the graph; its tensors are numpy arrays or files, never torch tensors.
        name: short, for file names and reports.
        sha256: of the model's content (graph and weights); the same for the same model, whether
            its weights lie inside, in other files, or are written as text.
        origin: where it came from, in words (``Hugging Face folder /models/minilm``).
        notes: what a reader of the report should know about how it was read.
        sample_inputs: inputs of the graph by name that make sense to the model (token ids below
            the vocabulary, a mask of zeros and ones), or None where nothing is known.
    """

    model: ir.Model
    name: str
    sha256: str
    origin: str
    notes: tuple[str, ...] = ()
    sample_inputs: Mapping[str, np.ndarray] | None = None


@runtime_checkable
class Frontend(Protocol):
    """Reads one kind of source."""

    name: str
    summary: str
    """What it reads, as a person would write it (``a Hugging Face folder``)."""

    def accepts(self, source: object) -> bool:
        """Whether the source is of this kind, by its type, name or place. Reads no content."""
        ...

    def load(self, source: object, options: SourceOptions) -> LoadedModel:
        """The source as one graph.

        Errors:
            mha_export.errors.InputError: it is missing, damaged, or cannot be exported; the
                message says which and what to do.
        """
        ...
