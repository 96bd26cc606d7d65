"""``Gelu`` of ai.onnx (opset 20) as ONNX Runtime's own operator of that name.

For providers that have a kernel for com.microsoft's and none for the standard's: DirectML leaves
those nodes to the CPU. Both are ``x Phi(x)``; the one approximated by a tanh is left as it is.
"""

from __future__ import annotations

import onnx_ir as ir

MICROSOFT = "com.microsoft"


def with_contrib_gelus(model: ir.Model) -> ir.Model:
    """A copy in which every exact ``Gelu`` is com.microsoft's."""
    if not any(_is_exact_gelu(node) for node in model.graph):
        return model
    copy = model.clone()
    for node in copy.graph:
        if _is_exact_gelu(node):
            node.attributes.clear()
            node.domain = MICROSOFT
    copy.graph.opset_imports.setdefault(MICROSOFT, 1)
    return copy


def _is_exact_gelu(node: ir.Node) -> bool:
    if node.op_type != "Gelu" or node.domain:
        return False
    said = node.attributes.get("approximate")
    return said is None or said.as_string() == "none"
