"""Sizes, axis orders and element types: each against numpy, and without a node too many."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench, heads_of

from mha_export.forms._layout import (
    Sizes,
    as_layout,
    cast,
    dimension,
    floating,
    four_dimensional,
    ints,
    lowest,
    numpy_dtype,
    reduce,
    repeat_kv,
    transposed_keys,
    unsqueeze,
)
from mha_export.operands import Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, CacheSpec, DType

RNG = np.random.default_rng(1)
X = RNG.normal(size=(2, 3, 5, 4)).astype(np.float32)
"""[b, h, s, d]."""

DTYPES = {
    DType.FP32: (np.float32, ir.DataType.FLOAT, -3.4028234663852886e38),
    DType.FP16: (np.float16, ir.DataType.FLOAT16, -65504.0),
    DType.BF16: (ml_dtypes.bfloat16, ir.DataType.BFLOAT16, -3.3895313892515355e38),
    DType.FP64: (np.float64, ir.DataType.DOUBLE, -1.7976931348623157e308),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dtype_in_three_words(dtype: DType) -> None:
    array, typed, least = DTYPES[dtype]
    assert numpy_dtype(dtype) == np.dtype(array)
    assert ir_dtype(dtype) is typed
    assert lowest(dtype) == least
    constant = floating(Bench().scope, (0.5, -2.0), dtype)
    assert constant.dtype is typed
    assert constant.const_value is not None
    assert constant.const_value.numpy().astype(float).tolist() == [0.5, -2.0]
    assert floating(Bench().scope, 0.5, dtype).shape == ir.Shape([])


def test_integers_are_a_vector_of_int64() -> None:
    for values in ((), (4,), (0, -1, 7)):
        constant = ints(Bench().scope, *values)
        assert constant.dtype is ir.DataType.INT64
        assert constant.const_value is not None
        assert constant.const_value.numpy().tolist() == list(values)


def test_axes_are_put_in_between() -> None:
    bench = Bench()
    value = bench.value("x", X)
    first, both = bench.run(unsqueeze(bench.scope, value, 0), unsqueeze(bench.scope, value, 1, 3))
    assert first.shape == (1, 2, 3, 5, 4)
    assert both.shape == (2, 1, 3, 1, 5, 4)


def test_a_cast_is_emitted_where_the_type_changes() -> None:
    bench = Bench()
    value = bench.value("x", X)
    assert cast(bench.scope, value, ir.DataType.FLOAT) is value
    assert bench.types == []
    as_int = cast(bench.scope, value, ir.DataType.INT64)
    assert bench.run(as_int)[0].tolist() == X.astype(np.int64).tolist()


@pytest.mark.parametrize("opset", [13, 17, 18, 23])
@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [(-1,), (0, 2)], ids=str)
def test_reductions_in_the_words_of_each_opset(
    axes: tuple[int, ...], keepdims: bool, opset: int
) -> None:
    bench = Bench(opset=opset)
    mean = reduce(bench.scope, "ReduceMean", bench.value("x", X), axes, keepdims=keepdims)
    (found,) = bench.run(mean)
    np.testing.assert_allclose(found, X.mean(axes, keepdims=keepdims), rtol=1e-5)
    (node,) = bench.scope.nodes
    assert ("axes" in node.attributes) is (opset < 18)


def test_a_reduction_keeps_its_axes_unless_told() -> None:
    bench = Bench()
    assert bench.run(reduce(bench.scope, "ReduceMax", bench.value("x", X), [1]))[0].ndim == 4


@pytest.mark.parametrize(("opset", "ops"), [(13, ["Shape", "Gather"]), (14, ["Shape", "Gather"]),
                                            (15, ["Shape"]), (18, ["Shape"])])  # fmt: skip
def test_the_size_of_an_axis(opset: int, ops: list[str]) -> None:
    """``Shape`` has ``start`` and ``end`` from opset 15 on."""
    for axis in range(4):
        bench = Bench(opset=opset)
        size = dimension(bench.scope, bench.value("x", X), axis)
        assert bench.types == ops
        assert size.shape == ir.Shape([1])
        assert bench.run(size)[0].tolist() == [X.shape[axis]]


def test_a_known_size_is_a_constant() -> None:
    bench = Bench()
    value = bench.value("x", X, shape=["b", 3, "s", 4])
    known = [dimension(bench.scope, value, axis) for axis in (1, 3)]
    assert bench.types == []
    assert [size.const_value.numpy().tolist() for size in known if size.const_value] == [[3], [4]]
    unknown = bench.value("y", X)
    unknown.shape = None
    assert bench.run(dimension(bench.scope, unknown, 2))[0].tolist() == [5]
    shorter = bench.value("z", X, shape=["b", 3])
    assert dimension(bench.scope, shorter, 2).const_value is None
    assert bench.types == ["Shape", "Shape"]


LAYOUTS = list(Layout)
MOVES = {
    (Layout.BSM, Layout.BSHD): ["Reshape"],
    (Layout.BSM, Layout.BHSD): ["Reshape", "Transpose"],
    (Layout.BSHD, Layout.BSM): ["Reshape"],
    (Layout.BSHD, Layout.BHSD): ["Transpose"],
    (Layout.BHSD, Layout.BSM): ["Transpose", "Reshape"],
    (Layout.BHSD, Layout.BSHD): ["Transpose"],
}


@pytest.mark.parametrize(("given", "wanted"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_one_order_of_axes_as_another(given: Layout, wanted: Layout) -> None:
    bench = Bench()
    heads = bench.heads("x", X, given)
    made = as_layout(bench.scope, heads, wanted)
    assert bench.types == MOVES.get((given, wanted), [])
    assert (made.layout, made.heads, made.dim) == (wanted, 3, 4)
    assert (made is heads) is (given is wanted)
    np.testing.assert_array_equal(heads_of(bench.run(made.value)[0], made), X)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_with_an_axis_of_their_own(layout: Layout) -> None:
    bench = Bench()
    heads = bench.heads("x", X, layout)
    made = four_dimensional(bench.scope, heads)
    assert (made is heads) is (layout is not Layout.BSM)
    assert bench.run(made.value)[0].ndim == 4
    np.testing.assert_array_equal(heads_of(bench.run(made.value)[0], made), X)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_key_heads_are_repeated_side_by_side(group: int, layout: Layout) -> None:
    bench = Bench()
    heads = bench.heads("x", X, layout)
    made = repeat_kv(bench.scope, heads, 3 * group)
    assert (made is heads) is (group == 1)
    assert (made.layout, made.heads, made.dim) == (layout, 3 * group, 4)
    np.testing.assert_array_equal(heads_of(bench.run(made.value)[0], made), X.repeat(group, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_turn_in_one_move(layout: Layout) -> None:
    bench = Bench()
    turned = transposed_keys(bench.scope, bench.heads("x", X, layout))
    assert bench.types.count("Transpose") == 1
    np.testing.assert_array_equal(bench.run(turned)[0], X.swapaxes(2, 3))


def _sized(bench: Bench, cache: CacheSpec | None, layout: Layout, past: int) -> Sizes:
    spec = AttentionSpec(q_heads=3, kv_heads=3, head_dim=4, cache=cache)
    named: dict[str, Any] = {
        "query": bench.heads("q", X, layout),
        "key": bench.heads("k", X[:, :, :2], layout),
        "value": bench.heads("v", X[:, :, :2], layout),
    }
    if cache is not None:
        named["past_key"] = bench.heads("p", np.zeros((2, 3, past, 4), np.float32))
    return Sizes(bench.scope, spec, Operands(**named))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sizes_of_an_attention(layout: Layout) -> None:
    """Keys count the past; a static cache counts its whole buffer."""
    bench = Bench()
    sizes = _sized(bench, None, layout, 0)
    assert [x.tolist() for x in bench.run(sizes.batch, sizes.q, sizes.kv)] == [[2], [5], [2]]
    for growth, total in (("concat", 9), ("static", 7), ("shared_buffer", 7)):
        bench = Bench()
        sizes = _sized(bench, CacheSpec(growth=growth), layout, 7)  # type: ignore[arg-type]
        assert [x.tolist() for x in bench.run(sizes.past, sizes.kv)] == [[7], [total]]
        assert sizes.kv.shape == ir.Shape([1])


def test_a_size_is_measured_once() -> None:
    bench = Bench()
    sizes = _sized(bench, CacheSpec(), Layout.BHSD, 7)
    for name in ("batch", "q", "past", "kv"):
        assert getattr(sizes, name) is getattr(sizes, name)
    assert bench.types.count("Shape") == 4


def test_a_range_counts_from_zero() -> None:
    bench = Bench()
    sizes = _sized(bench, None, Layout.BHSD, 0)
    found = sizes.range(sizes.q)
    assert bench.run(found)[0].tolist() == [0, 1, 2, 3, 4]
    assert found.dtype is ir.DataType.INT64
