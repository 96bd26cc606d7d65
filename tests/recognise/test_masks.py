"""What masks say: every spelling is evaluated, named exactly or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.recognise._evaluate import Context
from mha_export.recognise.masks import MaskReading, MaskTerm, read_mask
from mha_export.spec import CausalAlignment, EmptyRow

TL, BR = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
MIN = -3.4028234663852886e38

PRELUDE = """
  zero = Constant<value_int = 0>()
  one = Constant<value_int = 1>()
  ax0 = Constant<value_ints = [0]>()
  ax1 = Constant<value_ints = [1]>()
  ax12 = Constant<value_ints = [1, 2]>()
  none = Constant<value_float = 0.0>()
  low = Constant<value = float {-3.4028234663852886e+38}>()
  inf = Constant<value = float {-inf}>()
  s_ = Shape<start = 2, end = 3>(q)
  t_ = Shape<start = 2, end = 3>(k)
  s = Squeeze(s_)
  t = Squeeze(t_)
  rows = Range(zero, s, one)
  cols = Range(zero, t, one)
  i = Unsqueeze(rows, ax1)
  j = Unsqueeze(cols, ax0)
"""


def graph(body: str, inputs: str = "", *, keys: str = "keys", initializers: str = "") -> ir.Model:
    """Scores of q [batch, 4, seq, 8] with k [batch, 4, keys, 8], and a mask made by ``body``."""
    return ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch,4,seq,8] q, float[batch,4,{keys},8] k{inputs}) => (float[a,b,c,d] out)
{initializers}
{{
  {PRELUDE}
  {body}
  kt = Transpose<perm = [0, 1, 3, 2]>(k)
  scores = MatMul(q, kt)
  out = Add(scores, scores)
  used = Identity(mask)
}}""")


def read(
    body: str, inputs: str = "", *, kind: str | None = None, fill: float = MIN, **kwargs: Any
) -> MaskReading | None:
    model = graph(body, inputs, **kwargs)
    values = {out.name: out for node in model.graph for out in node.outputs}
    values |= {v.name: v for v in model.graph.inputs}
    term = MaskTerm(
        value=values["mask"],
        kind=kind or "additive",  # type: ignore[arg-type]
        fill=None if kind is None else fill,
    )
    return read_mask(
        [term],
        scores=values["scores"],
        context=Context(model),
        anchor=values["out"].producer(),  # type: ignore[arg-type]
        heads=4,
    )


def parts(reading: MaskReading | None) -> dict[str, Any]:
    """The stated parts, operands by name."""
    assert reading is not None
    found = {}
    for name, value in vars(reading).items():
        if value is None or value is False or value == () or value is EmptyRow.NOT_APPLICABLE:
            continue
        found[name] = value.name if isinstance(value, ir.Value) else value
    return found


SAME = {"keys": "seq"}
PAD = ", int64[batch,keys] am"
SAME_PAD = ", int64[batch,seq] am"
ADD_MIN = "mask = Where(keep, none, low)"
TRIL = "{" + ",".join(str(int(c <= r)) for r in range(32) for c in range(32)) + "}"
BAND = "{" + ",".join(str(int(r - 20 <= c <= r)) for r in range(32) for c in range(32)) + "}"
SMALL = "{" + ",".join(str(int(r - 6 <= c <= r)) for r in range(8) for c in range(8)) + "}"
SLICE = """
  wide = Cast<to = 9>(buffer)
  sliced = Slice(wide, ax0, s_, ax0)
  keep = Slice(sliced, ax0, t_, ax1)
"""

