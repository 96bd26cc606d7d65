"""The smallest graphs that show why a runtime does not give ONNX's stored outputs.

Each stands for a line of ``onnx_forms.KNOWN``: where one fails, the runtime was mended, and the
line goes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from runtimes import OrtSession

FP16_OP = """
<ir_version: 10, opset_import: ["" : 23]>
g (float16[1,1,1,1] q, float16[1,1,2,1] k, float16[1,1,2,1] v) => (float16[1,1,1,1] y) {
  y = Attention(q, k, v)
}"""
FP16_PLAIN = """
<ir_version: 10, opset_import: ["" : 23]>
g (float16[1,1,1,1] q, float16[1,1,2,1] k, float16[1,1,2,1] v) => (float16[1,1,1,1] y) {
  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  x = MatMul(q, kt)
  p = Softmax(x)
  y = MatMul(p, v)
}"""


def units_off(text: str) -> float:
    """Largest distance from the exact output, in units of its last place in fp16."""
    random, session, worst = np.random.default_rng(0), OrtSession(ir.from_onnx_text(text)), 0.0
    for _ in range(100):
        q, k, v = (random.random((1, 1, n, 1)).astype(np.float16) for n in (1, 2, 2))
        (found,) = session.run({"q": q, "k": k, "v": v}).values()
        weights = np.exp(q.astype(np.float64) * k.astype(np.float64))
        exact = (weights * v.astype(np.float64)).sum() / weights.sum()
        off = abs(found.astype(np.float64).item() - exact) / np.spacing(np.float16(exact))
        worst = max(worst, float(off))
    return worst


def test_fp16_attention_rounds_once_more_than_plain_ops() -> None:
    """Known: test_attention_4d_causal_fp16 in form onnx."""
    assert units_off(FP16_PLAIN) <= 0.51
    assert units_off(FP16_OP) > 0.75


GQA = """
<ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
g (float[1,1,8] q, float[1,new,8] k, float[1,new,8] v, float[1,1,1,8] past_k, float[1,1,1,8] past_v,
   int32[1] last, int32 total)
=> (float[1,1,8] y, float[1,1,t,8] present_k, float[1,1,t,8] present_v) {
  y, present_k, present_v = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1>
    (q, k, v, past_k, past_v, last, total)
}"""


def run_gqa(new: int) -> dict[str, np.ndarray]:
    """One query beside a past of one key and ``new`` new keys."""
    feeds = {name: np.ones((1, 1, 8), np.float32) for name in ("q",)}
    feeds |= {name: np.ones((1, new, 8), np.float32) for name in ("k", "v")}
    feeds |= {name: np.ones((1, 1, 1, 8), np.float32) for name in ("past_k", "past_v")}
    feeds |= {"last": np.array([new], np.int32), "total": np.array(new + 1, np.int32)}
    return OrtSession(ir.from_onnx_text(GQA)).run(feeds)


def test_grouped_attention_takes_as_many_new_keys_as_queries() -> None:
    """Known: test_attention_local_window_with_past in form ort-gqa."""
    assert run_gqa(1)["y"].shape == (1, 1, 8)
    with pytest.raises(Exception, match="must have the same sequence length"):
        run_gqa(2)
