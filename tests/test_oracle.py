"""The oracle against torch, and each term of the equation on numbers by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from oracle_specs import BOTTOM_RIGHT, TOP_LEFT, draw, make_spec
from strategies import attention_specs

from mha_export.cases import cases
from mha_export.errors import InputError
from mha_export.oracle import LayerWeights, OracleInputs, RotaryInputs, SideInputs, attention, layer
from mha_export.spec import (
    AttentionSpec,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    QkOutput,
    RotarySpec,
)

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("masking", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("v_head_dim", [None, 5])
def test_it_is_torch_scaled_dot_product_attention(
    kv_heads: int, scale: float | None, masking: str, v_head_dim: int | None
) -> None:
    torch = pytest.importorskip("torch")
    shapes = {"bool": {"keep": ("batch", 1, 5, 7)}, "float": {"bias": (4, 5, 7)}}
    mask = MaskSpec(
        causal=TOP_LEFT if masking == "causal" else None,
        empty_row=EmptyRow.ZERO,
        **shapes.get(masking, {}),
    )
    spec = make_spec(kv_heads=kv_heads, scale=scale, v_head_dim=v_head_dim, mask=mask)
    keep = RNG.random((2, 1, 5, 7)) < 0.6
    keep[..., 0] = True
    bias = RNG.normal(size=(4, 5, 7))
    inputs = draw(spec, 2, 5, 7)
    inputs = inputs.replace(
        keep=keep if masking == "bool" else None, bias=bias if masking == "float" else None
    )
    torch_mask = {"bool": keep, "float": bias}.get(masking)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x) for x in (inputs.query, inputs.key, inputs.value)),
        attn_mask=None if torch_mask is None else torch.from_numpy(torch_mask),
        is_causal=masking == "causal",
        scale=scale,
        enable_gqa=True,
    )
    np.testing.assert_allclose(attention(spec, inputs).output, expected.numpy(), atol=1e-13)


def test_it_is_torch_multi_head_attention() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, bias=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lost = torch.tensor([[False] * 5, [False, True, False, True, True]])
    with torch.no_grad():
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
        expected, weights = module(x, x, x, key_padding_mask=lost, average_attn_weights=False)
        weights_of_layer = LayerWeights(
            w_qkv=module.in_proj_weight.numpy().T,
            b_qkv=module.in_proj_bias.numpy(),
            w_o=module.out_proj.weight.numpy().T,
            b_o=module.out_proj.bias.numpy(),
        )
    spec = AttentionSpec(
        q_heads=4,
        kv_heads=4,
        head_dim=4,
        mask=MaskSpec(padding=True, empty_row=EmptyRow.NAN),
        projections=ProjectionSpec(
            d_model=16, packing="packed", q_bias=True, k_bias=True, v_bias=True, output_bias=True
        ),
    )
    side = SideInputs(key_padding=~lost.numpy())
    found, result = layer(spec, weights_of_layer, x.numpy(), side=side)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-12)
    np.testing.assert_allclose(result.probabilities, weights.numpy(), atol=1e-12)


def test_softcap_comes_before_the_mask() -> None:
    spec = make_spec(
        softcap=2.0, scale=6.0, mask=MaskSpec(keep=("k",), bias=("k",), empty_row=EmptyRow.ZERO)
    )
    keep = np.array([True, False, True])
    value = np.where(keep[:, None], RNG.normal(size=(1, 2, 3, 6)), 1e30)
    inputs = draw(spec, 1, 2, 3, keep=keep, bias=np.array([0.0, 9.0, 3.0])).replace(value=value)
    result = attention(spec, inputs)
    raw, capped = result.scores(QkOutput.RAW), result.scores(QkOutput.CAPPED)
    np.testing.assert_allclose(capped, 2 * np.tanh(raw / 2))
    np.testing.assert_allclose(result.scores(QkOutput.MASKED)[..., 2], capped[..., 2] + 3.0)
    assert np.abs(result.output).max() < 10


def test_a_sink_is_one_more_key_without_a_value() -> None:
    spec = make_spec(sinks=True)
    sinks = np.array([0.0, 1.0, -1.0, 80.0])
    inputs = draw(spec, 1, 2, 3, sinks=sinks)
    result = attention(spec, inputs)
    scores = np.concatenate(
        [result.scores(QkOutput.RAW), np.broadcast_to(sinks[None, :, None, None], (1, 4, 2, 1))],
        axis=-1,
    )
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(result.scores(QkOutput.PROBABILITIES), expected[..., :3])


def test_a_sink_takes_all_of_a_row_without_keys() -> None:
    mask = MaskSpec(keep=("k",), empty_row=EmptyRow.FINITE)
    spec = make_spec(sinks=True, mask=mask)
    result = attention(spec, draw(spec, 1, 1, 2, sinks=np.zeros(4), keep=np.zeros(2, bool)))
    assert not result.output.any()


def test_heads_interleave_and_do_not_tile() -> None:
    spec = make_spec()
    inputs = draw(spec, 1, 3, 3)
    wide = make_spec(kv_heads=4)
    assert inputs.value is not None
    repeated = inputs.replace(key=inputs.key.repeat(2, 1), value=inputs.value.repeat(2, 1))
    np.testing.assert_allclose(
        attention(spec, inputs).output, attention(wide, repeated).output, atol=1e-15
    )


@pytest.mark.parametrize("over", ["head", "hidden"])
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_qk_norm_is_that_of_torch(kind: str, over: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    bias = kind == "layer"
    spec = make_spec(qk_norm=QkNormSpec(kind=kind, over=over, epsilon=1e-3, bias=bias))  # type: ignore[arg-type]
    width = {"head": (6, 6), "hidden": (24, 12)}[over]
    weights = {f"{x}_norm_weight": RNG.normal(size=w) for x, w in zip("qk", width, strict=True)}
    if bias:
        weights |= {f"{x}_norm_bias": RNG.normal(size=w) for x, w in zip("qk", width, strict=True)}
    inputs = draw(spec, 2, 3, 3)
    found = attention(spec, inputs.replace(**weights)).present_key
    flat = inputs.key.swapaxes(1, 2)
    flat = torch.from_numpy(flat.reshape(2, 3, 12) if over == "hidden" else flat)
    weight = torch.from_numpy(weights["k_norm_weight"])
    if kind == "rms":
        normed = functional.rms_norm(flat, flat.shape[-1:], weight, 1e-3)
    elif kind == "layer":
        b = torch.from_numpy(weights["k_norm_bias"])
        normed = functional.layer_norm(flat, flat.shape[-1:], weight, b, 1e-3)
    else:
        normed = functional.normalize(flat, dim=-1, eps=1e-3) * weight
    expected = normed.numpy().reshape(2, 3, 2, 6).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_shared_keys_are_not_normalised_again() -> None:
    spec = make_spec(qk_norm=QkNormSpec(kind="l2", weight=False, key=False))
    inputs = draw(spec, 1, 2, 2)
    result = attention(spec, inputs)
    np.testing.assert_array_equal(result.present_key, inputs.key)
    assert not np.allclose(result.output, attention(spec.replace(qk_norm=None), inputs).output)


def test_the_value_may_be_a_prefix_of_the_key() -> None:
    spec = make_spec(value_source="key_prefix", v_head_dim=4, rotary=RotarySpec(dim=6, theta=9.0))
    inputs = draw(spec, 1, 3, 3)
    result = attention(spec, inputs)
    assert result.present_value is None
    plain = make_spec(v_head_dim=4, rotary=RotarySpec(dim=6, theta=9.0))
    same = attention(plain, inputs.replace(value=result.present_key[..., :4]))
    np.testing.assert_array_equal(result.output, same.output)


def test_the_mean_of_heads() -> None:
    inputs = draw(make_spec(), 2, 3, 3)
    apart = attention(make_spec(), inputs).output
    together = attention(make_spec(combine="mean"), inputs).output
    np.testing.assert_allclose(together, apart.mean(1))


def test_poison_behind_the_mask_stays_there() -> None:
    for fill in ("-inf", "min", -1e9):
        spec = make_spec(mask=MaskSpec(padding=True, fill=fill, empty_row=EmptyRow.ZERO))
        padding = np.array([[1, 0, 1]])
        inputs = draw(spec, 1, 2, 3, key_padding=padding)
        clean = attention(spec, inputs).output
        assert inputs.value is not None
        value = inputs.value.copy()
        value[:, :, 1] = 1e30
        np.testing.assert_array_equal(attention(spec, inputs.replace(value=value)).output, clean)


def test_huge_scores_do_not_overflow() -> None:
    spec = make_spec(scale=1e6)
    result = attention(spec, draw(spec, 1, 3, 5))
    assert result.probabilities is not None
    np.testing.assert_allclose(result.probabilities.sum(-1), 1.0)


def test_without_scores_the_output_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_export.oracle._attention._BLOCK_ELEMENTS", 40)
    mask = MaskSpec(
        causal=BOTTOM_RIGHT,
        keep=("b", 1, "q", "k"),
        bias=("q", "k"),
        empty_row=EmptyRow.ZERO,
        documents=True,
    )
    spec = make_spec(mask=mask, sinks=True)
    inputs = draw(
        spec,
        2,
        5,
        7,
        keep=RNG.random((2, 1, 5, 7)) < 0.5,
        bias=RNG.normal(size=(5, 7)),
        sinks=np.ones(4),
        document_ids=np.array([[0, 0, 0, 0, 1, 1, 1]] * 2),
    )
    whole, blocks = attention(spec, inputs), attention(spec, inputs, scores=False)
    np.testing.assert_allclose(blocks.output, whole.output, atol=1e-15)
    np.testing.assert_array_equal(blocks.empty_rows, whole.empty_rows)
    assert blocks.raw is blocks.probabilities is blocks.hidden is None
    with pytest.raises(InputError, match="scores=True"):
        blocks.scores(QkOutput.RAW)


def test_sixty_five_thousand_keys() -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=4)
    inputs = draw(spec, 1, 2, 65_536)
    ones = inputs.replace(value=np.ones((1, 1, 65_536, 4)))
    np.testing.assert_allclose(attention(spec, ones, scores=False).output, 1.0)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(attention_specs())
def test_probabilities_are_probabilities(spec: AttentionSpec) -> None:
    for case in cases(spec, battery="ordinary"):
        result = attention(spec, case.inputs)
        sums = result.scores(QkOutput.PROBABILITIES).sum(-1)[~result.empty_rows]
        assert (sums <= 1 + 1e-12).all()
        if not spec.sinks:
            np.testing.assert_allclose(sums, 1.0)
        lean = attention(spec, case.inputs, scores=False)
        np.testing.assert_allclose(lean.output, result.output, atol=1e-12)


def test_names_of_arrays_are_those_of_operands() -> None:
    import onnx_ir as ir

    from mha_export.operands import Heads, Layout, Operands, RotaryTables

    def value(name: str) -> ir.Value:
        return ir.Value(name=name)

    def heads(name: str) -> Heads:
        return Heads(value=value(name), layout=Layout.BHSD, heads=1, dim=1)

    side = {f.name for f in dataclasses.fields(SideInputs)}
    tables = {f.name for f in dataclasses.fields(RotaryInputs)}
    assert side <= {f.name for f in dataclasses.fields(Operands)}
    assert tables <= {f.name for f in dataclasses.fields(RotaryTables)}
    operands = Operands(
        query=heads("q"),
        key=heads("k"),
        value=heads("v"),
        sinks=value("s"),
        rotary=RotaryTables(cos=value("cos"), sin=value("sin")),
    )
    arrays = OracleInputs(
        query=np.zeros(1),
        key=np.zeros(1),
        value=np.zeros(1),
        sinks=np.zeros(1),
        rotary=RotaryInputs(cos=np.zeros(1), sin=np.zeros(1)),
    )
    assert {n for n, _ in arrays.named()} == {n for n, _ in operands.values()}


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32, DType.FP64])
def test_the_minimum_of_each_dtype(dtype: DType) -> None:
    from mha_export.bounds import numpy_dtype
    from mha_export.oracle._mask import MINIMUM

    assert MINIMUM[dtype] == float(ml_dtypes.finfo(numpy_dtype(dtype)).min)


def test_queries_in_blocks_are_the_same_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha_export.oracle import _attention

    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=3)
    inputs = OracleInputs(
        query=RNG.normal(size=(1, 2, 7, 3)),
        key=RNG.normal(size=(1, 1, 5, 3)),
        value=RNG.normal(size=(1, 1, 5, 3)),
    )
    whole = attention(spec, inputs)
    monkeypatch.setattr(_attention, "_BLOCK_ELEMENTS", 20)
    np.testing.assert_allclose(attention(spec, inputs, scores=False).output, whole.output)
    kept = attention(spec, inputs)
    assert kept.raw is not None
    assert kept.raw.shape == (1, 2, 7, 5)


@pytest.mark.parametrize("queries", [2, 3])
@pytest.mark.parametrize("part", ["keep", "bias"])
def test_masks_by_query_are_cut_with_the_queries(
    monkeypatch: pytest.MonkeyPatch, part: str, queries: int
) -> None:
    from mha_export.oracle import _attention

    shapes: dict[str, Any] = {part: ("s", "t"), "empty_row": EmptyRow.ZERO}
    spec = make_spec(mask=MaskSpec(**shapes))
    mask = np.tril(np.ones((queries, 4), np.bool_), 1)
    operand = {part: mask if part == "keep" else np.where(mask, 0.5, -np.inf)}
    inputs = draw(spec, 1, queries, 4, **operand)
    whole = attention(spec, inputs)
    monkeypatch.setattr(_attention, "_BLOCK_ELEMENTS", 1)
    found = attention(spec, inputs, scores=False)
    np.testing.assert_allclose(found.output, whole.output)
    assert found.empty_rows.tolist() == whole.empty_rows.tolist()


def test_operands_are_named_and_mapped() -> None:
    tables = RotaryInputs(cos=np.ones((1, 2, 1)), sin=np.zeros((1, 2, 1)))
    side = SideInputs(sinks=np.ones(2), rotary=tables)
    assert [name for name, _ in side.named()] == ["sinks", "rotary.cos", "rotary.sin"]
    doubled = dict(side.map_arrays(lambda array: array + 1).named())
    assert doubled["sinks"].tolist() == [2.0, 2.0]
    assert doubled["rotary.cos"].max() == 2.0
    assert doubled["rotary.sin"].max() == 1.0
