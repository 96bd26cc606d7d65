"""The node of each fused form: its attributes, and which of its inputs and outputs are there.

By hand from the operator's documentation. An attribute at its default is left out, an input that
says nothing is not made, and what an opset has no word for is an input instead.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from features import FEATURES

from mha_export.forms import FormParams, build_model, form_named
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkOutput,
    RotarySpec,
    RotaryStyle,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
SQUARE = {"q_len": "s", "kv_len": "s"}
INPUTS = {
    "onnx": "query key value mask past_key past_value lengths",
    "ort-gqa": "query key value past_key past_value seqlens total cos sin position_ids bias sinks"
    " - - - - query_lengths",
    "ort-mha": "query key value - padding bias past_key past_value",
    "portable": "query key value - padding bias past_key past_value",
    "ort-attention": "x weight weight_bias - past bias",
}
ALWAYS = {
    "onnx": {"query", "key", "value"},
    "ort-gqa": {"query", "key", "value", "seqlens", "total"},
    "ort-mha": {"query", "key", "value"},
    "portable": {"query", "key", "value", "bias"},
    "ort-attention": {"x", "weight"},
}
OPS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
PAST = "past_key past_value"
Attributes = dict[str, Any]


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 16} | fields)


def _node(form: str, spec: AttentionSpec, opset: int, **options: Any) -> ir.Node:
    model = build_model(form_named(form), spec, FormParams(opset=opset, options=options))
    (node,) = (node for node in model.graph if node.op_type in OPS)
    return node


def _attributes(node: ir.Node) -> Attributes:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _extra(form: str, node: ir.Node) -> set[str]:
    """Names of the inputs that are there beyond those that always are."""
    names = INPUTS[form].split()
    here = {names[at] for at, value in enumerate(node.inputs) if value is not None}
    assert here >= ALWAYS[form]
    return here - ALWAYS[form]


FLAT = {"q_num_heads": 4, "kv_num_heads": 2}
FLAT_4 = {"q_num_heads": 4, "kv_num_heads": 4}
CAUSAL = {"is_causal": 1}
KEEP = MaskSpec(keep=("q_len", "kv_len"), empty_row=EmptyRow.ZERO)
HALF: dict[str, Any] = {"io_dtype": DType.FP16}
ONNX: list[tuple[str | AttentionSpec, int, Attributes, str]] = [
    # feature or spec, opset, attributes, inputs beyond query, key and value
    ("gqa", 23, FLAT, ""),
    ("mha", 24, FLAT_4, ""),
    ("scale-1", 23, FLAT | {"scale": 1.0}, ""),
    ("scale-eighth", 23, FLAT | {"scale": 0.125}, ""),
    ("scale-negative", 23, FLAT | {"scale": 1.0}, ""),
    ("scale-0", 23, FLAT | {"scale": 1.0}, ""),
    (_spec(scale=0.25), 23, FLAT, ""),
    (_spec(scale=1.25), 23, FLAT | {"scale": 1.25}, ""),
    (_spec(scale=2.25), 23, FLAT | {"scale": 2.25}, ""),
    (_spec(head_dim=1, scale=-1.0), 23, FLAT, ""),
    ("softcap", 23, FLAT | {"softcap": 2.0}, ""),
    ("causal-square", 23, FLAT | CAUSAL, ""),
    ("causal-top-left", 23, FLAT_4 | CAUSAL, ""),
    ("causal-bottom-right", 25, FLAT_4, "mask"),
    ("prefix", 25, FLAT, "mask"),
    ("window-left", 24, FLAT | CAUSAL, "mask"),
    ("window-left", 25, FLAT | CAUSAL | {"left_window_size": 2}, ""),
    ("window-0", 25, FLAT | CAUSAL | {"left_window_size": 0}, ""),
    ("window-both", 25, FLAT_4 | {"left_window_size": 1, "right_window_size": 2}, ""),
    ("block", 25, FLAT_4, "mask"),
    ("cache", 23, FLAT | CAUSAL, PAST),
    ("cache-not-causal", 23, FLAT, PAST),
    ("cache-top-left", 25, FLAT, f"mask {PAST}"),
    ("cache-bshd", 25, FLAT, "mask"),
    ("cache-window", 24, FLAT | CAUSAL, f"mask {PAST}"),
    ("cache-window", 25, FLAT | CAUSAL | {"left_window_size": 3}, PAST),
    ("cache-lengths", 24, FLAT, f"mask {PAST}"),
    ("key-prefix-cache", 24, {}, "mask"),
    ("static", 23, {}, "mask"),
    ("static", 24, CAUSAL, "lengths"),
    ("static-bshd", 24, FLAT | CAUSAL, "lengths"),
    ("static-not-causal", 24, {}, "lengths"),
    ("static-top-left", 24, CAUSAL, "mask"),
    ("static-window", 24, CAUSAL, "lengths mask"),
    ("static-window", 25, CAUSAL | {"left_window_size": 3}, "lengths"),
    ("lengths", 23, FLAT_4, "mask"),
    ("lengths", 24, FLAT_4, "lengths"),
    ("lengths-causal", 23, FLAT_4, "mask"),
    ("lengths-causal", 24, FLAT_4 | CAUSAL, "lengths"),
    ("lengths-top-left", 24, FLAT_4 | CAUSAL, "mask"),
    ("lengths-window", 25, FLAT_4 | {"left_window_size": 2, "right_window_size": 0}, "lengths"),
    ("keep-inf-zero", 23, FLAT, "mask"),
    ("padding-causal-inf-zero", 23, FLAT | CAUSAL, "mask"),
    ("padding-causal-min-uniform", 23, FLAT, "mask"),
    ("padding-causal-finite-finite", 23, FLAT, "mask"),
    ("alibi", 23, FLAT_4 | CAUSAL, "mask"),
    ("sinks-causal", 25, {}, "mask"),
    ("sinks-cache", 25, {}, "mask"),
    ("scores-raw", 23, FLAT_4 | CAUSAL | {"softcap": 3.0, "qk_matmul_output_mode": 0}, ""),
    ("scores-capped", 23, FLAT_4 | CAUSAL | {"softcap": 3.0, "qk_matmul_output_mode": 1}, ""),
    ("scores-masked", 23, FLAT_4 | CAUSAL | {"softcap": 3.0, "qk_matmul_output_mode": 2}, ""),
    ("scores-probabilities-keep", 23, FLAT | {"qk_matmul_output_mode": 3}, "mask"),
    ("softmax-fp32", 23, FLAT, ""),
    (_spec(**HALF), 23, FLAT, ""),
    (_spec(**HALF, softmax_dtype=DType.FP32), 23, FLAT | {"softmax_precision": 1}, ""),
    (_spec(softmax_dtype=DType.FP64), 23, FLAT | {"softmax_precision": 11}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "opset", "attributes", "inputs"), ONNX)
def test_the_onnx_attention(
    feature: str | AttentionSpec, opset: int, attributes: Attributes, inputs: str
) -> None:
    spec = FEATURES[feature] if isinstance(feature, str) else feature
    node = _node("onnx", spec, opset)
    assert _attributes(node) == attributes
    assert _extra("onnx", node) == set(inputs.split())
    grows = "past_key" in inputs
    wanted = [True, grows, grows, True] if spec.qk_output else [True, *[True, True] * grows]
    assert [bool(value.name) for value in node.outputs] == wanted


def test_scores_beside_a_cache_of_the_op() -> None:
    """Every output there is has the type of the inputs."""
    spec = FEATURES["cache"].replace(qk_output=QkOutput.RAW)
    node = _node("onnx", spec, 23)
    assert [value.name for value in node.outputs] == [
        "output", "present_key", "present_value", "qk_output",
    ]  # fmt: skip
    assert {value.dtype for value in node.outputs} == {ir.DataType.FLOAT}


GQA_HEADS = {"num_heads": 4, "kv_num_heads": 2}
OPEN = {"causal": 0}
ROTATES = {"do_rotary": 1}
TABLES = "cos sin"
ROTARY = RotarySpec(dim=16, theta=1e4)
CACHED: dict[str, Any] = {"cache": CacheSpec(), "mask": MaskSpec(causal=BOTTOM_RIGHT)}
ONE_ROW: dict[str, Any] = CACHED | {"batch": 1}
GQA: list[tuple[str | AttentionSpec, Attributes, str]] = [
    ("gqa-square", GQA_HEADS | OPEN, ""),
    ("scale-1", GQA_HEADS | OPEN | {"scale": 1.0}, ""),
    ("scale-eighth", GQA_HEADS | OPEN | {"scale": 0.125}, ""),
    ("scale-negative", GQA_HEADS | OPEN | {"scale": -0.5}, ""),
    ("scale-0", GQA_HEADS | OPEN | {"scale": 1.0}, ""),
    (_spec(**SQUARE, scale=0.25), GQA_HEADS | OPEN, ""),
    (_spec(**SQUARE, scale=1.25), GQA_HEADS | OPEN | {"scale": 1.25}, ""),
    ("softcap", GQA_HEADS | OPEN | {"softcap": 2.0}, ""),
    ("causal-square", GQA_HEADS, ""),
    ("causal-square-bottom-right", GQA_HEADS, ""),
    ("window-left", GQA_HEADS | {"local_window_size": 3}, ""),
    ("window-0", GQA_HEADS | {"local_window_size": 1}, ""),
    (_spec(**SQUARE, mask=MaskSpec(left_window=2)), GQA_HEADS | OPEN, "bias"),
    ("prefix", GQA_HEADS | OPEN, "bias"),
    ("padding-causal-inf-zero", GQA_HEADS, "bias"),
    ("padding-causal-finite-finite", GQA_HEADS | OPEN, "bias"),
    ("cache", GQA_HEADS, f"{PAST} query_lengths"),
    ("cache-window", GQA_HEADS | {"local_window_size": 4}, f"{PAST} query_lengths"),
    ("decode-not-causal", GQA_HEADS | OPEN, PAST),
    ("one-row-not-causal", GQA_HEADS | OPEN, PAST),
    (FEATURES["cache-lengths"].replace(batch=1), GQA_HEADS | OPEN, f"{PAST} bias"),
    (_spec(**CACHED, batch=2, q_len=2), GQA_HEADS, f"{PAST} query_lengths"),
    (_spec(**CACHED, batch=1, q_len=2), GQA_HEADS, PAST),
    (_spec(**CACHED, batch=2, q_len=1), GQA_HEADS, PAST),
    ("static", GQA_HEADS, f"{PAST} query_lengths"),
    ("static-decode", GQA_HEADS, PAST),
    ("static-window", GQA_HEADS | {"local_window_size": 4}, f"{PAST} query_lengths"),
    ("sinks-square", GQA_HEADS | OPEN, "sinks"),
    ("sinks-cache", GQA_HEADS | {"local_window_size": 5}, f"{PAST} sinks query_lengths"),
    ("rotary", GQA_HEADS | ROTATES, TABLES),
    ("rotary-interleaved", GQA_HEADS | ROTATES | {"rotary_interleaved": 1}, TABLES),
    ("rotary-cache", GQA_HEADS | ROTATES, f"{PAST} {TABLES} query_lengths"),
    ("rotary-static", GQA_HEADS | ROTATES, f"{PAST} {TABLES} query_lengths"),
    ("rotary-tables", GQA_HEADS, ""),
    ("rotary-input", GQA_HEADS, f"{PAST} query_lengths"),
    ("rotary-query-alone", GQA_HEADS | OPEN, ""),
    ("rotary-partial", GQA_HEADS, f"{PAST} query_lengths"),
    (_spec(**ONE_ROW, head_dim=32, rotary=ROTARY), GQA_HEADS | ROTATES, f"{PAST} {TABLES}"),
    (_spec(**ONE_ROW, head_dim=32, rotary=RotarySpec(dim=16, theta=1e4, offset=16)),
     GQA_HEADS, PAST),
    (_spec(**ONE_ROW, head_dim=32, rotary=RotarySpec(dim=24, theta=1e4)), GQA_HEADS, PAST),
    (_spec(**ONE_ROW, rotary=RotarySpec(dim=16, theta=1e4, style=RotaryStyle.INTERLEAVED)),
     GQA_HEADS | ROTATES | {"rotary_interleaved": 1}, f"{PAST} {TABLES}"),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "attributes", "inputs"), GQA)
def test_group_query_attention(
    feature: str | AttentionSpec, attributes: Attributes, inputs: str
) -> None:
    spec = FEATURES[feature] if isinstance(feature, str) else feature
    node = _node("ort-gqa", spec, 17)
    assert node.domain == "com.microsoft"
    heads = {"num_heads": spec.q_heads, "kv_num_heads": spec.kv_heads}
    assert _attributes(node) == attributes | heads
    assert _extra("ort-gqa", node) == set(inputs.split())
    assert all(value.name for value in node.outputs)
    assert len(node.outputs) == 3


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("feature", ["cache", "gqa-square"])
def test_lengths_of_queries_are_given_where_that_is_asked_for(feature: str, stated: bool) -> None:
    node = _node("ort-gqa", FEATURES[feature], 17, query_seqlens=stated)
    assert ("query_lengths" in _extra("ort-gqa", node)) is stated


MHA_HEADS = {"num_heads": 4}
ONE_WAY = {"unidirectional": 1}
MHA: list[tuple[str | AttentionSpec, Attributes, str]] = [
    ("mha", MHA_HEADS, ""),
    ("gqa", MHA_HEADS, ""),
    ("scale-1", MHA_HEADS | {"scale": 1.0}, ""),
    ("scale-negative", MHA_HEADS | {"scale": -0.5}, ""),
    ("scale-0", MHA_HEADS | {"scale": 1.0}, ""),
    (_spec(scale=0.25), MHA_HEADS, ""),
    (_spec(scale=1.25), MHA_HEADS | {"scale": 1.25}, ""),
    ("causal-square", MHA_HEADS | ONE_WAY, ""),
    ("causal-square-bottom-right", MHA_HEADS | ONE_WAY, ""),
    ("causal-top-left", MHA_HEADS, "bias"),
    ("causal-bottom-right", MHA_HEADS, "bias"),
    ("prefix", MHA_HEADS, "bias"),
    ("padding-causal-inf-zero", MHA_HEADS, "bias"),
    ("padding-causal-finite-finite", MHA_HEADS, "bias"),
    ("window-left", MHA_HEADS | ONE_WAY, "bias"),
    ("sinks-causal", MHA_HEADS, "bias"),
    ("cache-mha", MHA_HEADS | ONE_WAY, PAST),
    ("cache-top-left", MHA_HEADS, "bias"),
    ("cache", MHA_HEADS, "bias"),
    ("cache-bshd", MHA_HEADS, "bias"),
    ("cache-v-head-dim", MHA_HEADS, "bias"),
    (FEATURES["cache-mha"].replace(mask=FEATURES["cache-lengths"].mask), MHA_HEADS,
     f"bias {PAST}"),
    (FEATURES["cache-mha"].replace(sinks=True), MHA_HEADS, "bias"),
    (FEATURES["cache-mha"].replace(cache=CacheSpec(layout="bshd")), MHA_HEADS, "bias"),
    (FEATURES["cache-mha"].replace(cache=CacheSpec(growth="static")), MHA_HEADS, "bias"),
    (FEATURES["cache-mha"].replace(value_source="key_prefix"), MHA_HEADS, "bias"),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "attributes", "inputs"), MHA)
def test_multi_head_attention(
    feature: str | AttentionSpec, attributes: Attributes, inputs: str
) -> None:
    spec = FEATURES[feature] if isinstance(feature, str) else feature
    node = _node("ort-mha", spec, 17)
    assert node.domain == "com.microsoft"
    assert _attributes(node) == attributes
    assert _extra("ort-mha", node) == set(inputs.split())
    assert len(node.outputs) == (3 if "past" in inputs else 1)


@pytest.mark.parametrize("feature", ["mha", "cache-mha", "causal-square", "scale-0", "sinks"])
def test_a_portable_node_has_what_its_body_reads(feature: str) -> None:
    """Three inputs, a mask and both attributes, always; nothing else ever."""
    spec = FEATURES[feature]
    node = _node("portable", spec, 17)
    assert _attributes(node) == {"num_heads": 4, "scale": spec.effective_scale or 1.0}
    assert _extra("portable", node) == set()
    assert len(node.outputs) == 1


def _encoder(**fields: Any) -> AttentionSpec:
    stated = {"kv_heads": 4, "projections": ProjectionSpec(d_model=24, packing="packed")}
    return _spec(**SQUARE | stated | fields)


BIASED = ProjectionSpec(d_model=24, q_bias=True)
PADDED = MaskSpec(causal=TOP_LEFT, padding=True, empty_row=EmptyRow.ZERO)
ATTENTION: list[tuple[AttentionSpec, Attributes, str]] = [
    (_encoder(), MHA_HEADS, ""),
    (_encoder(projections=BIASED), MHA_HEADS, "weight_bias"),
    (_encoder(scale=1.25), MHA_HEADS | {"scale": 1.25}, ""),
    (_encoder(scale=2.25), MHA_HEADS | {"scale": 2.25}, ""),
    (_encoder(scale=0.25), MHA_HEADS, ""),
    (_encoder(v_head_dim=6), MHA_HEADS | {"qkv_hidden_sizes": (64, 64, 24)}, ""),
    (_encoder(mask=MaskSpec(causal=TOP_LEFT)), MHA_HEADS | ONE_WAY, ""),
    (_encoder(mask=MaskSpec(causal=BOTTOM_RIGHT)), MHA_HEADS | ONE_WAY, ""),
    (_encoder(mask=MaskSpec(causal=TOP_LEFT, left_window=2)), MHA_HEADS | ONE_WAY, "bias"),
    (_encoder(mask=MaskSpec(causal=TOP_LEFT, prefix=True)), MHA_HEADS, "bias"),
    (_encoder(mask=MaskSpec(causal=TOP_LEFT, fill=-9.0)), MHA_HEADS, "bias"),
    (_encoder(mask=PADDED), MHA_HEADS, "bias"),
    (_encoder(mask=MaskSpec(left_window=2)), MHA_HEADS, "bias"),
    (
        _encoder(
            mask=MaskSpec(causal=BOTTOM_RIGHT, lengths=True, empty_row=EmptyRow.ZERO),
        ),
        MHA_HEADS,
        "bias",
    ),
]


@pytest.mark.parametrize(("spec", "attributes", "inputs"), ATTENTION)
def test_the_attention_that_projects(
    spec: AttentionSpec, attributes: Attributes, inputs: str
) -> None:
    node = _node("ort-attention", spec, 17)
    assert node.domain == "com.microsoft"
    found = {
        name: tuple(value) if name == "qkv_hidden_sizes" else value
        for name, value in _attributes(node).items()
    }
    assert found == attributes
    assert _extra("ort-attention", node) == set(inputs.split())
