"""What stands between a projection and a fused node is taken into the site, or left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import heads_of
from onnx.reference import ReferenceEvaluator

from mha_export.operands import Layout
from mha_export.oracle import OracleInputs, RotaryInputs, attention
from mha_export.recognise import recognise
from mha_export.recognise._evaluate import Context
from mha_export.recognise._site import Site
from mha_export.recognise.fused import is_fused, read_fused
from mha_export.spec import CausalAlignment

HEAD = """
  c0 = Constant<value_ints = [0]>()
  c1 = Constant<value_ints = [1]>()
  c2 = Constant<value_ints = [2]>()
  split4 = Constant<value_ints = [0, 0, 4, 8]>()
  split2 = Constant<value_ints = [0, 0, 2, 8]>()
  merge = Constant<value_ints = [0, 0, 32]>()
  freq = Constant<value = float[4] {1.0, 0.5, 0.25, 0.125}>()
  wide = Unsqueeze(ids, c2)
  at = Cast<to = 1>(wide)
  angle = Mul(at, freq)
  cos = Cos(angle)
  sin = Sin(angle)
  cos2 = Cos(angle)
  sin2 = Sin(angle)
  qs = Reshape(q, split4)
  ks = Reshape(k, split2)
  vs = Reshape(v, split2)
"""
TURN = """
  q4 = Transpose<perm = [0, 2, 1, 3]>({q})
  k4 = Transpose<perm = [0, 2, 1, 3]>({k})
  v4 = Transpose<perm = [0, 2, 1, 3]>(vs)
"""
END = """
  o = Transpose<perm = [0, 2, 1, 3]>(y4)
  y = Reshape(o, merge)
"""
REPEAT = """
  r5 = Constant<value_ints = [1, 1, 2, 1, 1]>()
  m4 = Constant<value_ints = [0, 4, -1, 8]>()
  ku = Unsqueeze({k}, c2)
  kr = Tile(ku, r5)
  k_all = Reshape(kr, m4)
  vu = Unsqueeze({v}, c2)
  vr = Tile(vu, r5)
  v_all = Reshape(vr, m4)
"""
TILED = REPEAT.replace("Unsqueeze({k}, c2)", "Unsqueeze({k}, c1)").replace(
    "Unsqueeze({v}, c2)", "Unsqueeze({v}, c1)"
).replace("[1, 1, 2, 1, 1]", "[1, 2, 1, 1, 1]")  # fmt: skip


def graph(body: str, *, cache: bool = False, weights: str = "") -> ir.Model:
    past = ", float[batch,2,past,8] pk, float[batch,2,past,8] pv" if cache else ""
    presents = ", float[a,b,c,d] nk, float[a,b,c,d] nv" if cache else ""
    return ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch,seq,32] q, float[batch,seq,16] k, float[batch,seq,16] v, int64[batch,seq] ids{past})
  => (float[e,f,g_] y{presents})
{weights}
{{
  {HEAD}
  {body}
}}""")


def read(model: ir.Model) -> tuple[Site, Context]:
    context = Context(model.clone())
    node = next(n for n in context.model.graph if is_fused(n))
    verdict = read_fused(node, context=context)
    assert isinstance(verdict, Site), verdict.reason.message
    return verdict, context


