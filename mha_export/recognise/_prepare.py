"""The recogniser's own copy of a model: functions inlined, dead nodes gone, every node named."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

from mha_export.recognise.fused import readers


def prepared(model: ir.Model) -> ir.Model:
    """A copy to read and to derive values in; tensors are shared with the original, not loaded."""
    copy = model.clone()
    if copy.functions:
        result = passes.InlinePass(criteria=_is_no_fused_op)(copy)
        copy = result.model
    passes.RemoveUnusedNodesPass()(copy)
    _name_nodes(copy)
    return copy


def _is_no_fused_op(function: ir.Function) -> bool:
    """A function that stands in for a fused op (a portable body) is read as that op."""
    return (function.domain, function.name) not in readers()


def _name_nodes(model: ir.Model) -> None:
    """Unique names for nodes without one, or with one another node has."""
    taken: set[str] = set()
    nameless: list[ir.Node] = []
    for node in model.graph.all_nodes():
        if not node.name or node.name in taken:
            nameless.append(node)
        else:
            taken.add(node.name)
    for node in nameless:
        stem = node.name or node.op_type
        count = 0
        while f"{stem}_{count}" in taken:
            count += 1
        node.name = f"{stem}_{count}"
        taken.add(node.name)
