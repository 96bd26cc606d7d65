"""Sines written out: as exact as float32 is, and the graph around them as it was."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.evaluator import Evaluator
from mha_export.rewrite.sines import OPS, parts_of_half_pi, with_own_sines

TEXT = """<ir_version: 8, opset_import: ["": 18]>
g (%s[n] x) => (%s[n] y, %s[n] z) { y = %s(x) z = Add(y, x) }"""


def model_of(op: str, dtype: str = "float") -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT % (dtype, dtype, dtype, op)))


def angles() -> np.ndarray:
    random = np.random.default_rng(0)
    near = [k * np.pi / 4 for k in range(-40, 41)]
    far = random.uniform(-1e5, 1e5, 4000)
    return np.array([*near, *random.uniform(-7, 7, 2000), *far, 0.0, -0.0, 1e-30], np.float32)


@pytest.mark.parametrize("op", OPS)
def test_it_is_exact_to_single_precision(op: str, evaluator: Evaluator) -> None:
    written, count = with_own_sines(model_of(op))
    assert count == 1
    assert not {node.op_type for node in written.graph} & set(OPS)
    onnx.checker.check_model(ir.to_proto(written), full_check=True)
    x = angles()
    found = evaluator.run(written, {"x": x})
    exact = {"Sin": np.sin, "Cos": np.cos}[op](x.astype(np.float64))
    assert np.abs(found["y"] - exact).max() < 2e-7
    np.testing.assert_array_equal(found["z"], found["y"] + x)


def test_the_model_given_is_left_as_it_was() -> None:
    model = model_of("Sin")
    with_own_sines(model)
    assert [node.op_type for node in model.graph] == ["Sin", "Add"]


@pytest.mark.parametrize(("op", "dtype"), [("Tanh", "float"), ("Sin", "double")])
def test_what_is_no_sine_of_single_precision_stays(op: str, dtype: str) -> None:
    model = model_of(op, dtype)
    assert with_own_sines(model) == (model, 0)


def test_the_parts_of_half_pi_add_up_and_are_short() -> None:
    parts = parts_of_half_pi()
    assert abs(sum(parts) - np.pi / 2) < 1e-12
    for part in parts[:2]:
        mantissa, _ = np.frexp(part)
        assert mantissa * 256 == int(mantissa * 256), "8 bits: a product with 2^16 is exact"
