"""Operator probes: one node, one feature said by the node's own attribute or input.

What a form avoids (``key_padding_mask`` adds a finite -10000; ``unidirectional`` is ignored by some
runtimes) is still in other people's models, and ``doctor`` says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from mha_export.bounds import numpy_dtype
from mha_export.cases import Case
from mha_export.feeds import Arrays
from mha_export.spec import AttentionSpec, Dim, DType, EmptyRow, MaskSpec
from mha_export.targets._features import CAUSAL, DECODER, FEATURES, PLAIN
from mha_export.targets._probe_cases import SCENARIOS, Probe

MHA = "com.microsoft.MultiHeadAttention"
GQA = "com.microsoft.GroupQueryAttention"
ONNX = "ai.onnx.Attention"

INTEGERS = {
    "key_padding_mask": ir.DataType.INT32,
    "seqlens_k": ir.DataType.INT32,
    "total_sequence_length": ir.DataType.INT32,
    "nonpad_kv_seqlen": ir.DataType.INT64,
    "keep": ir.DataType.BOOL,
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator with one feature.

    Attributes:
        inputs: operand names in the operator's order; empty where it is omitted.
        outputs: ``output``, and the caches where they come out.
        fixed_past: the cache inputs get the exact size of the first case, not a symbol.
        scenarios: the cases to run it on.
    """

    op: str
    feature: str
    spec: AttentionSpec
    inputs: tuple[str, ...]
    attributes: Mapping[str, int | float] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("output",)
    fixed_past: bool = False
    scenarios: tuple[str, ...] = SCENARIOS
    opset: int = 23


QKV = ("query", "key", "value")
PASTS = ("past_key", "past_value")
PRESENTS = ("output", "present_key", "present_value")
GQA_PROMPT = (*QKV, "", "", "seqlens_k", "total_sequence_length")
GQA_DECODE = (*QKV, *PASTS, "seqlens_k", "total_sequence_length")
HEADS = {"num_heads": 4}
GROUPS = {"num_heads": 4, "kv_num_heads": 2}
ONNX_HEADS = {"q_num_heads": 4, "kv_num_heads": 4}
ONNX_GROUPS = {"q_num_heads": 4, "kv_num_heads": 2}
CAUSAL_GROUPS = CAUSAL.replace(kv_heads=2)
ONE_DECODER = DECODER.replace(batch=1)
"""ONNX Runtime's GroupQueryAttention takes several new tokens after a past for batch 1 only."""
PADDED = PLAIN.replace(mask=MaskSpec(padding=True, empty_row=EmptyRow.FINITE, fill=-10000.0))

