"""Exponentials divided by their sum, however it is written; and what is no softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from mha_export.recognise import Rejection, recognise

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch,4,seq,8] q, float[batch,4,keys,8] k, float[batch,4,keys,8] v)
  => (float[batch,4,seq,8] y)
{{
  kt = Transpose<perm = [0, 1, 3, 2]>(k)
  raw = MatMul(q, kt)
  scale = Constant<value_float = 0.25>()
  scores = Mul(raw, scale)
  last = Constant<value_ints = [-1]>()
  one = Constant<value_float = 1.0>()
  e = Exp(scores)
  {body}
}}"""
PRODUCT = "w = MatMul(e, v)\n  "
SUM = "t = ReduceSum<keepdims = 1>(e, last)\n  "
EINSUM = """t0 = Einsum<equation = "bhij->bhi">(e)
  t = Unsqueeze(t0, last)
  """
ATTENTIONS = {
    "divided late": PRODUCT + SUM + "y = Div(w, t)",
    "sum without its axis": PRODUCT + "t0 = ReduceSum<keepdims = 0>(e, last)\n"
    "  t = Unsqueeze(t0, last)\n  y = Div(w, t)",
    "product by einsum": 'w = Einsum<equation = "bhij,bhjd->bhid">(e, v)\n  '
    + SUM + "y = Div(w, t)",
    "sum by einsum": PRODUCT + EINSUM + "y = Div(w, t)",
    "divided first by a sum by einsum": EINSUM + "p = Div(e, t)\n  y = MatMul(p, v)",
    "contracted with ones": PRODUCT + "to = Shape(v)\n  ones = Expand(one, to)\n"
    "  t = MatMul(e, ones)\n  y = Div(w, t)",
    "a power of minus one": PRODUCT + SUM + "m = Constant<value_float = -1.0>()\n"
    "  r = Pow(t, m)\n  y = Mul(w, r)",
    "by their magnitude": "t = ReduceL1<keepdims = 1>(e, last)\n  p = Div(e, t)\n"
    "  y = MatMul(p, v)",
    "in another layout": PRODUCT + SUM + "wt = Transpose<perm = [0, 2, 1, 3]>(w)\n"
    "  tt = Transpose<perm = [0, 2, 1, 3]>(t)\n  yt = Div(wt, tt)\n"
    "  y = Transpose<perm = [0, 2, 1, 3]>(yt)",
}  # fmt: skip
SHIFT = """m = ReduceMax<keepdims = 1>(scores, last)
  x = Sub(scores, m)
  f = Exp(x)
  u = ReduceSum<keepdims = 1>(f, last)
  """
