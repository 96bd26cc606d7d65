"""The oracle against ONNX's stored outputs, each at the case's own tolerance."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_cases import Expressed, NodeCase, attention_cases, node_cases, read_case, verdicts

from mha_export.oracle import OracleInputs, attention, rotate
from mha_export.spec import AttentionSpec, CacheSpec, RotarySpec, RotaryStyle

CASES = attention_cases()


def test_every_case_in_op_form_is_a_spec() -> None:
    refused = {case.name: verdict for case, verdict in verdicts() if verdict != "expressed"}
    assert refused == {}
    assert len(CASES) > 90


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_gives_the_stored_outputs(case: NodeCase) -> None:
    reading = read_case(case)
    assert isinstance(reading, Expressed)
    result = attention(reading.spec, reading.inputs)
    found = {
        "output": result.output,
        "present_key": result.present_key,
        "present_value": result.present_value,
    }
    if reading.spec.qk_output is not None:
        found["qk_output"] = result.scores(reading.spec.qk_output)
    for name, expected in reading.expected.items():
        actual = found[name].astype(expected.dtype).astype(np.float64)
        np.testing.assert_allclose(
            actual, expected.astype(np.float64), rtol=case.rtol, atol=case.atol, err_msg=name
        )


ROTARY = [case for case in node_cases("test_rotary_embedding") if not case.expanded]


@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_the_oracle_rotates_as_onnx_does(case: NodeCase) -> None:
    (node,) = case.model.graph.node
    attributes = {a.name: a.i for a in node.attribute}
    x, cos, sin, *positions = (case.inputs[name] for name in node.input)
    if positions:
        cos, sin = cos[positions[0]], sin[positions[0]]
    heads = attributes.get("num_heads", 0)
    x_bhsd = x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
    rotary = RotarySpec(
        style=RotaryStyle.INTERLEAVED if attributes.get("interleaved") else RotaryStyle.HALF,
        dim=attributes.get("rotary_embedding_dim") or x_bhsd.shape[3],
    )
    out = rotate(
        x_bhsd.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64), rotary, 0
    )
    (expected,) = case.outputs.values()
    actual = out if x.ndim == 4 else out.swapaxes(1, 2).reshape(x.shape)
    np.testing.assert_allclose(actual, expected, rtol=case.rtol, atol=case.atol)


# A circular buffer is not a cache that a spec can state.
SCATTER = [
    case
    for case in node_cases("test_tensorscatter")
    if not case.expanded and "circular" not in case.name
]


@pytest.mark.parametrize("case", SCATTER, ids=lambda case: case.name)
def test_the_oracle_writes_a_static_cache_as_tensor_scatter_does(case: NodeCase) -> None:
    (node,) = case.model.graph.node
    past, update, *start = (case.inputs[name] for name in node.input)
    (expected,) = case.outputs.values()
    if past.ndim == 3:
        past, update, expected = past[:, None], update[:, None], expected[:, None]
    (b, heads, _, width), n = past.shape, update.shape[2]
    spec = AttentionSpec(
        q_heads=heads, kv_heads=heads, head_dim=width, cache=CacheSpec(growth="static")
    )
    inputs = OracleInputs(
        query=np.zeros((b, heads, n, width)),
        key=update,
        value=update,
        past_key=past,
        past_value=past,
        kv_lengths=(start[0] if start else np.zeros(b, np.int64)) + n,
    )
    np.testing.assert_array_equal(attention(spec, inputs).present_key, expected)
