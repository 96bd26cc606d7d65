"""Rotary embedding, however it is spelt, and what only looks like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from mha_export.recognise._evaluate import Context
from mha_export.recognise.rotary import PeeledRotary, peel_rotary, rotated_channels
from mha_export.spec import RotaryStyle

HALF, INTER = RotaryStyle.HALF, RotaryStyle.INTERLEAVED

PRELUDE = """
  c0 = Constant<value_ints = [0]>()
  c1 = Constant<value_ints = [1]>()
  c2 = Constant<value_ints = [2]>()
  c3 = Constant<value_ints = [3]>()
  c4 = Constant<value_ints = [4]>()
  c8 = Constant<value_ints = [8]>()
  end = Constant<value_ints = [9223372036854775807]>()
  freq = Constant<value = float[4] {1.0, 0.5, 0.25, 0.125}>()
  ax2 = Constant<value_ints = [2]>()
  wide = Unsqueeze(ids, ax2)
  at = Cast<to = 1>(wide)
  angle = Mul(at, freq)
  full_angle = Concat<axis = -1>(angle, angle)
  hc = Cos(angle)
  hs = Sin(angle)
  fc = Cos(full_angle)
  fs = Sin(full_angle)
  hcos = Unsqueeze(hc, c1)
  hsin = Unsqueeze(hs, c1)
  cos = Unsqueeze(fc, c1)
  sin = Unsqueeze(fs, c1)
"""
ROTATE_HALF = """
  a = Slice({x}, c0, c4, c3, c1)
  b = Slice({x}, c4, c8, c3, c1)
  nb = Neg(b)
  r = Concat<axis = -1>(nb, a)
  xc = Mul({x}, cos)
  rs = Mul(r, sin)
  {y} = Add(xc, rs)
"""
PAIRS = """
  a = Slice(x, c0, c8, c3, c2)
  b = Slice(x, c1, c8, c3, c2)
  ac = Mul(a, hcos)
  bs = Mul(b, hsin)
  bc = Mul(b, hcos)
  as_ = Mul(a, hsin)
  first = Sub(ac, bs)
  second = Add(bc, as_)
"""
REPEATED = """
  u = Unsqueeze(angle, c3)
  v = Concat<axis = -1>(u, u)
  rep = Constant<value_ints = [0, 0, 8]>()
  w = Reshape(v, rep)
  wc = Cos(w)
  ws = Sin(w)
  icos = Unsqueeze(wc, c1)
  isin = Unsqueeze(ws, c1)
"""


def model(body: str, *, width: int = 8, axes: str = "4,seq", opset: int = 18) -> ir.Model:
    return ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : {opset}]>
g (float[batch,{axes},{width}] x, int64[batch,seq] ids) => (float[a,b,c,d] y)
{{
  {PRELUDE}
  {body}
}}""")


def peel(body: str, **kwargs: Any) -> tuple[PeeledRotary | None, Context, ir.Model]:
    made = model(body, **kwargs)
    context = Context(made.clone())
    rotated = context.model.graph.outputs[0]
    node = rotated.producer()
    assert node is not None
    anchor = ir.node("Identity", [rotated])
    context.model.graph.append(anchor)
    return peel_rotary(rotated, context=context, anchor=anchor, heads=4), context, made


SPLIT_HALF = """
  a, b = Split<axis = 3, num_outputs = 2>(x)
  ac = Mul(a, hcos)
  bs = Mul(b, hsin)
  bc = Mul(b, hcos)
  as_ = Mul(a, hsin)
  first = Sub(ac, bs)
  second = Add(as_, bc)
  y = Concat<axis = -1>(first, second)
"""
INTERLEAVED = (
    PAIRS
    + """
  m1 = Constant<value_ints = [-1]>()
  f = Unsqueeze(first, m1)
  s = Unsqueeze(second, m1)
  fs_ = Concat<axis = -1>(f, s)
  back = Constant<value_ints = [0, 0, 0, 8]>()
  y = Reshape(fs_, back)
"""
)
INTERLEAVED_FULL = (
    REPEATED
    + """
  m1 = Constant<value_ints = [-1]>()
  a = Slice(x, c0, c8, c3, c2)
  b = Slice(x, c1, c8, c3, c2)
  nb = Neg(b)
  ua = Unsqueeze(a, m1)
  ub = Unsqueeze(nb, m1)
  two = Concat<axis = -1>(ub, ua)
  back = Constant<value_ints = [0, 0, 0, 8]>()
  r = Reshape(two, back)
  xc = Mul(x, icos)
  rs = Mul(r, isin)
  y = Add(xc, rs)
"""
)
PARTIAL = (
    "part = Slice(x, c0, c8, c3, c1)\n rest = Slice(x, c8, end, c3, c1)\n"
    + ROTATE_HALF.format(x="part", y="turned")
    + "y = Concat<axis = -1>(turned, rest)"
)
LAST = (
    "rest = Slice(x, c0, c4, c3, c1)\n part = Slice(x, c4, end, c3, c1)\n"
    + ROTATE_HALF.format(x="part", y="turned")
    + "y = Concat<axis = -1>(rest, turned)"
)