POSITIONS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("all-true", "keep = LessOrEqual(zero, j)", {}, {}),
    ("causal", "keep = LessOrEqual(j, i)", {}, {"causal": TL}),
    ("causal-square", "keep = LessOrEqual(j, i)", SAME, {"causal": TL}),
    (
        "causal-offset",
        "past = Sub(t, s)\n at = Add(i, past)\n keep = LessOrEqual(j, at)",
        {},
        {"causal": BR},
    ),
    (
        "causal-trilu",
        "dims = Concat<axis = 0>(s_, t_)\n full = ConstantOfShape<value = int64[1] {1}>(dims)\n"
        "low_ = Trilu<upper = 0>(full)\n keep = Cast<to = 9>(low_)",
        {},
        {"causal": TL},
    ),
    (
        "causal-and-window",
        "c = LessOrEqual(j, i)\n w = Constant<value_int = 3>()\n first = Sub(i, w)\n"
        "n = Greater(j, first)\n keep = And(c, n)",
        SAME,
        {"causal": TL, "left_window": 2},
    ),
    (
        "window-wider-than-any-ordinary-size",
        "c = LessOrEqual(j, i)\n w = Constant<value_int = 70>()\n first = Sub(i, w)\n"
        "n = Greater(j, first)\n keep = And(c, n)",
        SAME,
        {"causal": TL, "left_window": 69},
    ),
    (
        "window-by-a-negative-number",
        "c = LessOrEqual(j, i)\n w = Constant<value_int = -70>()\n first = Add(i, w)\n"
        "n = Greater(j, first)\n keep = And(c, n)",
        SAME,
        {"causal": TL, "left_window": 69},
    ),
    (
        "window-too-wide-to-look-at",
        "c = LessOrEqual(j, i)\n w = Constant<value_int = 9000>()\n first = Sub(i, w)\n"
        "n = Greater(j, first)\n keep = And(c, n)",
        SAME,
        {"causal": TL, "left_window": 8999},
    ),
    (
        "small-buffer",
        SLICE,
        {**SAME, "initializers": f"<int32[8,8] buffer = {SMALL}>"},
        {"causal": TL, "left_window": 6},
    ),
    (
        "window-both-sides",
        "d = Sub(i, j)\n a = Abs(d)\n w = Constant<value_int = 2>()\n keep = LessOrEqual(a, w)",
        SAME,
        {"left_window": 2, "right_window": 2},
    ),
    (
        "chunks",
        "c = LessOrEqual(j, i)\n w = Constant<value_int = 3>()\n bi = Div(i, w)\n bj = Div(j, w)\n"
        "e = Equal(bi, bj)\n keep = And(c, e)",
        SAME,
        {"causal": TL, "block": 3},
    ),
    (
        "buffer",
        SLICE,
        {**SAME, "initializers": f"<int32[32,32] buffer = {TRIL}>"},
        {"causal": TL},
    ),
    (
        "buffer-with-a-window-that-only-large-sizes-show",
        SLICE,
        {**SAME, "initializers": f"<int32[32,32] buffer = {BAND}>"},
        {"causal": TL, "left_window": 20},
    ),
    (
        "one-key-ahead-is-a-right-window",
        "at = Add(i, one)\n keep = LessOrEqual(j, at)",
        SAME,
        {"right_window": 1},
    ),
]