NODES = (
    Node(op=MHA, feature="plain", spec=PLAIN, inputs=QKV, attributes=HEADS),
    Node(
        op=MHA,
        feature="scale",
        spec=FEATURES["scale"],
        inputs=QKV,
        attributes={**HEADS, "scale": 1.0},
    ),
    Node(
        op=MHA,
        feature="key_padding_mask",
        spec=PADDED,
        inputs=(*QKV, "", "key_padding_mask"),
        attributes=HEADS,
    ),
    Node(
        op=MHA,
        feature="attention_bias",
        spec=FEATURES["bias"],
        inputs=(*QKV, "", "", "bias"),
        attributes=HEADS,
    ),
    Node(
        op=MHA,
        feature="unidirectional",
        spec=CAUSAL,
        inputs=QKV,
        attributes={**HEADS, "unidirectional": 1},
    ),
    Node(
        op=MHA,
        feature="past",
        spec=FEATURES["past"],
        inputs=(*QKV, "", "", "", *PASTS),
        attributes=HEADS,
        outputs=PRESENTS,
    ),
    Node(
        op=GQA,
        feature="prompt",
        spec=CAUSAL_GROUPS,
        inputs=GQA_PROMPT,
        attributes=GROUPS,
        outputs=PRESENTS,  # DirectML fails at the run without them
    ),
    Node(
        op=GQA,
        feature="past",
        spec=ONE_DECODER,
        inputs=GQA_DECODE,
        attributes=GROUPS,
        outputs=PRESENTS,
    ),
    Node(
        op=GQA,
        feature="fixed_past",
        spec=ONE_DECODER,
        inputs=GQA_DECODE,
        attributes=GROUPS,
        outputs=PRESENTS,
        fixed_past=True,
    ),
    Node(
        op=GQA,
        feature="softcap",
        spec=ONE_DECODER.replace(softcap=2.0),
        inputs=GQA_DECODE,
        attributes={**GROUPS, "softcap": 2.0},
        outputs=PRESENTS,
    ),
    Node(
        op=GQA,
        feature="local_window_size",
        spec=ONE_DECODER.replace(mask=MaskSpec(causal=DECODER.mask.causal, left_window=3)),
        inputs=GQA_DECODE,
        attributes={**GROUPS, "local_window_size": 4},
        outputs=PRESENTS,
    ),
    Node(
        op=GQA,
        feature="attention_bias",
        spec=CAUSAL_GROUPS.replace(
            mask=MaskSpec(causal=CAUSAL.mask.causal, bias=("batch", 4, "q_len", "q_len"))
        ),
        inputs=(*GQA_PROMPT, "", "", "", "bias"),
        attributes=GROUPS,
        outputs=PRESENTS,
    ),
    Node(
        op=GQA,
        feature="head_sink",
        spec=CAUSAL_GROUPS.replace(sinks=True),
        inputs=(*GQA_PROMPT, "", "", "", "", "sinks"),
        attributes=GROUPS,
        outputs=PRESENTS,
    ),
    Node(op=ONNX, feature="plain", spec=PLAIN, inputs=QKV, attributes=ONNX_HEADS),
    Node(op=ONNX, feature="gqa", spec=FEATURES["gqa"], inputs=QKV, attributes=ONNX_GROUPS),
    Node(
        op=ONNX,
        feature="is_causal",
        spec=CAUSAL,
        inputs=QKV,
        attributes={**ONNX_HEADS, "is_causal": 1},
    ),
    Node(
        op=ONNX,
        feature="softcap",
        spec=FEATURES["softcap"],
        inputs=QKV,
        attributes={**ONNX_HEADS, "softcap": 2.0},
    ),
    Node(
        op=ONNX,
        feature="past_is_causal",
        spec=DECODER,
        inputs=(*QKV, "", *PASTS),
        attributes={**ONNX_GROUPS, "is_causal": 1},
        outputs=PRESENTS,
    ),
    Node(
        op=ONNX,
        feature="bool_mask",
        spec=FEATURES["keep"].replace(
            mask=MaskSpec(keep=("batch", 1, "q_len", "kv_len"), empty_row=EmptyRow.NAN)
        ),
        inputs=(*QKV, "keep"),
        attributes=ONNX_HEADS,
        # What an empty row gives is another question, on which runtimes and versions differ.
        scenarios=("ordinary", "decode", "poison"),
    ),
    Node(
        op=ONNX,
        feature="additive_mask",
        spec=FEATURES["bias"],
        inputs=(*QKV, "bias"),
        attributes=ONNX_HEADS,
    ),
    Node(
        op=ONNX,
        feature="nonpad_kv_seqlen",
        spec=PLAIN.replace(mask=MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)),
        inputs=(*QKV, "", "", "", "nonpad_kv_seqlen"),
        attributes=ONNX_HEADS,
        opset=24,
    ),
    Node(
        op=ONNX,
        feature="left_window_size",
        spec=FEATURES["left_window"],
        inputs=QKV,
        attributes={**ONNX_HEADS, "is_causal": 1, "left_window_size": 3},
        opset=25,
    ),
)


