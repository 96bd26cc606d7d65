"""Quantised graphs: integer projections are projections; integers inside an attention refuse it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from spellings import BATCH, QUERIES, Sketch

from mha_export.recognise import Rejection, recognise

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM

Linear = Callable[[Sketch, ir.Value], ir.Value]


def _weight(g: Sketch) -> ir.Value:
    return g.const(g.random.integers(-20, 20, (WIDTH, WIDTH)), np.int8)


def _rounded(g: Sketch, value: ir.Value, scale: float) -> ir.Value:
    step, zero = g.const(np.float32(scale)), g.const(128, np.uint8)
    return g.op("DequantizeLinear", g.op("QuantizeLinear", value, step, zero), step, zero)


def _dynamic(g: Sketch, value: ir.Value) -> ir.Value:
    integers, step, zero = g.multi(3, "DynamicQuantizeLinear", value)
    product = g.op("Cast", g.op("MatMulInteger", integers, _weight(g), zero), to=1)
    return g.add(g.mul(product, g.mul(step, 0.01)), g.weight(WIDTH))


def _weight_only(g: Sketch, value: ir.Value) -> ir.Value:
    weight = g.op("DequantizeLinear", _weight(g), g.const(np.float32(0.01)))
    return g.add(g.matmul(value, weight), g.weight(WIDTH))


def _static(g: Sketch, value: ir.Value) -> ir.Value:
    made = _weight_only(g, _rounded(g, value, 0.05))
    return _rounded(g, made, 0.05)


LINEARS: dict[str, Linear] = {"dynamic": _dynamic, "weight-only": _weight_only, "static": _static}


def attention(linear: Linear, *, inside: str = "nothing") -> ir.Model:
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    query, key, value = (
        g.transpose(g.reshape(linear(g, x), 0, 0, HEADS, DIM), 0, 2, 1, 3) for _ in range(3)
    )
    key = g.transpose(key, 0, 1, 3, 2)
    if inside == "product":
        left, right = (g.multi(3, "DynamicQuantizeLinear", side) for side in (query, key))
        product = g.op("MatMulInteger", left[0], right[0], left[2], right[2])
        scores = g.mul(g.op("Cast", product, to=1), g.mul(left[1], right[1]))
    else:
        scores = g.matmul(query, key)
    scores = g.mul(scores, DIM**-0.5)
    if inside == "scores":
        scores = _rounded(g, scores, 0.05)
    weights = g.op("Softmax", scores, axis=-1)
    if inside == "weights":
        weights = _rounded(g, weights, 1 / 255)
    merged = g.reshape(g.transpose(g.matmul(weights, value), 0, 2, 1, 3), 0, 0, WIDTH)
    g.output(linear(g, merged), "y")
    return g.model()


@pytest.mark.parametrize("name", LINEARS)
def test_quantised_projections(
    name: str,
    random_feeds: Callable[..., dict[str, np.ndarray]],
    assert_sound: Callable[..., None],
) -> None:
    model = attention(LINEARS[name])
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.replaceable
    assert (site.spec.q_heads, site.spec.head_dim) == (HEADS, DIM)
    assert_sound(recognition, random_feeds(model))


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        ("product", "scores-quantised"),
        ("scores", "scores-quantised"),
        ("weights", "weights-quantised"),
    ],
)
def test_integers_inside_refuse_it(inside: str, code: str) -> None:
    (verdict,) = recognise(attention(_weight_only, inside=inside)).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == code
    assert "when quantising" in verdict.reason.message
