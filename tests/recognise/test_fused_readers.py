"""Readers of fused nodes: the spec and operands they bind give what the runtime computes.

Each case is one node over an option table. The node runs on ONNX Runtime (or onnx's reference);
the operands the reader binds are evaluated and put into the float64 oracle: both must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import heads_of

from mha_export.oracle import OracleInputs, RotaryInputs, attention
from mha_export.recognise._evaluate import Context
from mha_export.recognise._site import Rejection, Site
from mha_export.recognise.fused import is_fused, read_fused, readers
from mha_export.spec import CausalAlignment, EmptyRow, QkOutput

ort = pytest.importorskip("onnxruntime")

B, H, K, S, T, P, D, E = 2, 4, 2, 5, 5, 3, 6, 6


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@dataclass
class Case:
    """One node: inputs in order (None: omitted), the symbols of their axes, attributes."""

    name: str
    op: str
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    opset: int = 23
    domain: str = "com.microsoft"
    wants: dict[str, Any] = field(default_factory=dict)
    static: bool = False

    def __repr__(self) -> str:
        return self.name

    def model(self) -> tuple[ir.Model, dict[str, np.ndarray]]:
        values: list[ir.Value | None] = []
        feeds: dict[str, np.ndarray] = {}
        for index, array in enumerate(self.inputs):
            if array is None:
                values.append(None)
                continue
            name = f"in{index}"
            feeds[name] = array
            names = {B: "batch", S: "q_len", P: "past", P + S: "total", 7: "keys"}
            dims: list[int | str] = list(array.shape)
            if not self.static:
                dims = [names.get(n, n) if axis < 3 else n for axis, n in enumerate(array.shape)]
                if array.ndim == 4:  # [b, h, s, d]: heads and width are numbers
                    dims[1], dims[3] = array.shape[1], _last(array.shape[3], names)
                if array.ndim == 3:
                    dims[2] = _last(array.shape[2], names)
            dtype = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            values.append(ir.Value(name=name, type=dtype, shape=ir.Shape(dims)))
        outs = [
            ir.Value(name=f"out{i}", type=ir.TensorType(ir.DataType.FLOAT))
            for i in range(self.outputs)
        ]
        node = ir.Node(
            self.domain,
            self.op,
            values,
            ir.convenience.convert_attributes(self.attributes),
            outputs=outs,
            name="attn",
        )
        graph = ir.Graph(
            [v for v in values if v is not None],
            outs,
            nodes=[node],
            opset_imports={"": self.opset, "com.microsoft": 1},
            name="g",
        )
        return ir.Model(graph, ir_version=10), feeds


def _last(size: int, names: dict[int, str]) -> int | str:
    return names[size] if size in (P + S, 7) else size


def run(model: ir.Model, feeds: dict[str, np.ndarray], reference: bool) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    if reference:
        from onnx.reference import ReferenceEvaluator

        return list(ReferenceEvaluator(proto).run(None, feeds))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {k: feeds[k] for k in (i.name for i in session.get_inputs())}))


def bound_arrays(
    context: Context, site: Site, feeds: dict[str, np.ndarray]
) -> dict[ir.Value, np.ndarray]:
    """Every operand's content, by running the graph up to it."""
    wanted = list(dict.fromkeys(value for _, value in site.operands.values()))
    inner = [v for v in wanted if v.name not in feeds]
    found = {v: feeds[v.name] for v in wanted if v.name in feeds}
    if inner:
        graph = context.model.graph
        graph.outputs[:] = inner
        graph.remove([site.anchor])
        for value in inner:
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        found |= dict(zip(inner, run(context.model, feeds, reference=False), strict=True))
    return found


def oracle_inputs(site: Site, arrays: dict[ir.Value, np.ndarray]) -> OracleInputs:
    operands = site.operands
    parts: dict[str, Any] = {}
    for name in ("query", "key", "value", "past_key", "past_value"):
        heads = getattr(operands, name)
        if heads is not None:
            parts[name] = heads_of(arrays[heads.value], heads)
    for name in (
        "keep", "bias", "key_padding", "kv_lengths", "prefix_lengths", "document_ids", "sinks",
        "q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias",
    ):  # fmt: skip
        value = getattr(operands, name)
        if value is not None:
            parts[name] = arrays[value]
    if operands.rotary is not None:
        tables = operands.rotary
        parts["rotary"] = RotaryInputs(
            cos=arrays[tables.cos],
            sin=arrays[tables.sin],
            position_ids=None if tables.position_ids is None else arrays[tables.position_ids],
        )
    return OracleInputs(**parts)