def feeds(*, cache: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {
        name: rng.standard_normal((2, 3, width)).astype(np.float32)
        for name, width in (("q", 32), ("k", 16), ("v", 16))
    }
    found["ids"] = np.stack([np.arange(3), np.arange(2, 5)])
    if cache:
        found["pk"] = rng.standard_normal((2, 2, 4, 8)).astype(np.float32)
        found["pv"] = rng.standard_normal((2, 2, 4, 8)).astype(np.float32)
    return found


def agrees(model: ir.Model, site: Site, context: Context, given: dict[str, np.ndarray]) -> None:
    """The graph's output is the oracle's on the operands the site binds."""
    whole = ReferenceEvaluator(ir.to_proto(model))
    actual = dict(zip(whole.output_names, whole.run(None, given), strict=True))
    wanted = [v for _, v in site.operands.values() if v.name not in given]
    inner = dict.fromkeys(wanted)
    context.model.graph.outputs[:] = list(inner)
    for value in inner:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    made = ReferenceEvaluator(ir.to_proto(context.model)).run(None, given)
    arrays: dict[str | None, np.ndarray] = {
        **given,
        **dict(zip((v.name for v in inner), made, strict=True)),
    }
    operands = site.operands
    parts: dict[str, Any] = {
        name: heads_of(arrays[heads.value.name], heads)
        for name in ("query", "key", "value", "past_key", "past_value")
        if (heads := getattr(operands, name)) is not None
    }
    for name in ("q_norm_weight", "k_norm_weight"):
        if (weight := getattr(operands, name)) is not None:
            parts[name] = arrays[weight.name]
    if operands.rotary is not None:
        parts["rotary"] = RotaryInputs(
            cos=arrays[operands.rotary.cos.name], sin=arrays[operands.rotary.sin.name]
        )
    exact = attention(site.spec, OracleInputs(**parts))
    got = heads_of(actual[site.output.value.name], site.output)  # type: ignore[index]
    np.testing.assert_allclose(got, exact.output, rtol=2e-5, atol=2e-5)


ROTATED = (
    TURN.format(q="qs", k="ks")
    + "qr = RotaryEmbedding(q4, cos, sin)\n kr_ = RotaryEmbedding(k4, {tables})\n"
)
PLAIN = TURN.format(q="qs", k="ks") + "y4 = Attention(q4, k4, v4)\n" + END


def test_the_layout_of_the_projection_is_found() -> None:
    model = graph(PLAIN)
    site, context = read(model)
    assert [site.operands.query.value.name, site.operands.key.value.name] == ["q", "k"]
    assert (site.operands.query.layout, site.output.layout) == (Layout.BSM, Layout.BSM)
    assert site.output.value.name == "y"
    agrees(model, site, context, feeds())


def test_rotary_of_both_from_tables_computed_twice() -> None:
    model = graph(
        ROTATED.format(tables="cos2, sin2") + "y4 = Attention<is_causal = 1>(qr, kr_, v4)\n" + END
    )
    site, context = read(model)
    assert site.spec.rotary is not None
    assert (site.spec.rotary.dim, site.operands.query.value.name) == (8, "q")
    assert site.spec.mask.causal is CausalAlignment.TOP_LEFT
    agrees(model, site, context, feeds())


def test_rotary_by_other_tables_is_left_in_the_graph() -> None:
    """Query and key turned by different angles: no one rotary states it."""
    other = "cos3 = Cos(at)\n four = Constant<value_ints = [1, 1, 4]>()\n cos4 = Tile(cos3, four)\n"
    model = graph(
        other + ROTATED.format(tables="cos4, sin") + "y4 = Attention(qr, kr_, v4)\n" + END
    )
    site, context = read(model)
    assert site.spec.rotary is None
    assert [site.operands.query.value.name, site.operands.key.value.name] == ["qr", "kr_"]
    agrees(model, site, context, feeds())


def test_rotary_of_the_query_alone() -> None:
    """Told by the whole graph: keys may be rotated beyond what the reader passes."""
    model = graph(ROTATED.format(tables="cos, sin") + "y4 = Attention(qr, k4, v4)\n" + END)
    site, context = read(model)
    assert site.spec.rotary is None
    agrees(model, site, context, feeds())
    recognition = recognise(model)
    (whole,) = recognition.sites
    assert whole.spec.rotary is not None
    assert not whole.spec.rotary.key
    agrees(model, whole, Context(recognition.model), feeds())


def test_norm_then_rotary() -> None:
    body = (
        "qn = RMSNormalization<epsilon = 1e-06>(qs, wq)\n"
        "kn = RMSNormalization<epsilon = 1e-06>(ks, wk)\n"
        + TURN.format(q="qn", k="kn")
        + "qr = RotaryEmbedding(q4, cos, sin)\n kr_ = RotaryEmbedding(k4, cos, sin)\n"
        "y4 = Attention(qr, kr_, v4)\n" + END
    )
    weights = "<float[8] wq = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] wk = {8, 7, 6, 5, 4, 3, 2, 1}>"
    model = graph(body, weights=weights)
    site, context = read(model)
    assert site.spec.qk_norm is not None
    assert site.operands.query.value.name == "q"
    agrees(model, site, context, feeds())


def test_rotary_then_norm_keeps_the_rotation_outside() -> None:
    """A spec normalises first: what was turned first stays an operand."""
    body = (
        ROTATED.format(tables="cos, sin") + "qn = RMSNormalization<epsilon = 1e-06>(qr, wq)\n"
        "kn = RMSNormalization<epsilon = 1e-06>(kr_, wk)\n"
        "y4 = Attention(qn, kn, v4)\n" + END
    )
    weights = "<float[8] wq = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] wk = {8, 7, 6, 5, 4, 3, 2, 1}>"
    model = graph(body, weights=weights)
    site, context = read(model)
    assert site.spec.rotary is None
    assert site.operands.query.value.name == "qr"
    agrees(model, site, context, feeds())


def test_scales_on_query_and_key_multiply_into_the_scale() -> None:
    body = (
        TURN.format(q="qs", k="ks")
        + "half = Constant<value_float = 0.5>()\n third = Constant<value_float = 3.0>()\n"
        "qh = Mul(q4, half)\n kt = Div(k4, third)\n y4 = Attention<scale = 0.6>(qh, kt, v4)\n" + END
    )
    model = graph(body)
    site, context = read(model)
    assert site.spec.effective_scale == pytest.approx(0.1, rel=1e-6)
    agrees(model, site, context, feeds())


def test_repeated_heads_are_shared_heads() -> None:
    body = TURN.format(q="qs", k="ks") + REPEAT.format(k="k4", v="v4")
    model = graph(body + "y4 = Attention(q4, k_all, v_all)\n" + END)
    site, context = read(model)
    assert site.spec.kv_heads == 2
    assert site.operands.key.value.name == "k"
    agrees(model, site, context, feeds())


def test_tiled_heads_are_not_shared_heads() -> None:
    body = TURN.format(q="qs", k="ks") + TILED.format(k="k4", v="v4")
    model = graph(body + "y4 = Attention(q4, k_all, v_all)\n" + END)
    site, context = read(model)
    assert site.spec.kv_heads == 4
    assert site.operands.key.value.name == "k_all"
    agrees(model, site, context, feeds())


CACHED = (
    ROTATED.format(tables="cos, sin")
    + "nk = Concat<axis = 2>(pk, kr_)\n nv = Concat<axis = 2>(pv, v4)\n"
    + REPEAT.format(k="nk", v="nv")
)


def test_a_past_above_the_node_is_its_cache() -> None:
    model = graph(CACHED + "y4 = Attention(qr, k_all, v_all)\n" + END, cache=True)
    site, context = read(model)
    assert site.spec.cache is not None
    assert site.operands.past_key is not None
    assert site.operands.past_key.value.name == "pk"
    assert site.present_key is not None
    assert site.present_key.value.name == "nk"
    assert (site.spec.kv_heads, site.spec.mask.causal) == (2, None)
    agrees(model, site, context, feeds(cache=True))


def test_causal_over_a_past_above_the_node_stays_top_left() -> None:
    """The node knows of no past: its diagonal begins at key 0, whatever was meant."""
    model = graph(CACHED + "y4 = Attention<is_causal = 1>(qr, k_all, v_all)\n" + END, cache=True)
    site, context = read(model)
    assert site.spec.mask.causal is CausalAlignment.TOP_LEFT
    agrees(model, site, context, feeds(cache=True))


def test_new_keys_before_the_past_are_no_cache() -> None:
    body = CACHED.replace("Concat<axis = 2>(pk, kr_)", "Concat<axis = 2>(kr_, pk)")
    model = graph(body + "y4 = Attention(qr, k_all, v_all)\n" + END, cache=True)
    site, context = read(model)
    assert site.spec.cache is None
    assert site.operands.key.value.name == "k_all"
    agrees(model, site, context, feeds(cache=True))


GROUPED = """
<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
g (float[batch,seq,32] q, float[batch,seq,16] k, float[batch,seq,16] v,
   float[batch,2,{past},8] pk, float[batch,2,{past},8] pv, int32[batch] given)
  => (float[e,f,g_] y, float[batch,2,{present},8] nk, float[batch,2,{present},8] nv)
{{
  qd = Shape(q)
  pd = Shape(pk)
  i0 = Constant<value_int = 0>()
  i1 = Constant<value_int = 1>()
  i2 = Constant<value_int = 2>()
  s = Gather(qd, i1)
  p = Gather(pd, i2)
  b = Gather(qd, i0)
  t = Add(s, p)
  u = Sub(t, {less})
  total = Cast<to = 6>(t)
  last = Cast<to = 6>(u)
  c0 = Constant<value_ints = [0]>()
  bs = Unsqueeze(b, c0)
  full = Expand(last, bs)
  y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
      (q, k, v, pk, pv, {lengths}, total)
}}"""


@pytest.mark.parametrize(
    ("less", "lengths", "code"),
    [("i1", "full", None), ("i2", "full", "ragged-lengths"), ("i1", "given", "ragged-lengths")],
    ids=["computed-full", "computed-one-short", "data"],
)
def test_group_query_lengths(less: str, lengths: str, code: str | None) -> None:
    text = GROUPED.format(past="past", present="total", less=less, lengths=lengths)
    site, _ = read(ir.from_onnx_text(text))
    assert site.spec.cache is not None
    assert site.spec.cache.growth == "concat"
    assert (None if site.cannot_replace is None else site.cannot_replace.code) == code


def test_a_past_as_long_as_the_present_is_one_buffer() -> None:
    text = GROUPED.format(past="64", present="64", less="i1", lengths="given")
    site, context = read(ir.from_onnx_text(text))
    assert site.spec.cache is not None
    assert (site.spec.cache.growth, site.spec.cache.max_length) == ("shared_buffer", 64)
    assert site.replaceable
    assert site.operands.kv_lengths is not None
    view = context.sized(
        {"batch": 2, "seq": 1},
        {next(v for v in context.model.graph.inputs if v.name == "given"): np.array([4, 6], "i4")},
    )
    lengths = view.array(site.operands.kv_lengths)
    assert lengths is not None
    assert lengths.tolist() == [5, 7]


ROTATED_3D = """
<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
g (float[batch,seq,32] q, float[batch,seq,32] k, float[batch,seq,32] v, int64[batch,seq] ids,
   float[16,4] cos, float[16,4] sin) => (float[e,f,g_] y)
{{
  half = Constant<value_float = 0.5>()
  qr = com.microsoft.RotaryEmbedding<num_heads = {heads}, rotary_embedding_dim = 8{more}>
      (q, ids, cos, sin)
  kr = com.microsoft.RotaryEmbedding<num_heads = 4, rotary_embedding_dim = 8{more}>
      (k, ids, cos, sin)
  qh = Mul(qr, half)
  y = com.microsoft.MultiHeadAttention<num_heads = 4>(qh, kr, v)
}}"""


@pytest.mark.parametrize("more", ["", ", interleaved = 1"], ids=["half", "interleaved"])
def test_contributed_rotary_below_multi_head_attention(more: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = ir.from_onnx_text(ROTATED_3D.format(heads=4, more=more))
    site, _ = read(model)
    assert site.spec.rotary is not None
    assert site.spec.rotary.positions == "input"
    assert [site.operands.query.value.name, site.operands.key.value.name] == ["q", "k"]
    rng = np.random.default_rng(1)
    given = {n: rng.standard_normal((2, 3, 32)).astype(np.float32) for n in ("q", "k", "v")}
    given["ids"] = np.array([[0, 1, 2], [7, 5, 9]])
    angle = np.arange(16)[:, None] * 0.5 ** np.arange(4)[None]
    given |= {"cos": np.cos(angle).astype("f"), "sin": np.sin(angle).astype("f")}
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    actual = session.run(None, given)[0]
    parts = {n: heads_of(given[n[0]], site.operands.query) for n in ("query", "key", "value")}
    rotary = RotaryInputs(cos=given["cos"], sin=given["sin"], position_ids=given["ids"])
    exact = attention(site.spec, OracleInputs(**parts, rotary=rotary))
    np.testing.assert_allclose(heads_of(actual, site.output), exact.output, rtol=2e-5, atol=2e-5)


def test_rotary_over_another_number_of_heads_is_left_alone() -> None:
    site, _ = read(ir.from_onnx_text(ROTATED_3D.format(heads=2, more="")))
    assert site.spec.rotary is None
    assert site.operands.key.value.name == "kr"
