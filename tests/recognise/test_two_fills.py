"""Causality by -inf beside padding by a number that scores can outbid: a mask and a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.recognise import recognise

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch,4,seq,8] q, float[batch,4,seq,8] k, float[batch,4,seq,8] v, int64[batch,seq] flags)
  => (float[batch,4,seq,8] y)
{{
  kt = Transpose<perm = [0, 1, 3, 2]>(k)
  raw = MatMul(q, kt)
  scale = Constant<value_float = 0.25>()
  scores = Mul(raw, scale)
  n = Shape<start = 2, end = 3>(q)
  none = Constant<value_ints = [0]>()
  at = Squeeze(n, none)
  c0 = Constant<value_int = 0>()
  c1 = Constant<value_int = 1>()
  row = Range(c0, at, c1)
  last = Constant<value_ints = [1]>()
  of_queries = Unsqueeze(row, last)
  causal = LessOrEqual(row, of_queries)
  zero = Constant<value_float = 0.0>()
  infinite = Constant<value_float = -inf>()
  number = Constant<value_float = {number}>()
  one = Constant<value_float = 1.0>()
  heads = Constant<value_ints = [1, 2]>()
  shown = Cast<to = 1>(flags)
  shown4 = Unsqueeze(shown, heads)
  hidden = Sub(one, shown4)
  padding = Mul(hidden, number)
  future = Where(causal, zero, infinite)
  {body}
  p = Softmax<axis = -1>(s)
  y = MatMul(p, v)
}}"""
BODIES = {
    "both added": "a = Add(scores, future)\n  s = Add(a, padding)",
    "padding first": "a = Add(scores, padding)\n  s = Add(a, future)",
    "causal chosen, padding added": "a = Where(causal, scores, infinite)\n  s = Add(a, padding)",
    "padding added, causal chosen": "a = Add(scores, padding)\n  s = Where(causal, a, infinite)",
    "added to each other": "m = Add(future, padding)\n  s = Add(scores, m)",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_number_is_a_bias_beside_infinity(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    model = ir.from_onnx_text(GRAPH.format(body=BODIES[name], number="-10000.0"))
    recognition = recognise(model)
    (site,) = recognition.sites
    stated = site.spec.to_json()
    assert (stated["causal"], stated["mask"], stated["fill"]) == ("top_left", ["bias"], "-inf")
    feeds = random_feeds(model)
    feeds["flags"] = np.array([[1, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    assert_sound(recognition, feeds)


def test_a_number_alone_is_a_padding() -> None:
    body = "s = Add(scores, padding)"
    (site,) = recognise(ir.from_onnx_text(GRAPH.format(body=body, number="-10000.0"))).sites
    assert site.spec.to_json()["mask"] == ["padding"]
    assert site.spec.mask.fill == -10000.0


def test_the_minimum_beside_infinity_is_no_bias_of_the_size_of_scores() -> None:
    text = GRAPH.format(body=BODIES["padding first"], number="-3.4028234663852886e38")
    (site,) = recognise(ir.from_onnx_text(text)).sites
    assert site.spec.to_json()["causal"] is None