def read(case: Case) -> tuple[Site | Rejection, Context, dict[str, np.ndarray], ir.Model]:
    model, feeds = case.model()
    context = Context(model.clone())
    node = next(n for n in context.model.graph if is_fused(n))
    return read_fused(node, context=context), context, feeds, model


def check(case: Case, *, reference: bool = False, tolerance: float = 2e-5) -> Site:
    verdict, context, feeds, model = read(case)
    assert isinstance(verdict, Site), verdict.reason.message
    actual = run(model, feeds, reference)
    exact = attention(verdict.spec, oracle_inputs(verdict, bound_arrays(context, verdict, feeds)))
    got = heads_of(actual[0], verdict.output)
    np.testing.assert_allclose(got, exact.output, rtol=tolerance, atol=tolerance)
    if verdict.present_key is not None:
        name = verdict.present_key.value.name
        index = [o.name for o in model.graph.outputs].index(name)
        np.testing.assert_allclose(actual[index], exact.present_key, rtol=1e-5, atol=1e-5)
    if verdict.qk_output is not None:
        kind = verdict.spec.qk_output
        assert kind is not None
        np.testing.assert_allclose(actual[-1], exact.scores(kind), rtol=1e-4, atol=1e-4)
    for name, value in case.wants.items():
        holder = verdict.spec.mask if hasattr(verdict.spec.mask, name) else verdict.spec
        assert getattr(holder, name) == value, name
    return verdict


q3, k3, v3 = rand(B, S, H * D, seed=1), rand(B, T, H * D, seed=2), rand(B, T, H * E, seed=3)
k7, v7 = rand(B, 7, H * D, seed=4), rand(B, 7, H * E, seed=5)
q4, kv4 = rand(B, H, S, D, seed=6), rand(B, K, T, D, seed=7)
v4 = rand(B, K, T, E + 3, seed=8)
past4 = rand(B, K, P, D, seed=9)
past_v4 = rand(B, K, P, E + 3, seed=10)
past_h = rand(B, H, P, D, seed=11)
keep = np.random.default_rng(3).random((B, 1, S, T)) > 0.3
keep[1, 0, 2] = False
bias = rand(B, H, S, T, seed=12)
holes = np.array([[1, 0, 1, 1, 1], [0, 0, 1, 0, 1]], np.int32)


def onnx(name: str, inputs: list[np.ndarray | None], **kwargs: Any) -> Case:
    kwargs.setdefault("opset", 24)
    return Case(name, "Attention", inputs, domain="", **kwargs)


H3 = {"q_num_heads": H, "kv_num_heads": H}
ONNX = [
    onnx("3d", [q3, k3, v3], attributes=H3),
    onnx("4d-gqa", [q4, kv4, v4], wants={"q_heads": H, "kv_heads": K, "v_head_dim": E + 3}),
    onnx("scale", [q4, kv4, v4], attributes={"scale": 0.3}, wants={"scale": 0.3}),
    onnx(
        "causal-is-top-left-without-past",
        [q3, k7, v7],
        attributes={**H3, "is_causal": 1},
        wants={"causal": CausalAlignment.TOP_LEFT},
    ),
    onnx(
        "causal-past",
        [q4, kv4, v4, None, past4, past_v4],
        attributes={"is_causal": 1},
        outputs=3,
        wants={"causal": CausalAlignment.BOTTOM_RIGHT},
    ),
    onnx("past", [q4, kv4, v4, None, past4, past_v4], outputs=3),
    onnx("bool-mask", [q4, kv4, v4, keep], wants={"empty_row": EmptyRow.ZERO}),
    onnx("bool-mask-short", [q4, kv4, v4, keep[..., :3]], attributes={}, static=True),
    onnx("float-mask", [q4, kv4, v4, bias]),
    onnx("float-mask-2d", [q4, kv4, v4, bias[0, 0]]),
    onnx("float-mask-and-causal", [q4, kv4, v4, bias], attributes={"is_causal": 1}),
    onnx("bool-mask-and-causal", [q4, kv4, v4, keep], attributes={"is_causal": 1}),
    onnx(
        "softcap-before-mask",
        [6 * q4, kv4, v4, keep],
        attributes={"softcap": 2.0},
        wants={"softcap": 2.0},
    ),
    onnx("lengths", [q4, kv4, v4, None, None, None, np.array([5, 3], np.int64)]),
    onnx(
        "lengths-causal",
        [q4[:, :, :2], kv4, v4, None, None, None, np.array([5, 3], np.int64)],
        attributes={"is_causal": 1},
        static=True,
        wants={"causal": CausalAlignment.BOTTOM_RIGHT, "lengths": True},
    ),
]
SCORES = [
    onnx(
        f"scores-{mode}",
        [q4, kv4, v4, bias],
        attributes={"qk_matmul_output_mode": mode, "softcap": 3.0},
        outputs=4,
        wants={"qk_output": kind},
    )
    for mode, kind in enumerate(
        (QkOutput.RAW, QkOutput.CAPPED, QkOutput.MASKED, QkOutput.PROBABILITIES)
    )
]