@pytest.mark.parametrize(
    ("body", "kwargs", "expected"),
    [case[1:] for case in POSITIONS],
    ids=[case[0] for case in POSITIONS],
)
def test_masks_of_positions(body: str, kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    added = parts(read(body + "\n" + ADD_MIN, **kwargs))
    assert added.pop("fill", None) == ("min" if expected else None)
    assert added == expected
    kept = parts(read(body + "\n mask = Identity(keep)", kind="keep", fill=-np.inf, **kwargs))
    assert kept.pop("fill", None) == ("-inf" if expected else None)
    assert kept == expected
    hidden = parts(read(body + "\n mask = Not(keep)", kind="hide", fill=-np.inf, **kwargs))
    assert hidden.pop("fill", None) == ("-inf" if expected else None)
    assert hidden == expected


CAUSAL_MISSES = [
    ("a-key-too-many", "c = LessOrEqual(j, i)\n two = Constant<value_int = 2>()\n"
     "e = Equal(j, two)\n keep = Or(c, e)"),
    ("a-query-sees-all", "c = LessOrEqual(j, i)\n e = Equal(i, zero)\n keep = Or(c, e)"),
    ("without-the-diagonal-but-the-first", "c = Less(j, i)\n e = Equal(i, j)\n f = Equal(i, zero)\n"
     "g_ = And(e, f)\n keep = Or(c, g_)"),
    ("window-with-a-global-key", "c = LessOrEqual(j, i)\n w = Constant<value_int = 3>()\n"
     "first = Sub(i, w)\n n = Greater(j, first)\n z = Equal(j, zero)\n o = Or(n, z)\n"
     "keep = And(c, o)"),
    ("every-other-key", "two = Constant<value_int = 2>()\n r = Mod(j, two)\n"
     "keep = Equal(r, zero)"),
    ("float-window-too-wide-to-look-at", "c = LessOrEqual(j, i)\n"
     "w = Constant<value_float = 9000.0>()\n d = Sub(i, j)\n f = Cast<to = 1>(d)\n"
     "n = Less(f, w)\n keep = And(c, n)"),
    ("clipped-at-a-number-too-large-to-look-at", "w = Constant<value_int = 9000>()\n"
     "m = Min(i, w)\n keep = LessOrEqual(j, m)"),
]  # fmt: skip


@pytest.mark.parametrize("body", [b for _, b in CAUSAL_MISSES], ids=[n for n, _ in CAUSAL_MISSES])
def test_almost_canonical_masks_have_no_name(body: str) -> None:
    assert read(body + "\n" + ADD_MIN, **SAME) is None


PER_KEY = "p_ = Unsqueeze(p, ax12)\n"
PADDINGS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("cast", PAD, "p = Cast<to = 9>(am)\n" + PER_KEY + "keep = Identity(p_)\n" + ADD_MIN, {}, {}),
    (
        "arithmetic-on-flags",
        PAD,
        "f = Cast<to = 1>(am)\n fone = Constant<value_float = 1.0>()\n p = Sub(fone, f)\n"
        + PER_KEY
        + "mask = Mul(p_, low)",
        {},
        {},
    ),
    (
        "tested-for-one",
        PAD,
        "p = Equal(am, one)\n" + PER_KEY + "keep = Identity(p_)\n" + ADD_MIN,
        {},
        {"key_padding": "p"},
    ),
    (
        "from-token-ids",
        ", int64[batch,seq] am",
        "pad = Constant<value_int = 1>()\n e = Equal(am, pad)\n p = Not(e)\n"
        + PER_KEY
        + "keep = Identity(p_)\n"
        + ADD_MIN,
        SAME,
        {"key_padding": "p"},
    ),
    (
        "boolean-true-is-padding",
        ", bool[batch,keys] am",
        "p = Identity(am)\n" + PER_KEY + "mask = Where(p_, low, none)",
        {},
        {"key_padding": "derived.Not_0"},
    ),
    (
        "boolean-inverted-in-the-graph",
        ", bool[batch,keys] am",
        "p = Not(am)\n" + PER_KEY + "keep = Identity(p_)\n" + ADD_MIN,
        {},
        {"key_padding": "p"},
    ),
    (
        "causal",
        SAME_PAD,
        "p = Cast<to = 9>(am)\n"
        + PER_KEY
        + "c = LessOrEqual(j, i)\n keep = And(c, p_)\n"
        + ADD_MIN,
        SAME,
        {"causal": TL},
    ),
]


