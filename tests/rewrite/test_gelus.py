"""An exact Gelu as ONNX Runtime's own: the same numbers, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.evaluator import Evaluator
from mha_export.rewrite import with_contrib_gelus

TEXT = """<ir_version: 9, opset_import: ["": 20]>
g (float[n] x) => (float[n] y) { y = Gelu%s(x) }"""


def model_of(attributes: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT % attributes))


@pytest.mark.parametrize("attributes", ["", '<approximate = "none">'])
def test_an_exact_one_is_the_contrib_operator(attributes: str, evaluator: Evaluator) -> None:
    model = model_of(attributes)
    made = with_contrib_gelus(model)
    (node,) = made.graph
    assert (node.domain, node.op_type, len(node.attributes)) == ("com.microsoft", "Gelu", 0)
    assert made.graph.opset_imports == {"": 20, "com.microsoft": 1}
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    old, new = (evaluator.run(one, {"x": x})["y"] for one in (model, made))
    np.testing.assert_allclose(new, old, atol=1e-6)
    assert [one.domain for one in model.graph] == [""]


def test_an_approximate_one_stays() -> None:
    model = model_of('<approximate = "tanh">')
    assert with_contrib_gelus(model) is model
