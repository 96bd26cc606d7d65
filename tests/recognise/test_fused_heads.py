"""Heads told over again above a fused node, held on an axis of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from mha_export.recognise import recognise

GRAPH = """
<ir_version: 11, opset_import: ["" : 23]>
g (float[batch,seq,32] q, float[batch,{held}] k, float[batch,{held}] v) => (float[batch,4,seq,8] y)
{{
  split = Constant<value_ints = [0, 0, 4, 8]>()
  whole = Constant<value_ints = {whole}>()
  spread = Constant<value_ints = {spread}>()
  q4 = Reshape(q, split)
  qt = Transpose<perm = [0, 2, 1, 3]>(q4)
  ks = Expand(k, spread)
  vs = Expand(v, spread)
  kr = Reshape(ks, whole)
  vr = Reshape(vs, whole)
  kt = {laid}(kr)
  vt = {laid}(vr)
  y = Attention(qt, kt, vt)
}}"""
BY_LENGTH = {"whole": "[0, 0, 4, 8]", "laid": "Transpose<perm = [0, 2, 1, 3]>"}
BY_HEAD = {"whole": "[0, 4, -1, 8]", "laid": "Identity"}
CASES: dict[str, tuple[dict[str, str], int]] = {
    "interleaved": ({"held": "seq,2,1,8", "spread": "[1, 1, 1, 2, 1]", **BY_LENGTH}, 2),
    "interleaved, heads first": ({"held": "2,1,seq,8", "spread": "[1, 1, 2, 1, 1]", **BY_HEAD}, 2),
    "one for all": ({"held": "seq,1,1,8", "spread": "[1, 1, 2, 2, 1]", **BY_LENGTH}, 1),
    "tiled": ({"held": "seq,1,2,8", "spread": "[1, 1, 2, 1, 1]", **BY_LENGTH}, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_on_an_axis_beside_the_groups(
    name: str, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    parts, kv_heads = CASES[name]
    model = ir.from_onnx_text(GRAPH.format(**parts))
    recognition = recognise(model)
    (site,) = recognition.sites
    assert (site.spec.q_heads, site.spec.kv_heads) == (4, kv_heads)
    assert_sound(recognition, random_feeds(model))
