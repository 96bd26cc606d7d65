"""Which form comes first where nobody says."""

from __future__ import annotations

import pytest

from mha_export.jobs._defaults import preferred_forms
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, MaskSpec

ORDER = ("onnx", "primitive")
CAUSAL = MaskSpec(causal=CausalAlignment.TOP_LEFT)
STEP = {"q_len": 1, "kv_len": "t", "cache": CacheSpec(growth="concat")}


@pytest.mark.parametrize(
    ("target", "fields", "first"),
    [
        ("cpu", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "tiled"),
        ("openvino", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "tiled"),
        ("cpu", {"q_len": 512, "kv_len": 512, "mask": CAUSAL}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": 2048}, "onnx"),
        ("cpu", {"q_len": "s", "kv_len": "s", "mask": CAUSAL}, "onnx"),
        ("cuda", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "onnx"),
        ("cpu", STEP, "grouped"),
        ("cuda", STEP, "onnx"),
        ("cpu", {"q_len": 1, "kv_len": "t"}, "onnx"),
    ],
)
def test_the_first_form(target: str, fields: dict[str, object], first: str) -> None:
    spec = AttentionSpec(q_heads=4, kv_heads=2, head_dim=16, **fields)  # type: ignore[arg-type]
    order = preferred_forms(target, spec, ORDER)
    assert order[0] == first
    assert order[-2:] == ORDER
