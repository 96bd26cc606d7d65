"""The function that a portable file carries: the op's signature, and its meaning when inlined."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench
from runtimes import OrtSession

from mha_export.forms.portable import multi_head_function
from mha_export.operands import Layout

B, S, T, D, E = 3, 5, 7, 4, 6
RNG = np.random.default_rng(15)


@pytest.mark.parametrize("opset", [15, 18, 23])
def test_the_signature_is_the_op_s(opset: int) -> None:
    """Positions count, and so do names: a runtime binds a function's inputs by them."""
    body = multi_head_function(opset)
    assert body.identifier() == ("com.microsoft", "MultiHeadAttention", "")
    assert [value.name for value in body.inputs] == [
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias",
    ]  # fmt: skip
    assert [value.name for value in body.outputs] == ["output"]
    assert {name: attribute.type for name, attribute in body.attributes.items()} == {
        "num_heads": ir.AttributeType.INT,
        "scale": ir.AttributeType.FLOAT,
    }
    assert body.opset_imports == {"": opset}
    assert not body.graph.initializers


def test_every_node_of_the_body_is_read() -> None:
    body = multi_head_function(18)
    read = {id(value) for node in body for value in node.inputs}
    read |= {id(value) for value in body.outputs}
    assert all(id(value) in read for node in body for value in node.outputs)


@pytest.mark.parametrize("opset", [15, 23])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_runtime_that_inlines_it_computes_the_attention(
    dtype: type, heads: int, opset: int
) -> None:
    """Under a name that no runtime has a kernel for."""
    bench = Bench(opset=opset)
    query, key, value = (
        RNG.standard_normal(shape).astype(dtype)
        for shape in ((B, heads, S, D), (B, heads, T, D), (B, heads, T, E))
    )
    bias = RNG.standard_normal((B, heads, S, T)).astype(dtype)
    operands = [
        bench.heads(name, array, Layout.BSM).value
        for name, array in (("q", query), ("k", key), ("v", value))
    ]
    made = bench.scope.op(
        "Body",
        [*operands, None, None, bench.value("b", bias)],
        {"num_heads": heads, "scale": 0.7},
        domain="elsewhere",
        dtype=operands[0].dtype,
    )
    made.name = "made"
    body = multi_head_function(opset)
    named = ir.Function(
        "elsewhere", "Body", graph=body.graph, attributes=list(body.attributes.values())
    )
    graph = ir.Graph(
        bench.inputs,
        [made],
        nodes=bench.scope.nodes,
        opset_imports={"": opset, "elsewhere": 1},
        name="inlined",
    )
    session = OrtSession(ir.Model(graph, ir_version=10, functions=[named]))
    found = session.run(bench.arrays)["made"]
    wide = [array.astype(np.float64) for array in (query, key, value, bias)]
    scores = np.exp(0.7 * wide[0] @ wide[1].swapaxes(2, 3) + wide[3])
    exact = scores / scores.sum(axis=-1, keepdims=True) @ wide[2]
    flat = exact.swapaxes(1, 2).reshape(B, S, heads * E)
    tolerance = 1e-5 if dtype is np.float32 else 1e-2
    np.testing.assert_allclose(found, flat, rtol=tolerance, atol=tolerance)