def operator_probes(
    dtype: DType, *, max_opset: int, computed_in: DType | None = None
) -> Iterator[Probe]:
    """Every node of :data:`NODES` whose opset the target reads."""
    for node in NODES:
        if node.op == ONNX and node.opset > max_opset:
            continue
        spec = node.spec.replace(io_dtype=dtype)
        made = Probe(
            form=node.op,
            feature=node.feature,
            dtype=dtype,
            spec=spec,
            model=_model(node, spec, min(node.opset, max_opset)),
            computed_in=computed_in or dtype,
            scenarios=node.scenarios,
        )
        if node.fixed_past:
            fix_past(made)
        yield made


def _model(node: Node, spec: AttentionSpec, opset: int) -> ir.Model:
    values = {name: _value(name, spec) for name in node.inputs if name}
    domain, _, op_type = node.op.rpartition(".")
    made = ir.Node(
        "" if domain == "ai.onnx" else domain,
        op_type,
        [values.get(name) for name in node.inputs],
        ir.convenience.convert_attributes(dict(node.attributes)),
        outputs=[_value(name, spec) for name in node.outputs],
        name="probe",
    )
    graph = ir.Graph(
        list(values.values()),
        list(made.outputs),
        nodes=[made],
        opset_imports={"": opset, "com.microsoft": 1},
        name="probe",
    )
    return ir.Model(graph, ir_version=10)


def _value(name: str, spec: AttentionSpec) -> ir.Value:
    b, h, k, d = spec.batch, spec.q_heads, spec.kv_heads, spec.head_dim
    t = "kv_len" if spec.cache is None else "total_len"
    new = "q_len" if spec.kv_len == "q_len" or spec.cache is not None else "kv_len"
    shapes: dict[str, list[Dim]] = {
        "query": [b, "q_len", h * d],
        "key": [b, new, k * d],
        "value": [b, new, k * spec.value_dim],
        "past_key": [b, k, "past_len", d],
        "past_value": [b, k, "past_len", spec.value_dim],
        "present_key": [b, k, "total_len", d],
        "present_value": [b, k, "total_len", spec.value_dim],
        "output": [b, "q_len", h * spec.value_dim],
        "bias": [b, h, "q_len", new],
        "keep": [b, 1, "q_len", new],
        "sinks": [h],
        "key_padding_mask": [b, t],
        "seqlens_k": [b],
        "total_sequence_length": [],
        "nonpad_kv_seqlen": [b],
    }
    kind = INTEGERS.get(name, ir.DataType.from_numpy(numpy_dtype(spec.io_dtype)))
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shapes[name]))


def fix_past(probe: Probe) -> None:
    """Give every dimension the number it has in the first case: the past gets its exact size."""
    first = next(iter(probe.runs())).feeds()
    sizes: dict[str, int] = {}
    for value in probe.model.graph.inputs:
        assert value.shape is not None
        assert value.name is not None
        for dim, size in zip(value.shape, first[value.name].shape, strict=True):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                sizes[dim.value] = size
        value.shape = ir.Shape(first[value.name].shape)
    sizes["total_len"] = sizes.get("past_len", 0) + sizes["q_len"]
    for value in probe.model.graph.outputs:
        assert value.shape is not None
        value.shape = ir.Shape(
            [sizes[dim.value] if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape]  # type: ignore[index]
        )


def operator_feeds(model: ir.Model, case: Case, feeds: Arrays) -> Arrays:
    """The node's inputs from the operands: lengths as the operator counts them."""
    total = int(case.dims["kv_len"])
    batch = int(case.dims["batch"])
    derived = {
        "seqlens_k": np.full([batch], total - 1, np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }
    if "key_padding" in feeds:
        derived["key_padding_mask"] = (feeds["key_padding"] != 0).astype(np.int32)
    if "kv_lengths" in feeds:
        derived["nonpad_kv_seqlen"] = feeds["kv_lengths"].astype(np.int64)
    known = feeds | derived
    return {str(value.name): known[str(value.name)] for value in model.graph.inputs}
