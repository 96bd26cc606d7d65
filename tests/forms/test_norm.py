"""qk-norm: its numbers against numpy in every kind and type, and when it is one op."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._norm import normalise
from mha_export.operands import Layout
from mha_export.spec import DType, QkNormSpec

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 3, 5, 4)) * 3
EPSILON = 0.25


def _expected(norm: QkNormSpec, x: np.ndarray) -> np.ndarray:
    if norm.kind == "l2":
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), norm.epsilon)
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.epsilon)


def _run(bench: Bench, norm: QkNormSpec, layout: Layout, dtype: type, op: bool) -> np.ndarray:
    width = 12 if norm.over == "hidden" else 4
    stated = {"weight": norm.weight, "bias": norm.bias}
    parts = {
        name: bench.value(name, RNG.normal(size=width).astype(dtype)) if here else None
        for name, here in stated.items()
    }
    heads = bench.heads("x", X.astype(dtype), layout)
    io = {np.float16: DType.FP16, np.float32: DType.FP32, np.float64: DType.FP64}[dtype]
    made = normalise(bench.scope, norm, heads, io, parts["weight"], parts["bias"], op=op)
    assert (made.heads, made.dim) == (3, 4)
    (found,) = bench.run(made.value)
    assert found.dtype == dtype
    x = X.swapaxes(1, 2).reshape(2, 5, 12) if width == 12 else X
    y = _expected(norm, x)
    if norm.weight:
        y = y * bench.arrays["weight"]
    if norm.bias:
        y = y + bench.arrays["bias"]
    if width == 12:
        y = y.reshape(2, 5, 3, 4).swapaxes(1, 2)
    tolerance = {np.float16: 4e-3, np.float32: 1e-5, np.float64: 1e-12}[dtype]
    np.testing.assert_allclose(heads_of(found, made), y, rtol=tolerance, atol=tolerance)
    return found


PARTS = [(True, False), (False, False), (True, True), (False, True)]


@pytest.mark.parametrize("parts", PARTS, ids=["weight", "none", "both", "bias"])
@pytest.mark.parametrize("over", ["head", "hidden"])
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_the_numbers_of_every_kind(kind: Any, over: Any, parts: tuple[bool, bool]) -> None:
    weight, bias = parts
    norm = QkNormSpec(kind=kind, over=over, weight=weight, bias=bias, epsilon=EPSILON)
    for dtype, opset in itertools.product((np.float32, np.float16, np.float64), (17, 18)):
        _run(Bench(opset=opset), norm, Layout.BHSD, dtype, True)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("over", ["head", "hidden"])
def test_any_order_of_axes(over: Any, layout: Layout) -> None:
    for opset in (18, 23):
        norm = QkNormSpec(kind="rms", over=over, epsilon=EPSILON)
        _run(Bench(opset=opset), norm, layout, np.float32, True)


@pytest.mark.parametrize(
    ("fields", "opset", "op", "fused"),
    [
        ({}, 23, True, True),
        ({}, 24, True, True),
        ({"weight": False}, 23, True, True),
        ({"weight": False, "over": "hidden"}, 23, True, True),
        ({}, 22, True, False),
        ({}, 23, False, False),
        ({"bias": True}, 23, True, False),
        ({"kind": "layer"}, 23, True, False),
        ({"kind": "l2"}, 23, True, False),
    ],
)
def test_one_op_where_it_says_the_same(
    fields: dict[str, Any], opset: int, op: bool, fused: bool
) -> None:
    """RMSNormalization came with opset 23; it has no bias."""
    norm = QkNormSpec(**{"kind": "rms", "epsilon": EPSILON} | fields)
    bench = Bench(opset=opset)
    _run(bench, norm, Layout.BHSD, np.float32, op)
    assert (bench.types[-1] == "RMSNormalization") is fused


@pytest.mark.parametrize(
    ("dtype", "casts"), [(np.float16, 2), (np.float32, 0), (np.float64, 0)], ids=str
)
def test_sixteen_bits_are_normalised_in_fp32(dtype: type, casts: int) -> None:
    """The square of 1000 is beyond fp16."""
    for kind in ("rms", "layer", "l2"):
        bench = Bench()
        heads = bench.heads("x", np.full((1, 1, 1, 4), 1000.0).astype(dtype))
        io = {np.float16: DType.FP16, np.float32: DType.FP32, np.float64: DType.FP64}[dtype]
        norm = QkNormSpec(kind=kind, weight=False, epsilon=EPSILON)  # type: ignore[arg-type]
        made = normalise(bench.scope, norm, heads, io, None, None, op=True)
        assert bench.types.count("Cast") == casts
        expected = {"rms": 1.0, "layer": 0.0, "l2": 0.5}[kind]
        np.testing.assert_allclose(bench.run(made.value)[0], expected, atol=1e-3)


def test_a_vector_below_epsilon_is_not_blown_up() -> None:
    bench = Bench()
    heads = bench.heads("x", np.full((1, 1, 1, 4), 1e-3, np.float32))
    norm = QkNormSpec(kind="l2", weight=False, epsilon=EPSILON)
    made = normalise(bench.scope, norm, heads, DType.FP32, None, None, op=True)
    np.testing.assert_allclose(bench.run(made.value)[0], 4e-3, rtol=1e-5)
