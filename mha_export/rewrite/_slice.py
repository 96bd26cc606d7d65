"""The part of a graph that lies between some cut values and some targets, as a model of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import subgraphs_of

_SHAPE_ONLY = frozenset({"Shape", "Size"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice:
    """A backward slice.

    Attributes:
        targets: the values asked for.
        stops: where the walk ended, in order of first encounter: cut values, graph inputs, values
            of heavy nodes outside the site. They are the inputs of the small model.
        shape_only: the stops of which only the shape is read.
        nodes: in an order that computes them. initializers: constants they read.
    """

    targets: tuple[ir.Value, ...]
    stops: tuple[ir.Value, ...]
    shape_only: frozenset[ir.Value]
    nodes: tuple[ir.Node, ...]
    initializers: tuple[ir.Value, ...]


def backward_slice(
    targets: Sequence[ir.Value],
    *,
    cuts: Collection[ir.Value],
    inside: Collection[ir.Node],
    context: Context,
) -> Slice:
    """Walk back from ``targets`` to ``cuts``, graph inputs, and activations not among ``inside``.

    An activation is what :meth:`Context.sources` calls a source of its own: the result of a
    projection, a lookup, a convolution. Walking on through it would pull the whole model in.
    """
    walk = _Walk(frozenset(cuts), frozenset(inside), context)
    for target in targets:
        walk.visit(target)
    walk.settle_shapes()
    return Slice(
        targets=tuple(targets),
        stops=tuple(walk.stops),
        shape_only=frozenset(walk.shape_only),
        nodes=_ordered(walk.nodes),
        initializers=tuple(walk.initializers),
    )


def _ordered(nodes: dict[ir.Node, None]) -> tuple[ir.Node, ...]:
    """The nodes, each after those it reads: ``Shape`` was not followed by the walk."""
    done: dict[ir.Node, None] = {}
    for start in nodes:
        stack = [(start, False)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready:
                done.setdefault(node)
                continue
            stack.append((node, True))
            for value in reads_of(node):
                producer = value.producer()
                if producer is not None and producer in nodes and producer not in done:
                    stack.append((producer, False))
    return tuple(done)


class _Walk:
    def __init__(
        self, cuts: frozenset[ir.Value], inside: frozenset[ir.Node], context: Context
    ) -> None:
        self._cuts = cuts
        self._inside = inside
        self._context = context
        self.stops: dict[ir.Value, None] = {}
        self.shape_only: dict[ir.Value, None] = {}
        self.nodes: dict[ir.Node, None] = {}
        self.initializers: dict[ir.Value, None] = {}

    def visit(self, target: ir.Value) -> None:
        """Depth first on an explicit stack: graphs are thousands of nodes deep."""
        stack: list[tuple[ir.Value, bool]] = [(target, False)]
        while stack:
            value, done = stack.pop()
            node = value.producer()
            if done:
                assert node is not None
                self.nodes.setdefault(node)
                continue
            if value in self.stops or (node is not None and node in self.nodes):
                continue
            if value.const_value is not None and node is None and value not in self._cuts:
                self.initializers.setdefault(value)
                continue
            if node is None or self._stops_at(value, node):
                self.stops.setdefault(value)
                continue
            stack.append((value, True))
            if node.op_type in _SHAPE_ONLY and node.domain == "":
                self.shape_only.update(dict.fromkeys(v for v in node.inputs if v is not None))
            else:
                stack.extend((read, False) for read in reversed(list(reads_of(node))))

    def settle_shapes(self) -> None:
        """What only ``Shape`` reads becomes an input too, unless the slice computes it anyway."""
        for value in list(self.shape_only):
            node = value.producer()
            known = value in self.stops or (node is not None and node in self.nodes)
            if known or value in self.initializers:
                del self.shape_only[value]
            elif value.const_value is not None and node is None:
                self.initializers.setdefault(value)
                del self.shape_only[value]
            else:
                self.stops.setdefault(value)

    def _stops_at(self, value: ir.Value, node: ir.Node) -> bool:
        if value in self._cuts:
            return True
        if node in self._inside:
            return False
        return self._context.sources(value) == frozenset({value})


def reads_of(node: ir.Node) -> Iterator[ir.Value]:
    """The values a node reads: its inputs, and what its bodies capture from outside."""
    yield from (value for value in node.inputs if value is not None)
    for body in subgraphs_of(node):
        yield from captured_by(body)


def captured_by(body: ir.Graph) -> Iterator[ir.Value]:
    """Values of outer graphs that a body (or one inside it) reads."""
    own: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        own.update(node.outputs)
    for node in body:
        for value in reads_of(node):
            if value not in own:
                yield value
    for value in body.outputs:
        if value not in own:
            yield value


def as_graph(part: Slice, extra: Sequence[ir.Value] = ()) -> tuple[ir.Graph, list[ir.Value]]:
    """A copy of the slice as a graph, and the copies of its targets and ``extra``, in order."""
    wanted = [*part.targets, *extra]
    distinct = list(dict.fromkeys(wanted))
    view = ir.GraphView(
        part.stops,
        distinct,
        nodes=part.nodes,
        initializers=[v for v in part.initializers if v not in part.stops],
        opset_imports={},
        name="slice",
    )
    graph = view.clone()
    copies = dict(zip(distinct, graph.outputs, strict=True))
    graph.outputs.clear()
    return graph, [copies[value] for value in wanted]