@pytest.mark.parametrize("case", [*ONNX, *SCORES[1:]], ids=repr)
def test_onnx_attention_is_what_the_reference_computes(case: Case) -> None:
    check(case, reference=True)


def test_raw_scores_come_before_the_softcap() -> None:
    """As the operator's text has it; onnx's reference gives the capped ones."""
    check(SCORES[0])


MHA = {"num_heads": H}


def mha(name: str, inputs: list[np.ndarray | None], **kwargs: Any) -> Case:
    kwargs["attributes"] = {**MHA, **kwargs.get("attributes", {})}
    return Case(name, "MultiHeadAttention", inputs, **kwargs)


qkv_bias = rand(3 * H * D, seed=20)
MULTI = [
    mha("plain", [q3, k3, v3]),
    mha("cross", [q3, k7, v7], wants={"cross": True}),
    mha("scale", [q3, k3, v3], attributes={"scale": 0.2}, wants={"scale": 0.2}),
    mha("projection-bias", [q3, k3, v3, qkv_bias]),
    mha("padding", [q3, k3, v3, None, holes], wants={"padding": True, "fill": -10000.0}),
    mha("lengths", [q3, k3, v3, None, np.array([5, 2], np.int32)], wants={"lengths": True}),
    mha("mask-3d", [q3, k3, v3, None, np.tile(holes[:, None], (1, S, 1))]),
    mha("bias", [q3, k3, v3, None, None, bias]),
    mha("bias-broadcast", [q3, k3, v3, None, None, bias[:1, :1]]),
    mha("bias-and-padding", [q3, k3, v3, None, holes, bias]),
    mha(
        "causal",
        [q3, k3, v3],
        attributes={"unidirectional": 1},
        wants={"causal": CausalAlignment.TOP_LEFT},
    ),
    mha(
        "causal-and-padding",
        [q3, k3, v3, None, holes],
        attributes={"unidirectional": 1, "mask_filter_value": -100.0},
    ),
    mha(
        "filter",
        [q3, k3, v3, None, holes],
        attributes={"mask_filter_value": -5.0},
        wants={"fill": -5.0},
    ),
    mha("past", [q3, k3, v3, None, None, None, past_h, past_h], outputs=3),
    mha(
        "past-causal",
        [q3, k3, v3, None, None, None, past_h, past_h],
        attributes={"unidirectional": 1},
        outputs=3,
        wants={"causal": CausalAlignment.BOTTOM_RIGHT},
    ),
    mha("cross-4d", [q3, rand(B, H, 7, D, seed=23), rand(B, H, 7, D, seed=24)]),
]


@pytest.mark.parametrize("case", MULTI, ids=repr)
def test_multi_head_attention_is_what_onnx_runtime_computes(case: Case) -> None:
    check(case)


