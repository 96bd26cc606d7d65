"""Shapes across the border of a body: what a Loop or Scan gives it, and what comes out of it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal

import onnx_ir as ir

Shape = tuple[int, ...]
Asking = Generator[tuple[Literal["shape"], ir.Value], Any, Shape | None]
"""Asks for shapes of other values and returns one."""

_LEADING = {"Loop": (2, 1), "Scan": (0, 0)}
"""Inputs (step and condition) and outputs of the body before the carried values."""


def holders_of(model: ir.Model) -> Mapping[ir.Graph, ir.Node]:
    """The node that each body belongs to."""
    return {
        attribute.as_graph(): node
        for node in model.graph.all_nodes()
        for attribute in node.attributes.values()
        if attribute.type is ir.AttributeType.GRAPH
    }


def shape_given(value: ir.Value, holders: Mapping[ir.Graph, ir.Node]) -> Asking:
    """The shape of a body's input, as its first round has it; None for any other value."""
    graph = value.graph
    node = holders.get(graph) if isinstance(graph, ir.Graph) else None
    if node is None or graph is None or node.op_type not in _LEADING or value not in graph.inputs:
        return None
    place = graph.inputs.index(value)
    if place < _LEADING[node.op_type][0]:
        return ()
    outer = node.inputs[place]
    shape: Shape | None = None if outer is None else (yield ("shape", outer))
    scanned = node.attributes.get_int("num_scan_inputs", 0)
    turn = place - (len(graph.inputs) - scanned)
    if shape is None or node.op_type == "Loop" or turn < 0:
        return shape
    axes = node.attributes.get_ints("scan_input_axes", [0] * scanned)
    axis = axes[turn] % len(shape)
    return (*shape[:axis], *shape[axis + 1 :])


def shape_returned(node: ir.Node, index: int) -> Asking:
    """The shape of a carried value after the last round; None where it grows, or is gathered."""
    body = node.attributes["body"].as_graph()
    before, ahead = _LEADING[node.op_type]
    carried = len(body.inputs) - before - node.attributes.get_int("num_scan_inputs", 0)
    if index >= carried:
        return None
    first = yield ("shape", body.inputs[before + index])
    last = yield ("shape", body.outputs[ahead + index])
    return last if first == last else None
