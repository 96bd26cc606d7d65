"""Which nodes a replacement would leave without a reader."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def dying(
    replaced: Iterable[ir.Value], kept: Iterable[ir.Value]
) -> tuple[list[ir.Node], set[ir.Node]]:
    """Nodes that nothing reads once ``replaced`` values come from elsewhere.

    ``kept`` values are read by the replacement and stay. The nodes come in graph order within
    their graph. Linear in the number of nodes found and their neighbours.
    """
    gone = set(replaced)
    stay = set(kept)
    # A node is found after all its readers, so the reverse of this order is that of the graph.
    dead: dict[ir.Node, None] = {}
    pending = [node for value in gone if (node := value.producer()) is not None]
    while pending:
        node = pending.pop()
        if node in dead or not all(_unread(value, gone, stay, dead) for value in node.outputs):
            continue
        dead[node] = None
        for value in node.inputs:
            if value is not None and (maker := value.producer()) is not None:
                pending.append(maker)
    return list(reversed(dead)), set(dead)


def _unread(
    value: ir.Value, gone: set[ir.Value], stay: set[ir.Value], dead: dict[ir.Node, None]
) -> bool:
    if value in gone:
        return True
    if value in stay or value.is_graph_output():
        return False
    return all(user in dead for user, _ in value.uses())
