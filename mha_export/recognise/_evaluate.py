"""Values of a graph at concrete sizes: shapes of anything, contents of what needs no activations.

A mask or a rotary table is computed from shapes, constants and perhaps an ``attention_mask``. What
it *is* shows when it is evaluated: :class:`SizedView` gives shapes and arrays at one choice of
sizes (and of contents for chosen values), on demand and memoised; :class:`Context` holds what is
known of one graph, so a value shared by all layers is looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.evaluator import Evaluator
from mha_export.recognise._evaluate_bodies import holders_of
from mha_export.recognise._evaluate_contents import attributes_of
from mha_export.recognise._evaluate_view import SHAPE_ONLY, SizedView

__all__ = ["Context", "SizedView"]

_OPAQUE = frozenset(
    {
        "Attention", "Bernoulli", "Conv", "ConvTranspose", "GRU", "Gemm", "GroupQueryAttention",
        "If", "LSTM", "LayerNormalization", "Loop", "MatMul", "MatMulInteger", "Multinomial",
        "MultiHeadAttention", "NonZero", "RMSNormalization", "RNN", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Scan", "Softmax", "Unique",
    }
)  # fmt: skip
"""Ops whose result counts as a source of its own once it depends on any source: activations."""


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
        self.opset = model.opset_imports.get("", 1)
        self.memo: dict[object, Any] = {}
        """Verdicts of the readers, keyed by reader and value."""
        self._sources: dict[ir.Value, frozenset[ir.Value]] = {}
        self._derived: dict[object, tuple[ir.Value, ...]] = {}
        self._constants: set[ir.Node] = set()
        """Constant nodes put at the start of a graph."""
        self._names: set[str | None] | None = None
        self._views: dict[object, SizedView] = {}
        self._literals: dict[ir.Value, np.ndarray | None] = {}
        self._signatures: dict[tuple[object, ir.Value], int] = {}
        self._interned: dict[object, int] = {}
        self._holders = holders_of(model)
        self._base = self.sized({})

    def sized(
        self,
        sizes: Mapping[str, int],
        contents: Mapping[ir.Value, np.ndarray] | None = None,
        *,
        wide: bool = False,
    ) -> SizedView:
        """The graph at ``sizes`` (symbol -> number), ``contents`` standing for some values.

        Views without contents are kept; one with contents starts from the shapes they know.
        """
        key = (tuple(sorted(sizes.items())), wide)
        plain = self._views.get(key)
        if plain is None:
            plain = self._view(sizes, {}, wide, None)
            self._views[key] = plain
        return self._view(sizes, contents, wide, plain) if contents else plain

    def prefer(self, sizes: Mapping[str, int], shapes: Mapping[ir.Value, tuple[int, ...]]) -> None:
        """Look at regions at these sizes first, whose shapes are known already (never None)."""
        plain = self.sized(sizes)
        for view in (plain, self.sized(sizes, wide=True)):
            view.know(shapes)
        self.memo["region sizes"] = dict(sizes)

    def forget(self, sizes: Mapping[str, int]) -> None:
        """Let go of what was computed at these sizes (large ones hold large arrays)."""
        for wide in (False, True):
            self._views.pop((tuple(sorted(sizes.items())), wide), None)

    def _view(
        self,
        sizes: Mapping[str, int],
        contents: Mapping[ir.Value, np.ndarray],
        wide: bool,
        known: SizedView | None,
    ) -> SizedView:
        return SizedView(
            sizes,
            contents,
            wide=wide,
            opset=self.opset,
            evaluator=self.evaluator,
            literals=self._literals,
            holders=self._holders,
            known=known,
        )

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The content of a constant, initializer or value computed from constants alone."""
        return None if value is None else self._base.array(value)

    def sources(self, value: ir.Value) -> frozenset[ir.Value]:
        """The values whose *content* (not only shape) decides this one.

        Graph inputs and subgraph inputs are sources; an activation (the result of a projection,
        an embedding lookup, a convolution, a subgraph) is a source itself.
        """
        stack = [value]
        while stack:
            current = stack[-1]
            if current in self._sources:
                stack.pop()
                continue
            needed = _content_inputs(current)
            missing = [item for item in needed if item not in self._sources]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self._sources[current] = self._own_sources(current, needed)
        return self._sources[value]

    def content_inputs(self, value: ir.Value) -> list[ir.Value]:
        """The inputs whose content decides the value's; none where only shapes do."""
        return _content_inputs(value)

    def literal(self, value: ir.Value) -> np.ndarray | None:
        """The content of an initializer or Constant node, nothing computed."""
        node = value.producer()
        stored = value.const_value is not None or (node is not None and node.op_type == "Constant")
        return self.constant(value) if stored else None

    def _own_sources(self, value: ir.Value, needed: Sequence[ir.Value]) -> frozenset[ir.Value]:
        node = value.producer()
        if node is None:
            return frozenset() if value.const_value is not None else frozenset({value})
        own = frozenset().union(*(self._sources[item] for item in needed))
        lookup = node.op_type == "Gather" and own and self._is_float_table(node.inputs[0])
        opaque = node.op_type in _OPAQUE and (own or not needed or _has_subgraph(node))
        return frozenset({value}) if lookup or opaque else own

    def _is_float_table(self, value: ir.Value | None) -> bool:
        array = None if value is None else self.literal(value)
        return array is not None and array.ndim > 1 and array.dtype.kind not in "iub"

    def signature(self, value: ir.Value, plans: Sequence[Mapping[str, int]]) -> int:
        """The same number for values computed alike from the same sources, and from shapes that are
        the same at every one of ``plans``: layers that build the same mask anew are seen to.
        """
        which = tuple(tuple(sorted(sizes.items())) for sizes in plans)
        views = [self.sized(sizes) for sizes in plans]
        stack = [value]
        while stack:
            current = stack[-1]
            if (which, current) in self._signatures:
                stack.pop()
                continue
            leaf = self.sources(current) == frozenset({current})
            inner = [] if leaf else _content_inputs(current)
            missing = [item for item in inner if (which, item) not in self._signatures]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            parts = tuple(self._signatures[(which, item)] for item in inner)
            key = (current,) if leaf else self._stated(current, parts, views)
            self._signatures[(which, current)] = self._interned.setdefault(key, len(self._interned))
        return self._signatures[(which, value)]

    def _stated(
        self, value: ir.Value, parts: tuple[int, ...], views: Sequence[SizedView]
    ) -> tuple[object, ...]:
        node = value.producer()
        literal = self.literal(value)
        if literal is not None:
            small = literal.size <= 4096
            return (literal.dtype.str, literal.shape, literal.tobytes() if small else value)
        if node is None:
            return (value,)
        attributes = repr(sorted(attributes_of(node).items()))
        seen: tuple[object, ...] = ()
        if not parts:
            seen = tuple(view.shape(v) for v in node.inputs if v is not None for view in views)
        return (node.op_identifier(), attributes, value.index(), parts, seen)

    def derive(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | np.ndarray | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        before: ir.Node,
        domain: str = "",
        outputs: int = 1,
    ) -> tuple[ir.Value, ...]:
        """Values of a node put into the graph before ``before``; equal requests share one node.

        Arrays among the inputs become Constant nodes. The node is placed right after the producer
        of its only computed input where there is just one, so that later sites can share it.
        """
        graph = before.graph
        assert graph is not None, "a node outside every graph was recognised"
        moving = [p for v in inputs if isinstance(v, ir.Value) and (p := v.producer()) is not None]
        moving = [p for p in moving if p not in self._constants]
        if len(set(moving)) == 1:
            graph = moving[0].graph
            assert graph is not None
        values = [self._embedded(x, graph) if isinstance(x, np.ndarray) else x for x in inputs]
        key: tuple[object, ...] = (op_type, domain, tuple(values), outputs, id(graph))
        key = (*key, repr(sorted((attributes or {}).items())))
        if len(set(moving)) > 1:
            key = (*key, before)
        if key not in self._derived:
            node = ir.Node(
                domain,
                op_type,
                values,
                ir.convenience.convert_attributes(dict(attributes or {})),
                outputs=[ir.Value(name=self._fresh(op_type)) for _ in range(outputs)],
                name=self._fresh(op_type),
            )
            if len(set(moving)) > 1:
                graph.insert_before(before, node)
            elif moving:
                graph.insert_after(moving[0], node)
            else:
                _insert_first(graph, node, self._constants)
            self._derived[key] = tuple(node.outputs)
        return self._derived[key]

    def _embedded(self, array: np.ndarray, graph: ir.Graph | ir.Function) -> ir.Value:
        key = ("constant", array.dtype.str, array.shape, array.tobytes(), id(graph))
        if key not in self._derived:
            name = self._fresh("constant")
            node = ir.Node(
                "",
                "Constant",
                [],
                [ir.AttrTensor("value", ir.tensor(array, name=name))],
                outputs=[
                    ir.Value(
                        name=name,
                        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                        shape=ir.Shape(array.shape),
                    )
                ],
                name=name,
            )
            _insert_first(graph, node, frozenset())
            self._constants.add(node)
            self._derived[key] = (node.outputs[0],)
        return self._derived[key][0]

    def _fresh(self, op_type: str) -> str:
        if self._names is None:
            nodes = list(self.model.graph.all_nodes())
            self._names = {node.name for node in nodes}
            self._names |= {output.name for node in nodes for output in node.outputs}
        count = 0
        while (name := f"derived.{op_type}_{count}") in self._names:
            count += 1
        self._names.add(name)
        return name


def _insert_first(graph: ir.Graph | ir.Function, node: ir.Node, constants: Set[ir.Node]) -> None:
    """At the start of the graph, but after ``constants`` that stand there."""
    first = next((other for other in graph if other not in constants), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)


def _has_subgraph(node: ir.Node) -> bool:
    return any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values())


def _content_inputs(value: ir.Value) -> list[ir.Value]:
    """The inputs whose content decides the value's; none where only shapes do."""
    node = value.producer()
    if node is None or value.const_value is not None or node.op_type in (*SHAPE_ONLY, "EyeLike"):
        return []
    return [item for item in node.inputs if item is not None]
