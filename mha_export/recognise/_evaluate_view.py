"""One graph at concrete sizes: shapes of anything, contents of what needs no activations.

Answers are found on demand and kept. A rule is a generator that asks for what it needs, on an
explicit stack: graphs are thousands of nodes deep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.recognise import _evaluate_shapes as shapes
from mha_export.recognise._evaluate_bodies import shape_given, shape_returned
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

SHAPE_ONLY = frozenset({"Shape", "Size"})


def symbols_in(dim: ir.SymbolicDim) -> frozenset[str]:
    """The symbols of a dimension's expression; a name that is no expression is one symbol.

    Exporters also write names such as ``Concatonnx::Shape_53_dim_0``.
    """
    return frozenset() if dim.value is None else _symbols_named(dim.value)


@functools.lru_cache(maxsize=4096)
def _symbols_named(text: str) -> frozenset[str]:
    """Parsing is slow, and one name stands on hundreds of values."""
    try:
        return frozenset(ir.SymbolicDim(text).free_symbols())
    except ValueError:
        return frozenset({text})


class SizedView:
    """One graph with numbers for its symbolic dimensions and arrays for some of its values.

    Args:
        sizes: symbol -> number; a nameless dimension of an input is called ``<input>.<axis>``.
        contents: what some values hold; they need not be graph inputs.
        wide: compute in float64 whatever float type the graph casts to: laws are then compared
            without rounding.
        opset: version of the default domain.
        holders: the node that each body belongs to.
        literals: what initializers and Constant nodes hold; shared by the views of one graph.
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
        literals: dict[ir.Value, np.ndarray | None] | None = None,
        holders: Mapping[ir.Graph, ir.Node] | None = None,
        known: SizedView | None = None,
    ) -> None:
        self._literals = {} if literals is None else literals
        self._holders = holders or {}
        self._sizes = sizes
        self._wide = wide
        self._opset = opset
        self._evaluator = evaluator
        self._arrays: dict[ir.Value, np.ndarray | None] = dict(contents)
        # Looked into and not copied: a graph of many layers has many views.
        self._known: Mapping[ir.Value, Shape | None] = {} if known is None else known._shapes
        self._shapes: dict[ir.Value, Shape | None] = {v: a.shape for v, a in contents.items()}

    def know(self, shapes: Mapping[ir.Value, Shape]) -> None:
        """Take over shapes that were found elsewhere."""
        self._shapes |= shapes

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
        known = self._known.get(value)
        known = self._annotated(value) if known is None else known
        node = value.producer()
        if known is not None:
            return known
        if node is None:
            return (yield from shape_given(value, self._holders))
        index = value.index() or 0
        if node.op_type == "Constant":
            constant = self._literal(value)
            return None if constant is None else constant.shape
        attributes = attributes_of(node)
        if node.op_type == "Shape":
            inner = yield ("shape", _first(node))
            return None if inner is None else (len(inner[_bounds(attributes, len(inner))]),)
        if node.op_type == "Size":
            return ()
        if node.op_type == "If":
            taken = yield from self._taken(node)
            return None if taken is None else (yield ("shape", taken.outputs[index]))
        if node.op_type in ("Loop", "Scan"):
            return (yield from shape_returned(node, index))
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
            contents.append(None)
            if item is not None and _is_small(found[len(contents) - 1]):
                contents[-1] = yield ("array", item)
        outputs = shapes.infer(node, found, contents, self._opset)
        for output, shape in zip(node.outputs, outputs, strict=True):
            if output is not value and output not in self._shapes:
                known = self._known.get(output)
                self._shapes[output] = shape if known is None else known
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
            elif symbols_in(dim) <= self._sizes.keys():
                number = dim.evaluate(self._sizes)
            if not isinstance(number, int):
                return None
            result.append(number)
        return tuple(result)

    def _array_rule(self, value: ir.Value) -> Answer:
        node = value.producer()
        if value.const_value is not None or (node is not None and node.op_type == "Constant"):
            constant = self._literal(value)
            return None if constant is None else self._widened(constant)
        if node is None:
            return None
        attributes = attributes_of(node)
        if node.op_type in SHAPE_ONLY:
            shape = yield ("shape", _first(node))
            if shape is None:
                return None
            if node.op_type == "Size":
                return np.asarray(np.prod(shape, dtype=np.int64))
            return np.asarray(shape[_bounds(attributes, len(shape))], np.int64)
        if node.op_type == "If":
            taken = yield from self._taken(node)
            return None if taken is None else (yield ("array", taken.outputs[value.index() or 0]))
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

    def _taken(self, node: ir.Node) -> Generator[Question, Any, ir.Graph | None]:
        """The branch of an If whose condition follows from the sizes and contents."""
        condition = yield ("array", _first(node))
        if condition is None or condition.size != 1:
            return None
        return node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()

    def _literal(self, value: ir.Value) -> np.ndarray | None:
        """What an initializer or a Constant node holds, read from its tensor once a graph."""
        if value not in self._literals:
            node = value.producer()
            if value.const_value is not None:
                self._literals[value] = value.const_value.numpy()
            elif node is not None:
                self._literals[value] = constant_content(attributes_of(node))
        return self._literals[value]

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
        found: Sequence[np.ndarray] | None = None
        with np.errstate(all="ignore"):
            if rule is not None:
                found = _attempt(lambda: rule(inputs, attributes))
            elif not self._wide:
                found = _attempt(lambda: _run_alone(node, inputs, self._opset, self._evaluator))
        return found

    def _widened(self, array: np.ndarray) -> np.ndarray:
        kind = array.dtype.kind
        if self._wide and (kind == "f" or array.dtype.name == "bfloat16"):
            return array.astype(np.float64)
        return array


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


def _is_small(shape: Shape | None) -> bool:
    """Whether a value may be a shape, an axis or a count that steers an op."""
    return shape is not None and int(np.prod(shape, dtype=np.int64)) <= 64


def _bounds(attributes: Mapping[str, Any], rank: int) -> slice:
    return slice(attributes.get("start", 0), attributes.get("end", rank))


def constant_content(attributes: Mapping[str, Any]) -> np.ndarray | None:
    """What a Constant node holds, in any of its numeric spellings."""
    if "value" in attributes:
        content: np.ndarray = attributes["value"].numpy()
        return content
    for name, dtype in (("value_int", np.int64), ("value_float", np.float32)):
        for spelling in (name, f"{name}s"):
            if spelling in attributes:
                return np.asarray(attributes[spelling], dtype)
    return None


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