ROUNDED = "tiny = Constant<value_float = 1e-9>()\n  "
LEARNT = "l = Constant<value = float[1,4,1,1] {-1.0, 0.5, 0.0, 2.0}>()\n  "
SINKS = {
    "one more": PRODUCT + SUM + "u = Add(t, one)\n  y = Div(w, u)",
    "one more, divided first": SUM + "u = Add(one, t)\n  p = Div(e, u)\n  y = MatMul(p, v)",
    "one more by einsum": PRODUCT + EINSUM + "u = Add(t, one)\n  y = Div(w, u)",
    "one more, its inverse": SUM + "u = Add(one, t)\n  r = Reciprocal(u)\n  p = Mul(e, r)\n"
    "  y = MatMul(p, v)",
    "a little more": ROUNDED + SUM + "u = Add(t, tiny)\n  p = Div(e, u)\n  y = MatMul(p, v)",
    "one more, shifted": SHIFT + "n = Neg(m)\n  c = Exp(n)\n  d = Add(c, u)\n  p = Div(f, d)\n"
    "  y = MatMul(p, v)",
    "one more, shifted and divided late": SHIFT + "n = Neg(m)\n  c = Exp(n)\n  d = Add(c, u)\n"
    "  w = MatMul(f, v)\n  y = Div(w, d)",
    "a learnt one": LEARNT + SUM + "c = Exp(l)\n  d = Add(t, c)\n  p = Div(e, d)\n"
    "  y = MatMul(p, v)",
    "a learnt one, shifted": LEARNT + SHIFT + "n = Sub(l, m)\n  c = Exp(n)\n  d = Add(u, c)\n"
    "  p = Div(f, d)\n  y = MatMul(p, v)",
}  # fmt: skip
OTHERS = {
    "divided by the mean": PRODUCT + "t = ReduceMean<keepdims = 1>(e, last)\n  y = Div(w, t)",
    "one less": PRODUCT + SUM + "u = Sub(t, one)\n  y = Div(w, u)",
    "one more of a shifted sum": SHIFT + "d = Add(u, one)\n  p = Div(f, d)\n  y = MatMul(p, v)",
    "one more of another shift": SHIFT + "n = Neg(m)\n  half = Mul(n, scale)\n  c = Exp(half)\n"
    "  d = Add(c, u)\n  p = Div(f, d)\n  y = MatMul(p, v)",
    "something more a key": SUM + "c = Exp(raw)\n  d = Add(t, c)\n  p = Div(e, d)\n"
    "  y = MatMul(p, v)",
    "a sum over queries and keys": PRODUCT + "h = Constant<value_ints = [2, 3]>()\n"
    "  t = ReduceSum<keepdims = 1>(e, h)\n  y = Div(w, t)",
    "contracted with twos": PRODUCT + "to = Shape(v)\n  two = Constant<value_float = 2.0>()\n"
    "  ones = Expand(two, to)\n  t = MatMul(e, ones)\n  y = Div(w, t)",
    "something added before": PRODUCT + SUM + "x = Add(w, one)\n  y = Div(x, t)",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_softmax_however_it_divides(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    model = ir.from_onnx_text(GRAPH.format(body=ATTENTIONS[name]))
    recognition = recognise(model)
    (site,) = recognition.verdicts
    assert site.verdict == "attention", site.to_json()["reason"]
    assert_sound(recognition, random_feeds(model))


@pytest.mark.parametrize("name", SINKS)
def test_what_is_added_to_the_sum_is_a_sink(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    model = ir.from_onnx_text(GRAPH.format(body=SINKS[name]))
    recognition = recognise(model)
    (site,) = recognition.verdicts
    assert site.verdict == "attention", site.to_json()["reason"]
    assert site.spec.sinks
    assert_sound(recognition, random_feeds(model))


def test_what_is_lost_beside_a_sum_of_at_least_one_is_nothing(
    random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    body = ROUNDED + SHIFT + "d = Add(u, tiny)\n  p = Div(f, d)\n  y = MatMul(p, v)"
    model = ir.from_onnx_text(GRAPH.format(body=body))
    recognition = recognise(model)
    (site,) = recognition.verdicts
    assert not site.spec.sinks
    assert_sound(recognition, random_feeds(model))


def test_exponentials_in_another_type_than_their_product() -> None:
    """The weights that are divided first are cast as the exponentials were."""
    half = "h = Cast<to = 10>(e)\n  vh = Cast<to = 10>(v)\n  w = MatMul(h, vh)\n  "
    total = "t = ReduceSum<keepdims = 1>(h, last)\n  "
    body = half + total + "yh = Div(w, t)\n  y = Cast<to = 1>(yh)"
    recognition = recognise(ir.from_onnx_text(GRAPH.format(body=body)))
    (site,) = recognition.verdicts
    assert site.verdict == "attention", site.to_json()["reason"]
    onnx.checker.check_model(ir.to_proto(recognition.model), full_check=True)


@pytest.mark.parametrize("name", OTHERS)
def test_what_divides_otherwise_is_said_to(name: str) -> None:
    (verdict,) = recognise(ir.from_onnx_text(GRAPH.format(body=OTHERS[name]))).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "normalised-otherwise"


UNDIVIDED = {
    "never divided": "y = MatMul(e, v)",
    "masked and never divided": "m = Mul(e, one)\n  y = MatMul(m, v)",
    "a column of ones beside the values": "at = Shape(v)\n  all = Expand(one, at)\n"
    "  first = Constant<value_ints = [0]>()\n  single = Constant<value_ints = [1]>()\n"
    "  ones = Slice(all, first, single, last)\n  wide = Concat<axis = -1>(v, ones)\n"
    "  w = MatMul(e, wide)\n  end = Constant<value_ints = [8]>()\n"
    "  more = Constant<value_ints = [9]>()\n  n = Slice(w, first, end, last)\n"
    "  d = Slice(w, end, more, last)\n  y = Div(n, d)",
}  # fmt: skip


@pytest.mark.parametrize("name", UNDIVIDED)
def test_exponentials_that_weigh_values_have_a_verdict(name: str) -> None:
    (verdict,) = recognise(ir.from_onnx_text(GRAPH.format(body=UNDIVIDED[name]))).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "not-normalised"


def test_exponentials_of_a_linear_layer_are_no_scores() -> None:
    """Decays of a state space, features of a kernel."""
    weight = "float[8,3] {" + ", ".join(["0.5"] * 24) + "}"
    text = GRAPH.format(body="y = MatMul(e, v)")
    text = text.replace("[batch,4,keys,8] v", "[batch,4,3,8] v")
    text = text.replace("MatMul(q, kt)", "MatMul(q, w)")
    text = text.replace("raw =", f"w = Constant<value = {weight}>()\n  raw =")
    assert not recognise(ir.from_onnx_text(text)).verdicts


def test_a_sigmoid_is_no_softmax() -> None:
    body = "u = Add(e, one)\n  p = Div(e, u)\n  y = MatMul(p, v)"
    assert not recognise(ir.from_onnx_text(GRAPH.format(body=body))).verdicts