SPELLINGS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("rotate-half", ROTATE_HALF.format(x="x", y="y"), {}, {"style": HALF, "half": False}),
    ("split", SPLIT_HALF, {}, {"style": HALF, "half": True}),
    ("pairs", INTERLEAVED, {}, {"style": INTER, "half": True}),
    ("pairs-full-tables", INTERLEAVED_FULL, {}, {"style": INTER, "half": False}),
    ("partial", PARTIAL, {"width": 12}, {"style": HALF, "half": False}),
    ("last-channels", LAST, {"width": 12}, {"style": HALF, "half": False, "offset": 4}),
    (
        "pairs-sorted",
        PAIRS + "y = Concat<axis = -1>(first, second)",
        {},
        {"style": INTER, "half": True, "sorted": True},
    ),
    (
        "node",
        "y = RotaryEmbedding(x, hc, hs)",
        {"opset": 23},
        {"style": HALF, "half": True},
    ),
    (
        "node-interleaved",
        "y = RotaryEmbedding<interleaved = 1>(x, hc, hs)",
        {"opset": 23},
        {"style": INTER, "half": True},
    ),
    (
        "node-partial-by-concat",
        "part = Slice(x, c0, c8, c3, c1)\n rest = Slice(x, c8, end, c3, c1)\n"
        "turned = RotaryEmbedding(part, hc, hs)\n y = Concat<axis = -1>(turned, rest)",
        {"opset": 23, "width": 12},
        {"style": HALF, "half": True},
    ),
    (
        "length-before-heads",
        "cos_ = Unsqueeze(fc, c2)\n sin_ = Unsqueeze(fs, c2)\n"
        + ROTATE_HALF.format(x="x", y="y").replace("cos)", "cos_)").replace("sin)", "sin_)"),
        {"axes": "seq,4"},
        {"style": HALF, "half": False},
    ),
]


@pytest.mark.parametrize(
    ("body", "kwargs", "expected"),
    [case[1:] for case in SPELLINGS],
    ids=[case[0] for case in SPELLINGS],
)
def test_spellings(body: str, kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    """The law with the bound tables gives what the graph gives."""
    found, context, made = peel(body, **kwargs)
    assert found is not None
    assert (found.spec.style, found.spec.dim) == (expected["style"], 8)
    assert found.tables.half_width is expected["half"]
    assert found.spec.offset == expected.get("offset", 0)
    assert found.sorted is expected.get("sorted", False)
    assert found.before.name == "x"
    rng = np.random.default_rng(0)
    width = kwargs.get("width", 8)
    shape = (2, 5, 4, width) if kwargs.get("axes") else (2, 4, 5, width)
    x = rng.standard_normal(shape).astype(np.float32)
    feeds = {"x": x, "ids": np.stack([np.arange(5), np.arange(3, 8)])}
    y = ReferenceEvaluator(ir.to_proto(made)).run(None, feeds)[0]
    context.model.graph.outputs[:] = [found.tables.cos, found.tables.sin]
    for value in context.model.graph.outputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
        value.shape = None
    tables = ReferenceEvaluator(ir.to_proto(context.model)).run(None, feeds)
    if not found.tables.half_width:
        step = slice(0, 8, 2) if found.spec.style is INTER else slice(0, 4)
        tables = [table[..., step] for table in tables]
    axis = 2 if kwargs.get("axes") else 1
    cos, sin = (np.expand_dims(table, axis) for table in tables)
    part = slice(found.spec.offset, found.spec.offset + 8)
    expected_y = x.copy()
    turned = rotated_channels(x[..., part], cos, sin, found.spec.style)
    if found.sorted:
        turned = np.concatenate([turned[..., ::2], turned[..., 1::2]], axis=-1)
    expected_y[..., part] = turned
    np.testing.assert_allclose(y, expected_y, rtol=1e-6, atol=1e-6)


MISSES = [
    ("sign-of-the-other-half", ROTATE_HALF.format(x="x", y="y").replace(
        "nb = Neg(b)\n  r = Concat<axis = -1>(nb, a)",
        "na = Neg(a)\n  r = Concat<axis = -1>(b, na)")),
    ("no-sign", ROTATE_HALF.format(x="x", y="y").replace("Neg(b)", "Identity(b)")),
    ("halves-not-swapped", ROTATE_HALF.format(x="x", y="y").replace("(nb, a)", "(a, nb)")),
    ("cosine-only", "t = Mul(x, cos)\n y = Add(t, t)"),
    ("cosine-twice", ROTATE_HALF.format(x="x", y="y").replace("Mul(r, sin)", "Mul(r, cos)")),
    ("interleaved-tables-under-half", REPEATED + ROTATE_HALF.format(x="x", y="y")
     .replace("cos)", "icos)").replace("sin)", "isin)")),
    ("one-channel-short", ROTATE_HALF.format(x="x", y="y").replace(
        "a = Slice(x, c0, c4", "a = Slice(x, c1, c5").replace("  a =", "  c5 = Constant<value_ints "
        "= [5]>()\n  a =")),
    ("a-residual", ROTATE_HALF.format(x="x", y="turned") + "y = Add(turned, x)"),
    ("plain-sum", "y = Add(x, x)"),
]  # fmt: skip


@pytest.mark.parametrize("body", [b for _, b in MISSES], ids=[n for n, _ in MISSES])
def test_what_is_not_rotary(body: str) -> None:
    """Turning the other way is rotary by the negative angle, whose sine no value holds."""
    found, *_ = peel(body)
    assert found is None


def test_tables_of_full_width_must_repeat() -> None:
    """Tables that are inputs may hold anything in their second half."""
    text = (
        """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch,4,seq,8] x, float[batch,1,seq,8] cos, float[batch,1,seq,8] sin) => (float[a,b,c,d] y)
{
  c0 = Constant<value_ints = [0]>()
  c1 = Constant<value_ints = [1]>()
  c3 = Constant<value_ints = [3]>()
  c4 = Constant<value_ints = [4]>()
  c8 = Constant<value_ints = [8]>()
"""
        + ROTATE_HALF.format(x="x", y="y")
        + "}"
    )
    made = ir.from_onnx_text(text)
    rotated = made.graph.outputs[0]
    anchor = ir.node("Identity", [rotated])
    made.graph.append(anchor)
    assert peel_rotary(rotated, context=Context(made), anchor=anchor) is None
