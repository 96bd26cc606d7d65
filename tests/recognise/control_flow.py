"""Attentions inside branches, bodies and functions, and those inside one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from spellings import BATCH, BOOL, FLOAT, INT64, PAST, QUERIES, Sketch

HEADS, DIM, WIDTH = 4, 8, 32
DOMAIN = "local"
SHAPE = [BATCH, QUERIES, WIDTH]


def heads(g: Sketch, x: ir.Value) -> ir.Value:
    return g.transpose(g.reshape(g.linear(x, WIDTH, WIDTH), 0, 0, HEADS, DIM), 0, 2, 1, 3)


def layer(g: Sketch, x: ir.Value) -> ir.Value:
    """Self-attention with weights of its own."""
    return context(g, *(heads(g, x) for _ in range(3)))


def context(g: Sketch, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    scores = g.mul(g.matmul(query, g.transpose(key, 0, 1, 3, 2)), DIM**-0.5)
    weighed = g.matmul(g.op("Softmax", scores, axis=-1), value)
    return g.reshape(g.transpose(weighed, 0, 2, 1, 3), 0, 0, WIDTH)


class _Bodies:
    """Sketches of bodies, whose names differ, and the functions of the model."""

    def __init__(self) -> None:
        self._made = 0
        self.functions: list[ir.Function] = []

    def sketch(self) -> Sketch:
        self._made += 1
        body = Sketch(seed=self._made)
        body._count = 1000 * self._made
        return body

    def value(self, name: str) -> ir.Value:
        self._made += 1
        shape = ir.Shape([None, None, WIDTH])
        return ir.Value(name=f"{name}_{self._made}", type=ir.TensorType(FLOAT), shape=shape)

    def counters(self) -> list[ir.Value]:
        """What a Loop gives its body first: the step, and whether it goes on."""
        found = [self.value("step"), self.value("going")]
        for value, dtype in zip(found, (INT64, BOOL), strict=True):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
        return found


def graph(body: Sketch, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Graph:
    return ir.Graph(
        inputs, outputs, nodes=body.nodes, initializers=body.weights, name=f"body_{body._count}"
    )


def node(
    g: Sketch, op: str, inputs: Sequence[ir.Value], bodies: Mapping[str, ir.Graph], outputs: int = 1
) -> list[ir.Value]:
    made = ir.Node(
        "",
        op,
        inputs,
        [ir.AttrGraph(name, body) for name, body in bodies.items()],
        outputs=[ir.Value(name=g._name(f"{op}_out")) for _ in range(outputs)],
        name=g._name(op),
    )
    if op == "Scan":
        made.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", 1)
    g.nodes.append(made)
    return list(made.outputs)


def branched(g: Sketch, x: ir.Value, bodies: _Bodies, make: Callable[..., ir.Value]) -> ir.Value:
    """``make`` under a condition; else the input, doubled."""
    condition = g.op("Greater", g.op("ReduceMax", x, keepdims=0), 1.0)
    then, other = bodies.sketch(), bodies.sketch()
    return node(
        g,
        "If",
        [condition],
        {
            "then_branch": graph(then, [], [make(then, x)]),
            "else_branch": graph(other, [], [other.mul(x, 2.0)]),
        },
    )[0]


def looped(g: Sketch, x: ir.Value, bodies: _Bodies, make: Callable[..., ir.Value]) -> ir.Value:
    """``make`` three times over."""
    body = bodies.sketch()
    step, going = bodies.counters()
    token = bodies.value("token")
    after = body.add(token, make(body, token))
    on = body.op("Identity", going)
    loop = {"body": graph(body, [step, going, token], [on, after])}
    return node(g, "Loop", [g.const(np.int64(3), np.int64), g.bools(True), x], loop)[0]


def scanned(g: Sketch, x: ir.Value, bodies: _Bodies, make: Callable[..., ir.Value]) -> ir.Value:
    """``make`` over x and over x doubled, added up."""
    pair = g.concat(g.unsqueeze(x, 0), g.unsqueeze(g.mul(x, 2.0), 0), axis=0)
    body = bodies.sketch()
    state, token = bodies.value("state"), bodies.value("token")
    after = body.add(state, make(body, token))
    return node(g, "Scan", [x, pair], {"body": graph(body, [state, token], [after])})[0]


def called(g: Sketch, x: ir.Value, bodies: _Bodies, make: Callable[..., ir.Value]) -> ir.Value:
    """``make`` as a function of the model; its weights are constants of its own."""
    body, token = bodies.sketch(), bodies.value("token")
    out = make(body, token)
    constants = []
    for value in body.weights:
        held, value.const_value = ir.AttrTensor("value", value.const_value), None
        constants.append(ir.Node("", "Constant", [], [held], outputs=[value], name=value.name))
    nodes = [*constants, *body.nodes]
    inner = ir.Graph([token], [out], nodes=nodes, opset_imports={"": g.opset, DOMAIN: 1})
    name = f"function_{body._count}"
    bodies.functions.append(ir.Function(DOMAIN, name, graph=inner, attributes=[]))
    return g.op(name, x, domain=DOMAIN)


@dataclass(frozen=True, kw_only=True)
class Nest:
    """What holds what, from the outside in; the innermost holds one attention."""

    inside: tuple[Callable[..., ir.Value], ...]

    def model(self) -> ir.Model:
        bodies = _Bodies()

        def made(g: Sketch, x: ir.Value, depth: int = 0) -> ir.Value:
            if depth == len(self.inside):
                return layer(g, x)
            return self.inside[depth](g, x, bodies, lambda g, x: made(g, x, depth + 1))

        g = Sketch()
        g.output(made(g, g.input("x", SHAPE)), "y")
        g.functions = bodies.functions
        model = g.model()
        model.graph.opset_imports[DOMAIN] = 1
        return model


NESTS = {
    "if": Nest(inside=(branched,)),
    "loop": Nest(inside=(looped,)),
    "scan": Nest(inside=(scanned,)),
    "function": Nest(inside=(called,)),
    "if in a loop": Nest(inside=(looped, branched)),
    "loop in an if": Nest(inside=(branched, looped)),
    "scan in a loop": Nest(inside=(looped, scanned)),
    "function in a function": Nest(inside=(called, called)),
    "if in a function": Nest(inside=(called, branched)),
    "function in a loop": Nest(inside=(looped, called)),
    "loop in an if in a function": Nest(inside=(called, branched, looped)),
}


def in_both_branches() -> ir.Model:
    """An If whose branches each hold an attention and their own weights."""
    g, bodies = Sketch(), _Bodies()
    x = g.input("x", SHAPE)
    sides = {}
    for name in ("then_branch", "else_branch"):
        body = bodies.sketch()
        sides[name] = graph(body, [], [layer(body, x)])
    g.output(node(g, "If", [g.input("chosen", [], BOOL)], sides)[0], "y")
    return g.model()


def growing_cache() -> ir.Model:
    """A Loop whose carried past and present are the cache of the attention in it."""
    g, bodies = Sketch(), _Bodies()
    x = g.input("x", SHAPE)
    start = [g.input(f"start_{n}", [BATCH, HEADS, PAST, DIM]) for n in ("key", "value")]
    body = bodies.sketch()
    step, going = bodies.counters()
    token = bodies.value("token")
    pasts = [ir.Value(name=f"past_{n}") for n in ("key", "value")]
    query, key, value = (heads(body, token) for _ in range(3))
    presents = [body.concat(p, new, axis=2) for p, new in zip(pasts, (key, value), strict=True)]
    after = context(body, query, *presents)
    on = body.op("Identity", going)
    loop = {"body": graph(body, [step, going, token, *pasts], [on, after, *presents])}
    times = g.const(np.int64(3), np.int64)
    made = node(g, "Loop", [times, g.bools(True), x, *start], loop, outputs=3)
    for value, name in zip(made, ("y", "key_out", "value_out"), strict=True):
        g.output(value, name)
    return g.model()
