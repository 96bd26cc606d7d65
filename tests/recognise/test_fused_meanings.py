"""What stands around a fused node is read for what it means; one edit away it is something else.

A sink said as one more key, a Where for rows without keys, a bias beside causality, a rotation of
channels that are joined later: each as a form or an exporter writes it, and edits of it. Every site
found must say what the graph computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.recognise import Site, recognise
from mha_export.spec import EmptyRow

SIZES = {"batch": 2, "seq": 5}


def _site(text: str) -> tuple[ir.Model, Site, Any]:
    model = ir.from_onnx_text(text)
    recognition = recognise(model)
    (site,) = recognition.sites
    return model, site, recognition


def _with(words: str, **edits: str) -> str:
    for old, new in edits.items():
        words = words.replace(f"<{old}>", new)
    return words


SINK = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch,4,seq,8] q, float[batch,2,seq,8] k, float[batch,2,seq,8] v, float[4] sinks,
   float[batch,4,seq,seq] bias) => (float[batch,4,seq,8] y)
{
  pads = Constant<value_ints = <pads>>()
  axes = Constant<value_ints = [0, 2, 3]>()
  filler = Constant<value_float = <filler>>()
  kp = Pad(k, pads)
  vp = Pad(v, pads, filler)
  shape = Shape<start = 0, end = 3>(bias)
  one = Constant<value_ints = [1]>()
  to = Concat<axis = 0>(shape, one)
  s4 = Unsqueeze(sinks, axes)
  wide = Expand(s4, to)
  <column>
  mask = Concat<axis = -1>(<order>)
  y = Attention(q, kp, vp, mask)
}"""
SINKS = {
    "a sink": ({}, True),
    "values that are not zero": ({"filler": "1.0"}, False),
    "zeros before the keys": ({"pads": "[0, 0, 1, 0, 0, 0, 0, 0]"}, False),
    "a column before the bias": ({"order": "column, bias"}, False),
    "a column of the queries": (
        {"column": "r = ReduceMax(bias)\n one3 = Constant<value_ints = [3]>()\n"
         " column = ReduceMean<keepdims = 1>(bias, one3)"},
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_is_one_key_more(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    edits, sinks = SINKS[name]
    parts = {
        "pads": "[0, 0, 0, 0, 0, 0, 1, 0]",
        "filler": "0.0",
        "column": "column = Identity(wide)",
        "order": "bias, column",
    }
    model, site, recognition = _site(_with(SINK, **{**parts, **edits}))
    assert site.spec.sinks is sinks
    assert (site.operands.sinks is not None) is sinks
    assert_sound(recognition, random_feeds(model, **SIZES))


ROWS = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch,4,seq,8] q, float[batch,4,seq,8] k, float[batch,4,seq,8] v,
   bool[batch,seq] padding) => (float[batch,4,seq,8] y)
{
  heads = Constant<value_ints = [1, 2]>()
  last = Constant<value_ints = [3]>()
  keep = Unsqueeze(padding, heads)
  shape = Shape<start = 2, end = 3>(q)
  one = Constant<value_ints = [1]>()
  to = Concat<axis = 0>(one, one, shape, one)
  mask = Expand(keep, to)
  out = Attention(q, k, v, mask)
  number = Cast<to = 6>(<seen>)
  most = <fold><keepdims = 1>(number, last)
  has = Cast<to = 9>(most)
  lengths = Constant<value_ints = [<along>]>()
  mean = ReduceMean<keepdims = 1>(v, lengths)
  nan = Constant<value_float = nan>()
  zero = Constant<value_float = 0.0>()
  half = Constant<value_float = 0.5>()
  y = Where(<order>)
}"""
POLICIES = {
    "the mean of the values": ({"order": "has, out, mean"}, EmptyRow.UNIFORM, "y"),
    "not a number": ({"order": "has, out, nan"}, EmptyRow.NAN, "y"),
    "zero": ({"order": "has, out, zero"}, EmptyRow.ZERO, "y"),
    "a half": ({"order": "has, out, half"}, EmptyRow.ZERO, "out"),
    "the mean of the channels": ({"along": "3", "order": "has, out, mean"}, EmptyRow.ZERO, "out"),
    "rows with every key": ({"fold": "ReduceMin", "order": "has, out, nan"}, EmptyRow.ZERO, "out"),
    "the other rows": ({"order": "has, nan, out"}, EmptyRow.ZERO, "out"),
    "rows of another mask": (
        {"seen": "other", "order": "has, out, nan"}, EmptyRow.ZERO, "out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_rows_without_keys_may_get_a_value_afterwards(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    edits, policy, output = POLICIES[name]
    parts = {"seen": "mask", "fold": "ReduceMax", "along": "2"}
    text = _with(ROWS, **{**parts, **edits})
    if "(other)" in text:
        text = text.replace("number =", "other = Not(mask)\n  number =")
    model, site, recognition = _site(text)
    assert site.spec.mask.empty_row is policy
    assert site.output.value.name == output
    feeds = random_feeds(model, **SIZES)
    feeds["padding"][0] = False
    assert_sound(recognition, feeds)


BESIDE = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[batch,seq,32] q, float[batch,seq,16] k, float[batch,seq,16] v, bool[batch,seq] padding,
   float[4] sinks) => (float[batch,seq,32] y)
{
  heads = Constant<value_ints = [1, 2]>()
  keep = Unsqueeze(padding, heads)
  zero = Constant<value_float = 0.0>()
  fill = Constant<value_float = <fill>>()
  row = Where(keep, zero, fill)
  all = Shape(q)
  at = Constant<value_int = 1>()
  length = Gather(all, at)
  one = Constant<value_ints = [1]>()
  n = Unsqueeze(length, one0)
  to = Concat<axis = 0>(one, one, n, n)
  bias = Expand(row, to)
  last = Sub(n, one)
  last32 = Cast<to = 6>(last)
  batch = Shape<start = 0, end = 1>(q)
  seqlens = Expand(last32, batch)
  total = Cast<to = 6>(length)
  y = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2<causal>>(
    q, k, v, , , seqlens, total, , , , bias<sinks>)
}"""
MINIMUM = "-3.4028234663852886e38"
CAUSES = {
    "causality and -inf": ({"fill": "-inf"}, ["padding"], "top_left"),
    "padding alone": ({"fill": "-inf", "causal": ", causal = 0"}, ["padding"], None),
    "the minimum alone": ({"fill": MINIMUM, "causal": ", causal = 0"}, ["padding"], None),
    # beside -inf, rows of minima alone are the mean over the keys that causality leaves
    "causality and the minimum": ({"fill": MINIMUM}, ["bias"], "top_left"),
    "causality, the minimum and sinks": (
        {"fill": MINIMUM, "sinks": ", sinks"}, ["padding"], "top_left"
    ),
    "a number": ({"fill": "-100.0"}, ["bias"], "top_left"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_bias_beside_causality(name: str) -> None:
    edits, mask, causal = CAUSES[name]
    text = _with(BESIDE, **{"causal": "", "sinks": "", **edits})
    text = text.replace("n = Unsqueeze(length, one0)", "z = Constant<value_ints = [0]>()\n"
                        "  n = Unsqueeze(length, z)")  # fmt: skip
    _, site, _ = _site(text)
    stated = site.spec.to_json()
    assert (stated["mask"], stated["causal"]) == (mask, causal)


TURN = """
  {x}0 = Slice({x}, from0, to{end}, channels, step2)
  {x}1 = Slice({x}, from1, to{end}, channels, step2)
  {x}0c = Mul({x}0, cos)
  {x}1s = Mul({x}1, sin)
  {x}1c = Mul({x}1, cos)
  {x}0s = Mul({x}0, sin)
  {x}a = Sub({x}0c, {x}1s)
  {x}b = Add({x}1c, {x}0s)
"""
LATENT = (
    """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch,4,seq,12] q, float[batch,4,seq,8] nope, float[batch,1,seq,4] rope,
   float[batch,4,seq,8] v, float[1,1,seq,2] cos, float[1,1,seq,2] sin) => (float[batch,4,seq,8] y)
{
  from0 = Constant<value_ints = [0]>()
  from1 = Constant<value_ints = [1]>()
  to4 = Constant<value_ints = [4]>()
  channels = Constant<value_ints = [3]>()
  step2 = Constant<value_ints = [2]>()
  parts = Constant<value_ints = <parts>>()
  <split> = Split<axis = 3>(q, parts)
  """
    + TURN.format(x="qr", end=4)
    + TURN.format(x="rope", end=4)
    + """
  qrt = Concat<axis = 3>(qra, qrb)
  <key>
  whole = Concat<axis = 3>(<query>)
  four = Constant<value_ints = [1, 4, 1, 1]>()
  spread = Expand(ropet, four)
  keys = Concat<axis = 3>(nope, spread)
  kt = Transpose<perm = [0, 1, 3, 2]>(keys)
  raw = MatMul(whole, kt)
  scale = Constant<value_float = 0.25>()
  scores = Mul(raw, scale)
  p = Softmax<axis = -1>(scores)
  y = MatMul(p, v)
}"""
)
PAIRS = """axis = Constant<value_ints = [4]>()
  ropea5 = Unsqueeze(ropea, axis)
  ropeb5 = Unsqueeze(ropeb, axis)
  rope5 = Concat<axis = 4>(ropea5, ropeb5)
  flat = Constant<value_ints = [0, 0, 0, 4]>()
  ropet = Reshape(rope5, flat)"""
SORTED = "ropet = Concat<axis = 3>(ropea, ropeb)"
TURNS = {
    "last channels": ({}, {"style": "interleaved", "dim": 4, "offset": 8}),
    # the query's pairs are sorted, the key's are not: no rotation that both went through
    "pairs in another order": ({"key": PAIRS}, None),
    "other channels of the query": (
        {"parts": "[4, 8]", "split": "qr, qn", "query": "qrt, qn"}, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_channels_turned_before_they_are_joined(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    edits, rotary = TURNS[name]
    parts = {"parts": "[8, 4]", "split": "qn, qr", "key": SORTED, "query": "qn, qrt"}
    model, site, recognition = _site(_with(LATENT, **{**parts, **edits}))
    assert site.spec.to_json()["rotary"] == rotary
    feeds = random_feeds(model, **SIZES)
    angle = np.arange(5)[:, None] * np.array([1.0, 0.1])
    feeds["cos"], feeds["sin"] = (f(angle)[None, None].astype(np.float32) for f in (np.cos, np.sin))
    assert_sound(recognition, feeds)
