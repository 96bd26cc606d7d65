"""qk-norm, however it is spelt, and what only looks like it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.recognise._evaluate import Context
from mha_export.recognise.norms import PeeledNorm, peel_norm

PRELUDE = """
  eps = Constant<value = float {1e-06}>()
  two = Constant<value_float = 2.0>()
  one = Constant<value_float = 1.0>()
  half = Constant<value_float = 0.5>()
  tiny = Constant<value = float {1e-12}>()
  last = Constant<value_ints = [-1]>()
  heads = Constant<value_ints = [1]>()
"""
RMS = """
  sq = Pow(x, two)
  mean = ReduceMean<keepdims = 1>(sq, last)
  shifted = Add(mean, eps)
  root = Sqrt(shifted)
"""
LAYER = """
  mu = ReduceMean<keepdims = 1>(x, last)
  x0 = Sub(x, mu)
  sq = Mul(x0, x0)
  var = ReduceMean<keepdims = 1>(sq, last)
  shifted = Add(var, eps)
  root = Sqrt(shifted)
  n = Div(x0, root)
"""


def peel(body: str, *, width: int = 8, dtype: str = "float", opset: int = 18) -> PeeledNorm | None:
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : {opset}]>
g ({dtype}[batch,4,seq,{width}] x, {dtype}[{width}] w, {dtype}[{width}] v) => ({dtype}[a,b,c,d] y)
{{
  {PRELUDE}
  {body}
}}""")
    out = model.graph.outputs[0]
    anchor = ir.node("Identity", [out])
    model.graph.append(anchor)
    return peel_norm(out, head_dim=8, context=Context(model), anchor=anchor)


SPELLINGS = [
    ("rms-div", RMS + "n = Div(x, root)\n y = Mul(n, w)", ("rms", 1e-6, "w", None)),
    ("rms-weight-first", RMS + "n = Div(x, root)\n y = Mul(w, n)", ("rms", 1e-6, "w", None)),
    ("rms-reciprocal", RMS + "r = Reciprocal(root)\n n = Mul(x, r)\n y = Mul(n, w)",
     ("rms", 1e-6, "w", None)),
    ("rms-one-over", RMS + "r = Div(one, root)\n n = Mul(x, r)\n y = Mul(n, w)",
     ("rms", 1e-6, "w", None)),
    ("rms-no-weight", RMS + "y = Div(x, root)", ("rms", 1e-6, None, None)),
    ("rms-weight-plus-one", RMS + "n = Div(x, root)\n w1 = Add(w, one)\n y = Mul(n, w1)",
     ("rms", 1e-6, "w1", None)),
    ("rms-bias", RMS + "n = Div(x, root)\n m = Mul(n, w)\n y = Add(m, v)", ("rms", 1e-6, "w", "v")),
    ("layer", LAYER + "m = Mul(n, w)\n y = Add(m, v)", ("layer", 1e-6, "w", "v")),
    ("layer-node", "y = LayerNormalization<epsilon = 1e-05>(x, w, v)", ("layer", 1e-5, "w", "v")),
    ("layer-node-no-bias", "y = LayerNormalization<epsilon = 0.01>(x, w)",
     ("layer", 0.01, "w", None)),
    ("l2", "s = ReduceL2<keepdims = 1>(x, last)\n c = Clip(s, tiny)\n y = Div(x, c)",
     ("l2", 1e-12, None, None)),
    ("l2-max", "s = ReduceL2<keepdims = 1>(x, last)\n c = Max(s, tiny)\n n = Div(x, c)\n"
     "y = Mul(n, w)", ("l2", 1e-12, "w", None)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"), [c[1:] for c in SPELLINGS], ids=[c[0] for c in SPELLINGS]
)
def test_spellings(body: str, expected: tuple[str, float, str | None, str | None]) -> None:
    found = peel(body)
    assert found is not None
    kind, epsilon, weight, bias = expected
    assert found.spec.kind == kind
    assert found.spec.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert (found.weight.name if found.weight else None) == weight
    assert (found.bias.name if found.bias else None) == bias
    assert (found.spec.weight, found.spec.bias) == (weight is not None, bias is not None)
    assert (found.before.name, found.spec.over) == ("x", "head")


def test_the_node_of_opset_23() -> None:
    found = peel("y = RMSNormalization<epsilon = 1e-06>(x, w)", opset=23)
    assert found is not None
    assert (found.spec.kind, found.spec.epsilon) == ("rms", 1e-6)
    assert found.weight is not None
    assert found.weight.name == "w"


def test_half_precision_is_read_through_its_casts() -> None:
    """Hugging Face normalises in fp32 and multiplies in fp16."""
    body = (
        "f = Cast<to = 1>(x)\n"
        + RMS.replace("(x,", "(f,")
        + "n = Div(f, root)\n h = Cast<to = 10>(n)\n y = Mul(h, w)"
    )
    found = peel(body, dtype="float16")
    assert found is not None
    assert (found.spec.kind, found.spec.epsilon) == ("rms", 1e-6)
    assert found.before.name in ("x", "f")


def test_all_heads_together() -> None:
    found = peel(RMS + "n = Div(x, root)\n y = Mul(n, w)", width=32)
    assert found is not None
    assert found.spec.over == "hidden"


MISSES = [
    ("over-the-heads", RMS.replace("last)", "heads)") + "y = Div(x, root)"),
    ("sum-for-mean", RMS.replace("ReduceMean", "ReduceSum") + "y = Div(x, root)"),
    ("no-root", RMS + "y = Div(x, shifted)"),
    ("root-without-epsilon-inside", RMS.replace("Sqrt(shifted)", "Sqrt(mean)")
     + "r = Add(root, half)\n y = Div(x, r)"),
    ("another-power", RMS.replace("Pow(x, two)", "Pow(x, one)") + "y = Div(x, root)"),
    ("scaled-by-a-half", RMS + "n = Div(x, root)\n y = Mul(n, half)"),
    ("softened", RMS + "n = Div(x, root)\n y = Add(n, x)"),
    ("not-a-norm", "y = Mul(x, w)"),
]  # fmt: skip


@pytest.mark.parametrize("body", [b for _, b in MISSES], ids=[n for n, _ in MISSES])
def test_what_is_no_norm(body: str) -> None:
    assert peel(body) is None


def test_half_centred_channels_are_what_the_norm_reads() -> None:
    """Not a layer norm of x, but truly an rms norm of the half-centred channels."""
    half = LAYER.replace("Sub(x, mu)", "Sub(x, hm)").replace("x0 =", "hm = Mul(mu, half)\n  x0 =")
    found = peel(half + "y = Mul(n, w)")
    assert found is not None
    assert (found.spec.kind, found.before.name) == ("rms", "x0")


def test_epsilon_tells_apart_what_large_channels_do_not() -> None:
    found = [peel(RMS.replace("eps)", f"{name})") + "y = Div(x, root)") for name in ("eps", "tiny")]
    epsilons = [one.spec.epsilon for one in found if one is not None]
    assert np.allclose(epsilons, [1e-6, 1e-12], rtol=1e-3, atol=0)