def gqa(name: str, inputs: list[np.ndarray | None], **kwargs: Any) -> Case:
    attributes = {"num_heads": H, "kv_num_heads": K, **kwargs.pop("attributes", {})}
    kwargs.setdefault("outputs", 3)
    return Case(name, "GroupQueryAttention", inputs, attributes, **kwargs)


def steps(queries: int, past: int, batch: int = B) -> list[np.ndarray | None]:
    """Query, key, value, past, lengths and total of a grown cache."""
    total = past + queries
    return [
        rand(batch, queries, H * GD, seed=30),
        rand(batch, queries, K * GD, seed=31),
        rand(batch, queries, K * GD, seed=32),
        rand(batch, K, past, GD, seed=33) if past else None,
        rand(batch, K, past, GD, seed=34) if past else None,
        np.full(batch, total - 1, np.int32),
        np.asarray(total, np.int32),
    ]


GD = 32
angle = np.arange(32)[:, None] * 0.5 ** np.arange(GD // 2)[None]
caches: list[np.ndarray | None] = [np.cos(angle).astype("f"), np.sin(angle).astype("f")]
no_cache: list[np.ndarray | None] = [None, None]
BR, TL = CausalAlignment.BOTTOM_RIGHT, CausalAlignment.TOP_LEFT
GROUPED = [
    gqa("decode", steps(1, 6), wants={"causal": BR, "kv_heads": K}),
    gqa("chunk", steps(4, 6, batch=1), wants={"causal": BR}, static=True),
    gqa("prompt", steps(5, 0), wants={"causal": TL}, outputs=1),
    gqa("window", steps(4, 6, 1), attributes={"local_window_size": 3}, wants={"left_window": 2}),
    gqa("window-of-one", steps(4, 6, 1), attributes={"local_window_size": 1}),
    gqa("bidirectional", steps(1, 6), attributes={"causal": 0}, wants={"causal": None}),
    gqa("softcap", steps(4, 6, 1), attributes={"softcap": 0.7}, wants={"softcap": 0.7}),
    gqa("scale", steps(1, 6), attributes={"scale": 0.4}, wants={"scale": 0.4}),
    gqa("smooth", steps(4, 6, 1), attributes={"smooth_softmax": 1}, wants={"sinks": True}),
    gqa("sinks", [*steps(1, 6), *no_cache, None, None, rand(H, seed=35)], wants={"sinks": True}),
    gqa("bias", [*steps(4, 6, 1), *no_cache, None, rand(1, H, 4, 10, seed=36)]),
    gqa(
        "bias-after-softcap",
        [*steps(4, 6, 1), *no_cache, None, rand(1, H, 4, 10, seed=36)],
        attributes={"softcap": 0.7},
    ),
    gqa("rotary", [*steps(4, 6, 1), *caches], attributes={"do_rotary": 1}),
    gqa("rotary-decode", [*steps(1, 6), *caches], attributes={"do_rotary": 1}),
    gqa("rotary-prompt", [*steps(5, 0), *caches], attributes={"do_rotary": 1}, outputs=1),
    gqa(
        "rotary-interleaved",
        [*steps(4, 6, 1), *caches],
        attributes={"do_rotary": 1, "rotary_interleaved": 1},
    ),
    gqa(
        "packed",
        [np.concatenate(steps(1, 6)[:3], -1), None, None, *steps(1, 6)[3:]],  # type: ignore
    ),
]


@pytest.mark.parametrize("case", GROUPED, ids=repr)
def test_group_query_attention_is_what_onnx_runtime_computes(case: Case) -> None:
    check(case)


def packed(name: str, inputs: list[np.ndarray | None], **kwargs: Any) -> Case:
    kwargs["attributes"] = {**MHA, **kwargs.get("attributes", {})}
    return Case(name, "Attention", inputs, **kwargs)


x3, w3 = rand(B, S, 20, seed=40), rand(20, 3 * H * D, seed=41)
PACKED = [
    packed("plain", [x3, w3, qkv_bias]),
    packed("padding", [x3, w3, qkv_bias, holes], wants={"padding": True}),
    packed("lengths", [x3, w3, qkv_bias, np.array([5, 2], np.int32)], wants={"lengths": True}),
    packed("causal", [x3, w3, qkv_bias], attributes={"unidirectional": 1}, wants={"causal": TL}),
    packed("bias", [x3, w3, qkv_bias, None, None, bias]),
    packed(
        "value-width",
        [x3, rand(20, 2 * H * D + H * 5, seed=42), rand(2 * H * D + H * 5, seed=43)],
        attributes={"qkv_hidden_sizes": [H * D, H * D, H * 5]},
        wants={"v_head_dim": 5},
    ),
    packed(
        "past",
        [x3, w3, qkv_bias, None, rand(2, B, H, P, D, seed=44)],
        attributes={"unidirectional": 1},
        outputs=2,
        wants={"causal": BR},
    ),
]


@pytest.mark.parametrize("case", PACKED, ids=repr)
def test_packed_attention_is_what_onnx_runtime_computes(case: Case) -> None:
    check(case)


def test_packed_projections_are_the_separate_ones_stacked() -> None:
    """The CPU kernel takes no packed input: the operands themselves are compared."""
    qkv = rand(B, S, H, 3, D, seed=21)
    site, context, feeds, _ = read(mha("packed-qkv", [qkv]))
    assert isinstance(site, Site)
    arrays = bound_arrays(context, site, feeds)
    for index, heads in enumerate((site.operands.query, site.operands.key, site.operands.value)):
        assert np.array_equal(
            heads_of(arrays[heads.value], heads), qkv[:, :, :, index].swapaxes(1, 2)
        )


REFUSED = [
    (onnx("past-without-value", [q4, kv4, v4, None, past4]), "past-incomplete"),
    (mha("no-key", [q3]), "input-missing"),
    (mha("mask-index", [q3, k3, v3, None, np.arange(3 * B + 2, dtype=np.int32)]), "mask-index"),
    (
        mha(
            "lengths-and-causal",
            [q3, k3, v3, None, np.array([5, 2], np.int32)],
            attributes={"unidirectional": 1},
        ),
        "lengths-and-causal",
    ),
    (mha("scores", [q3, k3, v3], outputs=4), "qk-output"),
    (gqa("window-unmasked", steps(1, 6), attributes={"causal": 0, "local_window_size": 3}),
     "window-without-causal"),
    (gqa("ragged-queries", [*steps(4, 6, 1), *[None] * 9, np.array([4], np.int32)]),
     "unread-input"),
    (gqa("no-tables", steps(1, 6), attributes={"do_rotary": 1}), "input-missing"),
    (gqa("two-sinks", [*steps(1, 6), *[None] * 4, rand(H, seed=35)],
         attributes={"smooth_softmax": 1}), "two-sinks"),
    (packed("rotary-inside", [x3, w3, qkv_bias], attributes={"do_rotary": 1}), "unread-attribute"),
    (Case("packed-tokens", "PackedMultiHeadAttention", [rand(7, H * D)], MHA), "ragged-batch"),
    (Case("decoder", "DecoderMaskedMultiHeadAttention", [q3, k3, v3], MHA), "beam-buffers"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "code"), REFUSED, ids=[repr(case) for case, _ in REFUSED])
def test_what_cannot_be_stated_is_refused(case: Case, code: str) -> None:
    verdict, *_ = read(case)
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == code
    assert verdict.reason.nodes == ("attn",)
    assert verdict.fused_as == case.op


def test_every_file_reads_one_op() -> None:
    assert readers().keys() == {(reader.domain, reader.op_type) for reader in readers().values()}
    assert {op for _, op in readers()} >= {
        "Attention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "PackedMultiHeadAttention",
    }


def test_reading_leaves_what_it_read_as_it_was() -> None:
    """Only derived nodes are added, and none of them feeds what was there."""
    model, _ = mha("projection-bias", [q3, k3, v3, qkv_bias]).model()
    before = [(n.name, [v.name for v in n.inputs if v]) for n in model.graph]
    context = Context(model)
    read_fused(next(n for n in model.graph if is_fused(n)), context=context)
    after = [(n.name, [v.name for v in n.inputs if v]) for n in model.graph]
    assert [one for one in after if not str(one[0]).startswith("derived.")] == before
    again = len(after)
    read_fused(next(n for n in model.graph if is_fused(n)), context=context)
    assert len(list(model.graph)) == again, "equal requests share one node"
