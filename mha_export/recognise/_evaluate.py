"""Values of a graph at concrete sizes: shapes of anything, contents of what needs no activations.

A mask or a rotary table is computed from shapes, constants and perhaps an ``attention_mask``. What
it *is* shows when it is evaluated: :class:`SizedView` gives shapes and arrays at one choice of
sizes (and of contents for chosen values), on demand and memoised; :class:`Context` holds what is
known of one graph, so a value shared by all layers is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.recognise import _evaluate_shapes as shapes
from mha_export.recognise._evaluate_contents import (
    CONTRIBUTED,
    ELEMENTWISE,
    RULES,
    STEERING,
    STRUCTURAL,
    attributes_of,
)

Shape = tuple[int, ...]
Question = tuple[Literal["shape", "array"], ir.Value]
Answer = Generator[Question, Any, Any]
"""A rule in progress: it asks for shapes and arrays of inputs and returns its own."""

MAX_ELEMENTS = 1 << 26
"""No single array above this is computed: a mask so large is not read but bound as it is."""

_SHAPE_ONLY = frozenset({"Shape", "Size"})
_OPAQUE = frozenset(
    {
        "Attention", "Bernoulli", "Conv", "ConvTranspose", "GRU", "Gemm", "GroupQueryAttention",
        "If", "LSTM", "LayerNormalization", "Loop", "MatMul", "MatMulInteger", "Multinomial",
        "MultiHeadAttention", "NonZero", "RMSNormalization", "RNN", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Scan", "Softmax", "Unique",
    }
)  # fmt: skip
"""Ops whose result counts as a source of its own once it depends on any source: activations."""


class SizedView:
    """One graph with numbers for its symbolic dimensions and arrays for some of its values.

    Args:
        sizes: symbol -> number; a nameless dimension of an input is called ``<input>.<axis>``.
        contents: what some values hold; they need not be graph inputs.
        wide: compute in float64 whatever float type the graph casts to: laws are then compared
            without rounding.
        opset: version of the default domain.
        known: a view at the same sizes, whose shapes are taken over.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        contents: Mapping[ir.Value, np.ndarray],
        *,
        wide: bool,
        opset: int,
        evaluator: Evaluator | None,
        known: SizedView | None = None,
    ) -> None:
        self._sizes = sizes
        self._wide = wide
        self._opset = opset
        self._evaluator = evaluator
        self._arrays: dict[ir.Value, np.ndarray | None] = dict(contents)
        self._shapes: dict[ir.Value, Shape | None] = {}
        if known is not None:
            self._shapes |= {v: shape for v, shape in known._shapes.items() if shape is not None}
        self._shapes |= {v: array.shape for v, array in contents.items()}

    def shape(self, value: ir.Value) -> Shape | None:
        """The concrete shape, or None where it depends on data or an unnamed size."""
        found: Shape | None = self._answer("shape", value)
        return found

    def array(self, value: ir.Value) -> np.ndarray | None:
        """The content, or None where it depends on an input that was given no content."""
        found: np.ndarray | None = self._answer("array", value)
        return found

    # Rules are generators on an explicit stack: graphs are thousands of nodes deep.
    def _answer(self, kind: Literal["shape", "array"], value: ir.Value) -> Any:
        memo: Mapping[str, dict[ir.Value, Any]] = {"shape": self._shapes, "array": self._arrays}
        start: Question = (kind, value)
        if value in memo[kind]:
            return memo[kind][value]
        stack: list[tuple[Question, Answer]] = [(start, self._rule(start))]
        reply: Any = None
        while stack:
            (asked_kind, asked), rule = stack[-1]
            try:
                question = rule.send(reply)
            except StopIteration as done:
                memo[asked_kind][asked] = reply = done.value
                stack.pop()
                continue
            if question[1] in memo[question[0]]:
                reply = memo[question[0]][question[1]]
            else:
                stack.append((question, self._rule(question)))
                reply = None
        return memo[kind][value]

    def _rule(self, question: Question) -> Answer:
        kind, value = question
        return self._shape_rule(value) if kind == "shape" else self._array_rule(value)

    def _shape_rule(self, value: ir.Value) -> Answer:
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        known = self._annotated(value)
        node = value.producer()
        if known is not None or node is None:
            return known
        index = value.index() or 0
        attributes = attributes_of(node)
        if node.op_type == "Constant":
            constant = _constant_content(attributes)
            return None if constant is None else constant.shape
        if node.op_type == "Shape":
            inner = yield ("shape", _first(node))
            return None if inner is None else (len(inner[_bounds(attributes, len(inner))]),)
        if node.op_type == "Size":
            return ()
        found = yield from _input_shapes(node)
        if node.op_type in ELEMENTWISE:
            pairs = zip(node.inputs, found, strict=True)
            return _broadcast([shape for item, shape in pairs if item is not None])
        if node.op_type in shapes.SAME_AS_FIRST and index == 0:
            return found[0]
        if node.op_type in STRUCTURAL:
            return (yield from self._dry_run(node, found, index))
        special = shapes.RULES.get(node.op_type)
        if special is not None and index == 0:
            inferred = _attempt(lambda: special(found, attributes))
            if inferred is not None:
                return inferred
        contents: list[np.ndarray | None] = []
        for item in node.inputs:
            contents.append(None if item is None else (yield ("array", item)))
        outputs = shapes.infer(node, found, contents, self._opset)
        for output, shape in zip(node.outputs, outputs, strict=True):
            if output is not value and output not in self._shapes:
                self._shapes[output] = shape
        return outputs[index]

    def _dry_run(self, node: ir.Node, found: list[Shape | None], index: int) -> Answer:
        """The shape of a structural op's output, by running it on zeros that take no memory."""
        if node.op_type == "Concat":
            return _attempt(lambda: _concatenated(found, attributes_of(node)["axis"]))
        inputs: list[np.ndarray | None] = []
        for position, item in enumerate(node.inputs):
            if item is None:
                inputs.append(None)
            elif position in STEERING.get(node.op_type, ()):
                content = yield ("array", item)
                if content is None:
                    return None
                inputs.append(content)
            else:
                shape = found[position]
                if shape is None:
                    return None
                whole = node.op_type.startswith(("Gather", "Scatter")) and position == 1
                zero = np.zeros((), np.int64 if whole else np.float32)
                inputs.append(np.broadcast_to(zero, shape))
        outputs = _attempt(lambda: RULES[node.op_type](inputs, attributes_of(node)))
        return None if outputs is None else outputs[index].shape

    def _annotated(self, value: ir.Value) -> Shape | None:
        """The shape written in the graph, where every dimension follows from the sizes."""
        if value.shape is None:
            return None
        result = []
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int):
                result.append(dim)
                continue
            number: object = None
            if dim.value is None:
                number = self._sizes.get(f"{value.name}.{axis}")
            elif dim.value in self._sizes:
                number = self._sizes[dim.value]
            elif dim.free_symbols() <= self._sizes.keys():
                number = dim.evaluate(self._sizes)
            if not isinstance(number, int):
                return None
            result.append(number)
        return tuple(result)

    def _array_rule(self, value: ir.Value) -> Answer:
        if value.const_value is not None:
            return self._widened(value.const_value.numpy())
        node = value.producer()
        if node is None:
            return None
        attributes = attributes_of(node)
        if node.op_type == "Constant":
            constant = _constant_content(attributes)
            return None if constant is None else self._widened(constant)
        if node.op_type in _SHAPE_ONLY:
            shape = yield ("shape", _first(node))
            if shape is None:
                return None
            if node.op_type == "Size":
                return np.asarray(np.prod(shape, dtype=np.int64))
            return np.asarray(shape[_bounds(attributes, len(shape))], np.int64)
        if any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values()):
            return None
        if node.op_type == "EyeLike":
            shape = yield ("shape", _first(node))
            return None if shape is None else RULES["EyeLike"]([np.zeros(shape)], attributes)[0]
        inputs: list[np.ndarray | None] = []
        for item in node.inputs:
            content = None if item is None else (yield ("array", item))
            if item is not None and content is None:
                return None
            inputs.append(content)
        if node.op_type in ELEMENTWISE:
            whole = _broadcast([a.shape for a in inputs if a is not None])
            if whole is None or int(np.prod(whole, dtype=np.int64)) > MAX_ELEMENTS:
                return None
        outputs = self._compute(node, inputs, attributes)
        if outputs is None:
            return None
        for output, array in zip(node.outputs, outputs, strict=False):
            if output is not value:
                self._arrays.setdefault(output, array)
        return outputs[value.index() or 0]

    def _compute(
        self, node: ir.Node, inputs: list[np.ndarray | None], attributes: Mapping[str, Any]
    ) -> Sequence[np.ndarray] | None:
        if self._wide and node.op_type in ("Cast", "CastLike"):
            source = inputs[0]
            to = attributes.get("to")
            if source is not None and (to is None or ir.DataType(to).is_floating_point()):
                return [source.astype(np.float64)]
        known = node.domain in ("", "ai.onnx") or node.op_type in CONTRIBUTED
        rule = RULES.get(node.op_type) if known else None
        with np.errstate(all="ignore"):
            if rule is not None:
                return _attempt(lambda: rule(inputs, attributes))
            if self._wide:
                return None
            return _attempt(lambda: _run_alone(node, inputs, self._opset, self._evaluator))

    def _widened(self, array: np.ndarray) -> np.ndarray:
        kind = array.dtype.kind
        if self._wide and (kind == "f" or array.dtype.name == "bfloat16"):
            return array.astype(np.float64)
        return array


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
        self._names: set[str | None] | None = None
        self._views: dict[object, SizedView] = {}
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
            plain = SizedView(sizes, {}, wide=wide, opset=self.opset, evaluator=self.evaluator)
            self._views[key] = plain
        if not contents:
            return plain
        return SizedView(
            sizes, contents, wide=wide, opset=self.opset, evaluator=self.evaluator, known=plain
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
        values = [self._embedded(x, graph) if isinstance(x, np.ndarray) else x for x in inputs]
        moving = [p for v in values if v is not None and (p := v.producer()) is not None]
        moving = [p for p in moving if p.op_type != "Constant"]
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
                owner = moving[0].graph
                assert owner is not None
                owner.insert_after(moving[0], node)
            else:
                _insert_first(graph, node)
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
            _insert_first(graph, node)
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


def _insert_first(graph: ir.Graph | ir.Function, node: ir.Node) -> None:
    first = next(iter(graph), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None, f"{node.op_type} node {node.name} has no input"
    return value


def _input_shapes(node: ir.Node) -> Generator[Question, Any, list[Shape | None]]:
    found: list[Shape | None] = []
    for item in node.inputs:
        found.append(None if item is None else (yield ("shape", item)))
    return found


def _attempt(compute: Callable[[], Any]) -> Any:
    """The result, or None where the sizes at hand contradict the op (or no rule covers it)."""
    try:
        return compute()
    except (
        ArithmeticError, AttributeError, IndexError, KeyError, MemoryError, MhaExportError,
        NotImplementedError, RuntimeError, TypeError, ValueError,
    ):  # fmt: skip
        return None


def _broadcast(found: Sequence[Shape | None]) -> Shape | None:
    known = [shape for shape in found if shape is not None]
    if len(known) < len(found) or not known:
        return None
    result: Shape | None = _attempt(lambda: np.broadcast_shapes(*known))
    return result


def _concatenated(found: Sequence[Shape | None], axis: int) -> Shape:
    known = [shape for shape in found if shape is not None]
    if len(known) < len(found):
        raise ValueError("an input of unknown shape")
    result = list(known[0])
    result[axis] = sum(shape[axis] for shape in known)
    return tuple(result)


def _bounds(attributes: Mapping[str, Any], rank: int) -> slice:
    return slice(attributes.get("start", 0), attributes.get("end", rank))


def _constant_content(attributes: Mapping[str, Any]) -> np.ndarray | None:
    """What a Constant node holds, in any of its numeric spellings."""
    if "value" in attributes:
        content: np.ndarray = attributes["value"].numpy()
        return content
    for name, dtype in (("value_int", np.int64), ("value_float", np.float32)):
        for spelling in (name, f"{name}s"):
            if spelling in attributes:
                return np.asarray(attributes[spelling], dtype)
    return None


def _has_subgraph(node: ir.Node) -> bool:
    return any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values())


def _content_inputs(value: ir.Value) -> list[ir.Value]:
    """The inputs whose content decides the value's; none where only shapes do."""
    node = value.producer()
    if node is None or value.const_value is not None or node.op_type in (*_SHAPE_ONLY, "EyeLike"):
        return []
    return [item for item in node.inputs if item is not None]


def _run_alone(
    node: ir.Node,
    inputs: Sequence[np.ndarray | None],
    opset: int,
    evaluator: Evaluator | None,
) -> list[np.ndarray]:
    """Outputs of one node, run as a model of its own."""
    feeds: dict[str, np.ndarray] = {}
    values: list[ir.Value | None] = []
    for position, array in enumerate(inputs):
        if array is None:
            values.append(None)
            continue
        name = f"x{position}"
        feeds[name] = array
        dtype = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        values.append(ir.Value(name=name, type=dtype, shape=ir.Shape(array.shape)))
    names = [f"y{i}" for i in range(len(node.outputs))]
    copy = ir.Node(
        node.domain,
        node.op_type,
        values,
        node.attributes,
        outputs=[ir.Value(name=n, type=o.type) for n, o in zip(names, node.outputs, strict=True)],
    )
    opsets = {"": opset} if node.domain == "" else {"": opset, node.domain: 1}
    graph = ir.Graph(
        [v for v in values if v is not None], copy.outputs, nodes=[copy], opset_imports=opsets
    )
    model = ir.Model(graph, ir_version=10)
    if evaluator is not None:
        found = evaluator.run(model, feeds)
        return [found[name] for name in names]
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(ir.to_proto(model)).run(None, feeds))