@pytest.mark.parametrize(
    ("inputs", "body", "kwargs", "expected"),
    [case[1:] for case in PADDINGS],
    ids=[case[0] for case in PADDINGS],
)
def test_padding(inputs: str, body: str, kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    found = parts(read(body, inputs, **kwargs))
    assert found == {
        "key_padding": "am",
        "fill": "min",
        "empty_row": EmptyRow.UNIFORM,
        **expected,
    }


FILLS: list[tuple[str, str, Any, EmptyRow]] = [
    ("inf", "{-inf}", "-inf", EmptyRow.NAN),
    ("minimum", "{-3.4028234663852886e+38}", "min", EmptyRow.UNIFORM),
    ("as-good-as-minimum", "{-1e+38}", "min", EmptyRow.UNIFORM),
    ("finite", "{-10000.0}", -10000.0, EmptyRow.FINITE),
]


@pytest.mark.parametrize(
    ("number", "fill", "empty"), [case[1:] for case in FILLS], ids=[case[0] for case in FILLS]
)
def test_fill_and_what_an_empty_row_gets(number: str, fill: Any, empty: EmptyRow) -> None:
    body = (
        f"f = Constant<value = float {number}>()\n p = Cast<to = 9>(am)\n"
        + PER_KEY
        + "mask = Where(p_, none, f)"
    )
    found = read(body, PAD)
    assert found is not None
    assert (found.fill, found.empty_row, found.replaces) == (fill, empty, False)


def test_a_finite_fill_that_replaces_says_so() -> None:
    body = "p = Cast<to = 9>(am)\n" + PER_KEY + "mask = Identity(p_)"
    found = read(body, PAD, kind="keep", fill=-10000.0)
    assert found is not None
    assert (found.fill, found.empty_row, found.replaces) == (-10000.0, EmptyRow.UNIFORM, True)


PADDING_MISSES = [
    ("hides-queries", SAME_PAD, "p = Cast<to = 9>(am)\n ax = Constant<value_ints = [1, 3]>()\n"
     "keep = Unsqueeze(p, ax)\n" + ADD_MIN, SAME),
    ("not-for-the-first-query", SAME_PAD, "p = Cast<to = 9>(am)\n" + PER_KEY
     + "f = Equal(i, zero)\n keep = Or(f, p_)\n" + ADD_MIN, SAME),
    ("empty-rows-see-all", PAD, "p = ReduceMax(am, ax1)\n e = Equal(p, zero)\n"
     "b = Cast<to = 9>(am)\n"
     "o = Or(b, e)\n keep = Unsqueeze(o, ax12)\n" + ADD_MIN, {}),
    ("two-fills", SAME_PAD, "p = Cast<to = 9>(am)\n" + PER_KEY
     + "a = Where(p_, none, low)\n c = LessOrEqual(j, i)\n b = Where(c, none, inf)\n"
     "mask = Min(a, b)", SAME),
    ("inf-times-zero", PAD, "f = Cast<to = 1>(am)\n p = Identity(f)\n" + PER_KEY
     + "mask = Mul(p_, inf)", {}),
    ("two-inputs", PAD + ", int64[batch,keys] other", "m = Mul(am, other)\n x = Cast<to = 9>(m)\n"
     "y = Cast<to = 9>(other)\n z = Xor(x, y)\n keep = Unsqueeze(z, ax12)\n" + ADD_MIN, {}),
    ("a-bias-input", ", float[batch,4,seq,keys] am", "mask = Identity(am)", {}),
    ("from-activations", "", "h_ = ReduceSum<keepdims = 0>(k, three)\n p = Greater(h_, none)\n"
     "one_head = Slice(p, ax0, ax1, ax1)\n ax2 = Constant<value_ints = [2]>()\n"
     "keep = Unsqueeze(one_head, ax2)\n" + ADD_MIN, {"initializers": "<int64[1] three = {3}>"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "body", "kwargs"),
    [case[1:] for case in PADDING_MISSES],
    ids=[case[0] for case in PADDING_MISSES],
)
def test_what_is_no_padding_has_no_name(inputs: str, body: str, kwargs: dict[str, Any]) -> None:
    found = read(body, inputs, **kwargs)
    assert found is None or (found.key_padding is not None and found.key_padding.name != "am")


def test_flags_that_are_read_but_change_nothing_are_no_padding() -> None:
    body = "n = Not(am)\n p = Or(am, n)\n" + PER_KEY
    body += "c = LessOrEqual(j, i)\n keep = And(c, p_)\n" + ADD_MIN
    flags = SAME_PAD.replace("int64", "bool")
    assert parts(read(body, flags, **SAME)) == {"causal": TL, "fill": "min"}


@pytest.mark.parametrize(
    "body",
    [
        "d = Div(am, thousand)\n a = Unsqueeze(d, ax1)\n b = Unsqueeze(d, ax2)\n"
        "same = Equal(a, b)\n",
        "a = Unsqueeze(am, ax1)\n b = Unsqueeze(am, ax2)\n d = Sub(a, b)\n"
        "same = Less(d, thousand)\n",
        "a = Greater(am, thousand)\n b = Not(a)\n same = Unsqueeze(b, ax1)\n",
    ],
    ids=["thousands", "near", "bounded"],
)
def test_numbers_that_show_nothing_while_small_are_not_ignored(body: str) -> None:
    body = (
        "thousand = Constant<value = int64 {1000}>()\n ax2 = Constant<value_ints = [2]>()\n"
        + body
        + "keep = Unsqueeze(same, ax1)\n"
        + ADD_MIN
    )
    found = read(body, SAME_PAD, **SAME)
    assert found is None or (found.hides and "am" not in parts(found).values())


def test_lengths() -> None:
    body = (
        "n = Unsqueeze(len, ax1)\n p = Less(j, n)\n" + PER_KEY + "keep = Identity(p_)\n" + ADD_MIN
    )
    found = parts(read(body, ", int64[batch] len"))
    assert found == {"kv_lengths": "len", "fill": "min", "empty_row": EmptyRow.UNIFORM}


def test_lengths_of_another_integer_type_are_cast() -> None:
    body = (
        "wide = Cast<to = 7>(len)\n n = Unsqueeze(wide, ax1)\n p = Less(j, n)\n"
        + PER_KEY
        + "keep = Identity(p_)\n"
        + ADD_MIN
    )
    found = read(body, ", int32[batch] len")
    assert found is not None
    assert found.kv_lengths is not None
    assert found.kv_lengths.dtype is ir.DataType.INT64
    cast = found.kv_lengths.producer()
    assert cast is not None
    assert (cast.op_type, cast.inputs[0].name) == ("Cast", "len")  # type: ignore[union-attr]


def test_lengths_off_by_one_are_the_flags_they_are() -> None:
    body = (
        "n = Unsqueeze(len, ax1)\n p = LessOrEqual(j, n)\n"
        + PER_KEY
        + "keep = Identity(p_)\n"
        + ADD_MIN
    )
    found = parts(read(body, ", int64[batch] len"))
    assert found == {"key_padding": "p", "fill": "min", "empty_row": EmptyRow.UNIFORM}


def test_a_prefix_is_not_causal() -> None:
    body = (
        "n = Unsqueeze(len, ax1)\n p = Less(j, n)\n"
        + PER_KEY
        + "c = LessOrEqual(j, i)\n keep = Or(c, p_)\n"
        + ADD_MIN
    )
    found = parts(read(body, ", int64[batch] len", **SAME))
    assert found == {"causal": TL, "prefix_lengths": "len", "fill": "min"}


def test_documents() -> None:
    body = (
        "a1 = Constant<value_ints = [1, 3]>()\n own = Unsqueeze(doc, a1)\n"
        "other = Unsqueeze(doc, ax12)\n e = Equal(own, other)\n c = LessOrEqual(j, i)\n"
        "keep = And(c, e)\n" + ADD_MIN
    )
    found = parts(read(body, ", int64[batch,seq] doc", **SAME))
    assert found == {"causal": TL, "document_ids": "doc", "fill": "min"}


SLOPES = "m = Constant<value = float[4,1,1] {0.5, 0.25, 0.125, 0.0625}>()\n"


@pytest.mark.parametrize(
    "distance", ["d = Sub(j, i)", "last = Sub(t, one)\n d = Sub(j, last)", "d = Identity(j)"],
    ids=["from-the-query", "from-the-last-key", "from-the-first-key"],
)  # fmt: skip
def test_alibi_up_to_a_number_per_row(distance: str) -> None:
    body = SLOPES + distance + "\n f = Cast<to = 1>(d)\n mask = Mul(m, f)"
    assert parts(read(body, **SAME)) == {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}


def test_alibi_under_a_causal_mask() -> None:
    body = (
        SLOPES + "d = Sub(j, i)\n f = Cast<to = 1>(d)\n a = Mul(m, f)\n"
        "c = LessOrEqual(j, i)\n b = Where(c, none, inf)\n mask = Add(a, b)"
    )
    found = parts(read(body, **SAME))
    assert found == {"causal": TL, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "fill": "-inf"}


def test_a_symmetric_distance_is_no_alibi() -> None:
    body = SLOPES + "d = Sub(j, i)\n e = Abs(d)\n f = Cast<to = 1>(e)\n mask = Mul(m, f)"
    assert read(body, **SAME) is None


MERGED = (
    "p = Cast<to = 9>(am)\n" + PER_KEY + "n = Where(p_, none, low)\n f = Cast<to = 1>(j)\n"
    "fi = Cast<to = 1>(i)\n g_ = Mul(f, fi)\n bias = Sin(g_)\n"
)


@pytest.mark.parametrize(
    "end", ["mask = Add(bias, n)", "mask = Where(p_, bias, low)"], ids=["added", "where"]
)
def test_a_bias_merged_with_a_mask_is_left_over(end: str) -> None:
    found = read(MERGED + end, PAD)
    assert found is not None
    assert [term.value.name for term in found.rest] == ["bias"]
    assert found.key_padding is not None
    assert found.key_padding.name == "am"


def test_two_steps_are_read_together() -> None:
    """A causal Where below an added padding mask: both minima overlap to -inf, so no one fill."""
    model = graph(
        "p = Cast<to = 9>(am)\n"
        + PER_KEY
        + "a = Where(p_, none, low)\n c = LessOrEqual(j, i)\n mask = Identity(c)",
        SAME_PAD,
        keys="seq",
    )
    values = {out.name: out for node in model.graph for out in node.outputs}
    causal = MaskTerm(value=values["c"], kind="keep", fill=-np.inf)
    padding = MaskTerm(value=values["a"], kind="additive")
    anchor = values["out"].producer()
    assert anchor is not None
    for terms, expected in (([causal], True), ([padding], True), ([causal, padding], False)):
        found = read_mask(
            terms, scores=values["scores"], context=Context(model), anchor=anchor, heads=4
        )
        assert (found is not None) is expected


def test_no_step_is_no_mask() -> None:
    model = graph("mask = Identity(j)")
    anchor = next(iter(model.graph))
    scores = anchor.outputs[0]
    found = read_mask([], scores=scores, context=Context(model), anchor=anchor, heads=4)
    assert found is not None
    assert not found.hides
