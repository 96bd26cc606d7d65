"""A whole graph at concrete sizes: one forward pass, linear in the number of nodes.

Every symbolic dimension gets a number (:mod:`._assignment` chooses them), so that each Reshape,
Expand and Slice whose arguments are computed from shapes becomes concrete. Contents are kept for
small values only, and never loaded for weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from mha_export.recognise._contraction_laws import CONTRACTIONS
from mha_export.recognise._evaluate_contents import RULES, attributes_of
from mha_export.recognise._movement_laws import MOVES
from mha_export.recognise._schema_shapes import inferred
from mha_export.recognise._shape_laws import LAWS, Facts, Shape
from mha_export.recognise._sliding import SLIDING, places_of_window

LARGEST_CONTENT = 4096
"""Elements of the largest value whose content is kept."""

_LAWS = {**LAWS, **MOVES, **CONTRACTIONS}
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_UNFOLDED = frozenset({"MatMul", "Einsum", "LayerNormalization", "RMSNormalization", "Dropout"})


class Shapes:
    """Shapes of all values, and contents of small ones, at one choice of sizes.

    Args:
        graph: the main graph; subgraphs are entered where their node stands.
        sizes: symbol name -> number; a dimension without a name is called ``input:axis``.
    """

    def __init__(self, graph: ir.Graph, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.conflicts: list[tuple[int, int]] = []
        self.flaws: list[str] = []
        """Values with a dimension below zero, or none left: the sizes are too small here."""
        self.narrow: list[str] = []
        """Values that a window slid along to a single place: a length that looks like no axis."""
        self._shapes: dict[ir.Value, Shape | None] = {}
        self._contents: dict[ir.Value, np.ndarray | None] = {}
        for value in graph.inputs:
            self._shapes[value] = self.declared(value)
        self._walk(graph)

    def shape(self, value: ir.Value) -> Shape | None:
        """The shape, with None for a dimension that depends on data; None for unknown rank."""
        found = self._shapes.get(value)
        if found is None and value not in self._shapes:
            found = self._shapes[value] = self._constant_shape(value)
        return found

    def dims(self, value: ir.Value) -> tuple[int, ...] | None:
        """The shape when every dimension is known."""
        shape = self.shape(value)
        if shape is None or None in shape:
            return None
        return shape  # type: ignore[return-value]

    def known(self) -> dict[ir.Value, tuple[int, ...]]:
        """Every shape without an unknown dimension."""
        return {v: dims for v in self._shapes if (dims := self.dims(v)) is not None}

    def content(self, value: ir.Value | None) -> np.ndarray | None:
        """The content of a small value that depends on sizes and constants only."""
        if value is None:
            return None
        if value not in self._contents:
            self._contents[value] = self._constant_content(value)
        return self._contents[value]

    def learn(self, node: ir.Node) -> None:
        """Follow a node that was put into the graph after the pass."""
        if any(value not in self._shapes for value in node.outputs):
            self._node(node)

    def declared(self, value: ir.Value) -> Shape | None:
        """What the file says the shape is, its symbols replaced by their sizes."""
        if value.shape is None:
            return None
        return tuple(
            dim if isinstance(dim, int) else self.sizes.get(symbol_of(value, axis))
            for axis, dim in enumerate(value.shape)
        )

    def _constant_shape(self, value: ir.Value) -> Shape | None:
        if value.const_value is not None:
            return tuple(int(n) for n in value.const_value.shape.numpy())
        return self.declared(value)

    def _constant_content(self, value: ir.Value) -> np.ndarray | None:
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or tensor.size > LARGEST_CONTENT:
            return None
        if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            return None
        return np.asarray(tensor.numpy())

    def _walk(self, graph: ir.Graph) -> None:
        for node in graph:
            if any(
                attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
                for attribute in node.attributes.values()
            ):
                self._enter(node)
            else:
                self._node(node)

    def _node(self, node: ir.Node) -> None:
        outputs = node.outputs
        shapes = [None if value is None else self.shape(value) for value in node.inputs]
        op = node.op_type
        if op == "Shape" or op == "Size":
            self._shape_node(node, shapes[0])
            return
        if op == "Constant":
            self._constant_node(node)
            return
        contents = [self.content(value) for value in node.inputs]
        attributes = attributes_of(node)
        law = _LAWS.get(op) if node.domain in _DOMAINS else None
        found: Sequence[Shape | None] = ()
        if law is not None:
            facts = Facts(shapes, contents, attributes, len(outputs), self.conflicts)
            try:
                found = law(facts)
            except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
                found = ()
        elif None not in shapes or op in ("Resize", "Upsample"):
            found = inferred(node, shapes, contents)
        for index, value in enumerate(outputs):
            shape = found[index] if index < len(found) else None
            if shape is None or None in shape:
                shape = _merged(shape, self.declared(value))
            if shape is not None and any(dim is not None and dim < 0 for dim in shape):
                self.flaws.append(value.name or "")
            elif op in SLIDING and index == 0 and shape is not None:
                places = places_of_window(shapes, attributes)
                if 0 in shape[2:] or any(count < 1 for count, _ in places):
                    self.flaws.append(value.name or "")
                elif any(count == 1 < size for count, size in places):
                    self.narrow.append(value.name or "")
            self._shapes[value] = shape
        if op in RULES and op not in _UNFOLDED and node.domain in _DOMAINS[:2]:
            self._fold(node, contents, attributes)

    def _constant_node(self, node: ir.Node) -> None:
        output = node.outputs[0]
        tensor = constant_tensor(node)
        if tensor is None:
            self._shapes[output] = self.declared(output)
            return
        self._shapes[output] = tuple(int(n) for n in tensor.shape.numpy())
        if tensor.size <= LARGEST_CONTENT and tensor.dtype != ir.DataType.STRING:
            self._contents[output] = np.asarray(tensor.numpy())

    def _shape_node(self, node: ir.Node, shape: Shape | None) -> None:
        output = node.outputs[0]
        if shape is None:
            self._shapes[output] = self.declared(output)
            return
        if node.op_type == "Size":
            self._shapes[output] = ()
            if None not in shape:
                self._contents[output] = np.asarray(math.prod(shape), np.int64)  # type: ignore[arg-type]
            return
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(shape))
        part = shape[slice(start, end)]
        self._shapes[output] = (len(part),)
        if None not in part:
            self._contents[output] = np.asarray(part, np.int64)

    def _fold(
        self, node: ir.Node, contents: list[np.ndarray | None], attributes: dict[str, object]
    ) -> None:
        if any(
            content is None and value is not None
            for content, value in zip(contents, node.inputs, strict=True)
        ):
            return
        for value in node.outputs:
            shape = self._shapes.get(value)
            if shape is None or None in shape:
                return
            if math.prod(shape) > LARGEST_CONTENT:  # type: ignore[arg-type]
                return
        try:
            with np.errstate(all="ignore"):
                results = RULES[node.op_type](contents, attributes)
        except Exception:  # a rule that does not fit leaves the content unknown
            return
        for value, result in zip(node.outputs, results, strict=False):
            self._contents[value] = np.asarray(result)
            self._shapes[value] = tuple(np.shape(result))

    def _enter(self, node: ir.Node) -> None:
        """Shapes inside a node's subgraphs, then of its outputs."""
        enter: Callable[[ir.Node], None] = {
            "If": self._branches,
            "Loop": self._loop,
            "Scan": self._scan,
        }.get(node.op_type, self._opaque)
        enter(node)

    def _opaque(self, node: ir.Node) -> None:
        for value in node.outputs:
            self._shapes[value] = self.declared(value)

    def _branches(self, node: ir.Node) -> None:
        ends = []
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for branch in branches:
            self._walk(branch)
            ends.append([self.shape(value) for value in branch.outputs])
        condition = self.content(node.inputs[0])
        taken = None if condition is None or condition.size != 1 else not condition.item()
        for place, (value, left, right) in enumerate(zip(node.outputs, *ends, strict=True)):
            if taken is not None:
                content = self.content(branches[taken].outputs[place])
                if content is not None:
                    self._contents[value] = content
            if left == right:
                self._shapes[value] = left
            elif taken is None:
                self._shapes[value] = self.declared(value)
            else:
                self._shapes[value] = ends[taken][place]

    def _loop(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        for inner in body.inputs[:2]:
            self._shapes[inner] = ()
        for inner, outer in zip(body.inputs[2:], node.inputs[2:], strict=False):
            self._shapes[inner] = None if outer is None else self.shape(outer)
        self._walk(body)
        carried = len(body.inputs) - 2
        for index, value in enumerate(node.outputs):
            inner_shape = self.shape(body.outputs[index + 1])
            if index < carried:
                same = inner_shape == self.shape(body.inputs[index + 2])
                self._shapes[value] = inner_shape if same else self.declared(value)
            else:
                self._shapes[value] = None if inner_shape is None else (None, *inner_shape)

    def _scan(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        scanned = node.attributes.get_int("num_scan_inputs", 0)
        states = len(body.inputs) - scanned
        length: int | None = None
        for index, (inner, outer) in enumerate(zip(body.inputs, node.inputs, strict=False)):
            shape = None if outer is None else self.shape(outer)
            if index >= states and shape is not None:
                length, shape = shape[0], shape[1:]
            self._shapes[inner] = shape
        self._walk(body)
        for index, value in enumerate(node.outputs):
            inner_shape = self.shape(body.outputs[index])
            if index >= states and inner_shape is not None:
                inner_shape = (length, *inner_shape)
            self._shapes[value] = inner_shape


def constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant node holds, in whichever attribute it holds it."""
    for name, attribute in node.attributes.items():
        if name == "value":
            tensor: ir.TensorProtocol = attribute.value
            return tensor
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.asarray(attribute.value, np.int64))
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(attribute.value, np.float32))
    return None


def symbol_of(value: ir.Value, axis: int) -> str:
    """The name a symbolic dimension of a graph input goes by."""
    dim = value.shape[axis] if value.shape is not None else None
    name = getattr(dim, "value", None)
    return str(name) if name is not None else f"{value.name}:{axis}"


def _merged(found: Shape | None, declared: Shape | None) -> Shape | None:
    if found is None or declared is None or len(found) != len(declared):
        return declared if found is None else found
    return tuple(b if a is None else a for a, b in zip(found, declared, strict=True))
