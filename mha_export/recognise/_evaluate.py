"""Values of a graph at concrete sizes: shapes of anything, contents of what does not need activations.

A mask or a rotary table is computed from shapes, constants and perhaps an ``attention_mask``. What
it *is* shows when it is evaluated: :class:`SizedView` gives shapes and arrays at one choice of
sizes (and of contents for chosen values), on demand and memoised; :class:`Context` holds the
views of one graph, so a value shared by all layers is evaluated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from mha_export.evaluator import Evaluator


class SizedView:
    """One graph with numbers for its symbolic dimensions and arrays for some of its values."""

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """The concrete shape, or None where it depends on data."""
        raise NotImplementedError

    def array(self, value: ir.Value) -> np.ndarray | None:
        """The content, or None where it depends on an input that was given no content."""
        raise NotImplementedError


class Context:
    """What recognition by evaluation knows of one graph; every memo lives here.

    Args:
        model: the recogniser's own copy: values that no node computes yet (an inverted padding
            mask, a rotary table without its broadcast axis) are derived by nodes added to it.
        evaluator: runs ops this package has no numpy rule for; None: onnx's reference.
    """

    def __init__(self, model: ir.Model, *, evaluator: Evaluator | None = None) -> None:
        self.model = model
        self.evaluator = evaluator

    def sized(
        self, sizes: Mapping[str, int], contents: Mapping[ir.Value, np.ndarray] | None = None
    ) -> SizedView:
        """The graph at ``sizes`` (symbol -> number), ``contents`` standing for some values."""
        raise NotImplementedError

    def sources(self, value: ir.Value) -> frozenset[ir.Value]:
        """Graph inputs whose *content* (not only shape) the value depends on."""
        raise NotImplementedError

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The content of a constant, initializer or value computed from constants alone."""
        raise NotImplementedError

    def derive(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, object] | None = None,
        *,
        before: ir.Node,
        domain: str = "",
    ) -> ir.Value:
        """A value computed by a node put before ``before``; equal requests share one node."""
        raise NotImplementedError
