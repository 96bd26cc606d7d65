"""A proof goes on to lengths at which a runtime may take another kernel, where the graph does."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from rewrite_sites import OPSET, always, recognition_of

from mha_export.evaluator import Arrays, Evaluator
from mha_export.recognise import recognise
from mha_export.rewrite import SiteOutcome, rewrite
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, MaskSpec

PLAIN = AttentionSpec(q_heads=2, kv_heads=2, head_dim=8, q_len="s", kv_len="s")
SPECS = {
    "self": PLAIN,
    "causal": PLAIN.replace(mask=MaskSpec(causal=CausalAlignment.TOP_LEFT)),
    "cross": PLAIN.replace(cross=True, kv_len="t"),
    "cache": PLAIN.replace(
        mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT), cache=CacheSpec(), kv_len="t"
    ),
}


class WrongWhenLong:
    """Its Attention is off by one from 32 queries, or from 64 keys, on."""

    name = "wrong when long"

    def __init__(self, inner: Evaluator, queries: int, keys: int) -> None:
        self._inner, self._queries, self._keys = inner, queries, keys

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        outputs = self._inner.run(model, inputs)
        if not any(node.op_type == "Attention" for node in model.graph):
            return outputs
        long = outputs["proof.output"].shape[1] >= self._queries
        long |= max(max(array.shape, default=0) for array in inputs.values()) >= self._keys
        return {name: array + np.float32(long) for name, array in outputs.items()}


def _outcome(spec: AttentionSpec, engine: Evaluator) -> SiteOutcome:
    return rewrite(recognition_of(spec), always("onnx"), evaluator=engine).outcomes["attn.0"]


@pytest.mark.parametrize("name", SPECS)
def test_a_kernel_that_is_wrong_from_32_queries_is_caught(name: str, evaluator: Evaluator) -> None:
    assert _outcome(SPECS[name], evaluator).status == "fused"
    found = _outcome(SPECS[name], WrongWhenLong(evaluator, 32, 1 << 20))
    assert found.status == "proof_failed"
    assert "@long" in (found.reason or "")


@pytest.mark.parametrize("name", ["self", "causal", "cross"])
def test_a_kernel_that_is_wrong_from_64_keys_is_caught(name: str, evaluator: Evaluator) -> None:
    found = _outcome(SPECS[name], WrongWhenLong(evaluator, 1 << 20, 64))
    assert found.status == "proof_failed"
    assert "@long" in (found.reason or "")


STORED = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[batch,2,s,8] q, float[batch,2,s,8] k, float[batch,2,s,8] v,
   float[1,1,<rows>,<rows>] stored)
  => (float[batch,2,s,8] y)
{
  scaled = Constant<value_float = 0.25>()
  turned = Transpose<perm = [0, 1, 3, 2]>(k)
  products = MatMul(q, turned)
  scores = Mul(products, scaled)
  length = Shape<start = 2, end = 3>(q)
  twice = Concat<axis = 0>(length, length)
  from = Constant<value_ints = [0, 0]>()
  axes = Constant<value_ints = [2, 3]>()
  mask = Slice(stored, from, twice, axes)
  biased = Add(scores, mask)
  weights = Softmax<axis = -1>(biased)
  y = MatMul(weights, v)
}"""


@pytest.mark.parametrize(("rows", "long"), [(20, None), (50, 37), (80, 70)])
def test_a_stored_mask_bounds_the_lengths(
    rows: int, long: int | None, evaluator: Evaluator
) -> None:
    """Beyond it the graph does not run, and neither does the proof."""
    model = ir.from_onnx_text(STORED.replace("<rows>", str(rows)))
    below = np.where(np.tri(rows, dtype=bool), 0, -np.inf).astype(np.float32)
    stored = model.graph.inputs.pop()
    stored.const_value = ir.tensor(below[None, None], name="stored")
    model.graph.register_initializer(stored)
    lengths: set[int] = set()

    class Noted(WrongWhenLong):
        def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
            outputs = super().run(model, inputs)
            lengths.add(max(outputs["proof.output"].shape))
            return outputs

    engine = Noted(evaluator, 1 << 20, 1 << 20)
    done = rewrite(recognise(model), always("onnx", opset=OPSET), evaluator=engine)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "fused", outcome.reason
    assert max(lengths) == (long or max(lengths))
    assert max(lengths) <= rows
