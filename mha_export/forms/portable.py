"""``portable``: a MultiHeadAttention node, and a model-local function of its name that says it.

A runtime with a kernel for ``com.microsoft`` MultiHeadAttention uses it; any other inlines the
function. There is one body an op name, so a node uses only what every kernel of the op honours:
three inputs and ``attention_bias``, ``num_heads`` and ``scale``, all of them always given (an
evaluator that ignores omitted trailing inputs would fail). Everything else goes around the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.forms._additive import means_of_mask
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import ints
from mha_export.forms._scope import MICROSOFT, Scope
from mha_export.forms._support import verdict
from mha_export.forms.ort_mha import emit_multi_head, multi_head_means, multi_head_refusal
from mha_export.operands import Operands
from mha_export.spec import AttentionSpec, DType

_INPUTS = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")


@dataclass(frozen=True, kw_only=True)
class PortableForm:
    name: str = "portable"
    min_opset: int = 15
    summary: str = "MultiHeadAttention with its own body beside it: one file for many runtimes"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(
            self,
            spec,
            params,
            multi_head_refusal(spec),
            _refusal(spec),
            means=lambda: (
                means_of_mask(spec, frozenset()) | multi_head_means(spec, params, in_op=False)
            ),
        )

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        body = multi_head_function(scope.opset)
        scope.functions.setdefault(body.identifier(), body)
        return emit_multi_head(
            scope,
            spec,
            operands,
            native=frozenset(),
            in_op=False,
            always_bias=True,
            explicit_scale=True,
        )


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    if spec.io_dtype is DType.BF16:
        return Unsupported(
            feature="io_dtype", needs="fp32 or fp16: few kernels of the op take bf16"
        )
    return None


def multi_head_function(opset: int) -> ir.Function:
    """The body: ``softmax(scale * Q Kᵀ + attention_bias) V`` with heads split and merged.

    Softmax in fp32, so that the body is as precise as any spec it may stand for. ``bias`` and
    ``key_padding_mask`` are in its signature, because they are in the op's, and unused.
    """
    scope = Scope("", opset=opset)
    inputs = [ir.Value(name=name) for name in _INPUTS]
    query, key, value, _, _, attention_bias = inputs
    num_heads = _attribute(scope, "value_int", "num_heads", ir.AttributeType.INT)
    heads = scope.op("Reshape", [num_heads, ints(scope, 1)])
    shape = scope.op("Concat", [ints(scope, 0, 0), heads, ints(scope, -1)], {"axis": 0})
    scale = _attribute(scope, "value_float", "scale", ir.AttributeType.FLOAT)
    scale = scope.op("CastLike", [scale, query])
    q_bhsd = _apart(scope, scope.op("Mul", [query, scale]), shape, [0, 2, 1, 3])
    k_bhdt = _apart(scope, key, shape, [0, 2, 3, 1])
    v_bhte = _apart(scope, value, shape, [0, 2, 1, 3])
    scores = scope.op("Add", [scope.op("MatMul", [q_bhsd, k_bhdt]), attention_bias])
    wide = scope.op("Cast", [scores], {"to": ir.DataType.FLOAT.value})
    weights = scope.op("CastLike", [scope.op("Softmax", [wide], {"axis": -1}), query])
    mixed = scope.op("MatMul", [weights, v_bhte])
    merged = scope.op("Transpose", [mixed], {"perm": [0, 2, 1, 3]})
    output = scope.op("Reshape", [merged, ints(scope, 0, 0, -1)])
    output.name = "output"
    nodes = [*_constants(scope), *scope.nodes]
    graph = ir.Graph(inputs, [output], nodes=nodes, opset_imports={"": opset})
    attributes = [
        ir.Attr("num_heads", ir.AttributeType.INT, None),
        ir.Attr("scale", ir.AttributeType.FLOAT, None),
    ]
    return ir.Function(MICROSOFT, "MultiHeadAttention", graph=graph, attributes=attributes)


def _attribute(scope: Scope, kind: str, name: str, of: ir.AttributeType) -> ir.Value:
    """The node's own attribute as a tensor."""
    value = scope.op("Constant", [])
    node = value.producer()
    assert node is not None
    node.attributes[kind] = ir.RefAttr(kind, name, of)
    return value


def _apart(scope: Scope, value: ir.Value, shape: ir.Value, perm: list[int]) -> ir.Value:
    split = scope.op("Reshape", [value, shape])
    return scope.op("Transpose", [split], {"perm": perm})


def _constants(scope: Scope) -> list[ir.Node]:
    """The scope's initializers as Constant nodes: a function has no initializers."""
    nodes = []
    for value in scope.initializers:
        tensor = value.const_value
        assert tensor is not None
        node = ir.Node(
            "",
            "Constant",
            [],
            [ir.AttrTensor("value", ir.tensor(np.asarray(tensor.numpy())))],
            outputs=[ir.Value(name=value.name)],
        )
        value.replace_all_uses_with(node.outputs[0])
        nodes.append(node)
    return nodes


FORM = PortableForm()
