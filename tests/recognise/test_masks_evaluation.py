"""Evaluation at concrete sizes: shapes of anything, contents of what needs no activations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from mha_export.recognise._evaluate import Context

MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
g (int64[batch,seq] ids, float[batch,seq,8] x, float[8,8] w) => (float[a,b,c] y)
<float[4,8] table = {0,0,0,0,0,0,0,0, 1,1,1,1,1,1,1,1, 2,2,2,2,2,2,2,2, 3,3,3,3,3,3,3,3}>
{
  one = Constant<value_int = 1>()
  zero = Constant<value_int = 0>()
  dims = Shape(x)
  s = Gather(dims, one)
  rows = Range(zero, s, one)
  pad = Equal(ids, zero)
  embedded = Gather(table, ids)
  sum = Add(x, embedded)
  h = MatMul(sum, w)
  back = Constant<value_ints = [0, -1, 2, 4]>()
  heads = Reshape(h, back)
  seq = Shape<start = 1, end = 2>(heads)
  positive = Greater(h, x)
  y = Identity(h)
}"""


@pytest.fixture
def model() -> ir.Model:
    return ir.from_onnx_text(MODEL)


def values(model: ir.Model) -> dict[str | None, ir.Value]:
    found = {out.name: out for node in model.graph for out in node.outputs}
    return found | {value.name: value for value in model.graph.inputs}


def test_shapes_pass_through_what_has_no_content(model: ir.Model) -> None:
    view = Context(model).sized({"batch": 2, "seq": 5})
    named = values(model)
    assert view.shape(named["heads"]) == (2, 5, 2, 4)
    assert view.shape(named["rows"]) == (5,)
    assert Context(model).sized({"batch": 2}).shape(named["heads"]) is None


def test_contents_follow_from_sizes_constants_and_what_is_fed(model: ir.Model) -> None:
    context, named = Context(model), values(model)
    view = context.sized({"batch": 2, "seq": 3})
    assert np.array_equal(view.array(named["rows"]), [0, 1, 2])  # type: ignore[arg-type]
    assert np.array_equal(view.array(named["seq"]), [3])  # type: ignore[arg-type]
    assert view.array(named["pad"]) is None
    ids = np.array([[0, 1, 2], [3, 0, 0]])
    fed = context.sized({"batch": 2, "seq": 3}, {named["ids"]: ids})
    assert np.array_equal(fed.array(named["pad"]), ids == 0)  # type: ignore[arg-type]
    assert fed.array(named["h"]) is None
    assert view.array(named["pad"]) is None


def test_sources_stop_at_activations(model: ir.Model) -> None:
    context, named = Context(model), values(model)
    assert context.sources(named["rows"]) == frozenset()
    assert context.sources(named["pad"]) == {named["ids"]}
    assert context.sources(named["h"]) == {named["h"]}
    assert context.sources(named["positive"]) == {named["h"], named["x"]}
    assert context.sources(named["embedded"]) == {named["embedded"]}


def test_wide_views_do_not_round(model: ir.Model) -> None:
    context, named = Context(model), values(model)
    third = np.full((1, 1, 8), 1 / 3)
    contents = {named["h"]: third}
    view = context.sized({"batch": 1, "seq": 1}, contents, wide=True)
    found = view.array(named["y"])
    assert found is not None
    assert found.dtype == np.float64


def test_equal_computations_have_equal_signatures(model: ir.Model) -> None:
    """Shape of another tensor of the same shape is the same number; of another shape it is not."""
    text = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch,seq] x, float[batch,seq] y, float[batch,keys] z) => (int64[a] o)
{
  a = Shape(x)
  b = Shape(y)
  c = Shape(z)
  o = Add(a, b)
}"""
    twins = ir.from_onnx_text(text)
    context, named = Context(twins), values(twins)
    plans = [{"batch": 2, "seq": 3, "keys": 4}, {"batch": 5, "seq": 6, "keys": 7}]
    a, b, c = (context.signature(named[name], plans) for name in "abc")
    assert a == b != c


def test_derived_nodes_stand_before_their_readers_and_are_shared(model: ir.Model) -> None:
    context, named = Context(model), values(model)
    last = list(model.graph)[-1]
    (first,) = context.derive("Not", [named["pad"]], before=last)
    (again,) = context.derive("Not", [named["pad"]], before=last)
    assert first is again
    producer = first.producer()
    assert producer is not None
    pad = named["pad"].producer()
    nodes = list(model.graph)
    assert pad is not None
    assert nodes.index(pad) < nodes.index(producer) < nodes.index(last)


def test_shapes_known_elsewhere_are_taken_over(model: ir.Model) -> None:
    context, named = Context(model), values(model)
    sizes = {"batch": 2, "seq": 5}
    context.prefer(sizes, {named["h"]: (2, 5, 8)})
    assert context.sized(sizes).shape(named["heads"]) == (2, 5, 2, 4)
    assert context.memo["region sizes"] == sizes


@pytest.mark.parametrize(
    ("pads", "axes", "expected"),
    [
        ("0, 2", "-1", (2, 5)),
        ("1, 0", "0", (3, 3)),
        ("1, 0, 2, 3", "1, 0", (5, 6)),
        ("1, 0, 2, 3", "0, 1", (5, 6)),
    ],
)
def test_a_pad_of_some_axes_is_that_of_onnx(
    pads: str, axes: str, expected: tuple[int, ...]
) -> None:
    count = len(axes.split(","))
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 18]>
g (float[2,3] x) => (float[a,b] y)
<int64[{2 * count}] pads = {{{pads}}}, int64[{count}] axes = {{{axes}}}>
{{
  low = Constant<value_float = -9.0>()
  y = Pad(x, pads, low, axes)
}}""")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = values(model)["y"]
    assert Context(model).sized({}).shape(y) == expected
    found = Context(model).sized({}, {model.graph.inputs[0]: x}).array(y)
    (wanted,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    np.testing.assert_array_equal(found, wanted)
