"""Inputs of the layers this package builds: their masks, biases, lengths and buffers by name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mha_export.forms import FormParams, build_model, form_named
from mha_export.measure import ModelCase, model_cases
from mha_export.measure._input_roles import input_roles
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, EmptyRow, MaskSpec


def graph(**stated: object) -> ir.Model:
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4, **stated)  # type: ignore[arg-type]
    return build_model(form_named("primitive"), spec, FormParams(opset=18))


def named(model: ir.Model) -> dict[str, ModelCase]:
    return {case.name: case for case in model_cases(model)}


def test_padding_and_keep_are_masks_and_a_bias_is_one_that_has_numbers() -> None:
    mask = MaskSpec(
        padding=True,
        keep=("batch", 1, "q_len", "kv_len"),
        bias=("batch", 2, "q_len", "kv_len"),
        empty_row=EmptyRow.ZERO,
    )
    roles = {role.name: role.role for role in input_roles(graph(mask=mask))}
    assert roles["key_padding"] == roles["keep"] == "mask"
    assert roles["bias"] == "bias"


def test_keys_have_a_length_of_their_own() -> None:
    case = named(graph())["ordinary"]
    assert case.dims["kv_len"] != case.dims["q_len"]


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT), id="bottom-right"),
        pytest.param(MaskSpec(causal=CausalAlignment.TOP_LEFT, left_window=2), id="window"),
        pytest.param(MaskSpec(left_window=1, right_window=1), id="two-sided"),
    ],
)
def test_no_case_asks_for_rows_of_which_the_spec_says_nothing(mask: MaskSpec) -> None:
    """More queries than keys leave rows without a key, by positions alone: NaN here, 0 there."""
    model = graph(mask=mask)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    cases = model_cases(model)
    assert {"longer", "one token"} <= {case.name for case in cases}
    for case in cases:
        (output,) = session.run(None, dict(case.inputs))
        assert np.isfinite(output).all(), case.name


def test_the_keys_of_a_cached_layer_are_past_and_new_ones() -> None:
    mask = MaskSpec(padding=True, empty_row=EmptyRow.ZERO)
    case = named(graph(cache=CacheSpec(), mask=mask))["past"]
    assert case.dims["kv_len"] == case.dims["past_len"] + case.dims["q_len"]


def test_each_query_misses_other_keys() -> None:
    mask = MaskSpec(keep=("batch", 1, "q_len", "kv_len"), empty_row=EmptyRow.ZERO)
    keep = named(graph(mask=mask))["holes"].inputs["keep"]
    assert len({row.tobytes() for row in keep[0, 0]}) > 1


def test_a_hidden_row_of_a_bias_is_the_minimum_and_a_hole_is_not() -> None:
    cases = named(graph(mask=MaskSpec(bias=("batch", 2, "q_len", "kv_len"))))
    low = np.finfo(np.float32).min
    assert (cases["empty row"].inputs["bias"][0] == low).all()
    holes = cases["holes"].inputs["bias"]
    assert holes.min() == -1e4
    assert len(np.unique(holes)) > 10, "what is not hidden keeps its numbers"


def test_lengths_come_uneven() -> None:
    mask = MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)
    lengths = named(graph(mask=mask, q_len="seq", kv_len="seq"))["uneven lengths"]
    assert len(set(lengths.inputs["kv_lengths"])) == 2


def test_prefixes_are_of_several_lengths_and_not_everything() -> None:
    lengths = named(graph(mask=MaskSpec(prefix=True, causal=CausalAlignment.BOTTOM_RIGHT)))[
        "ordinary"
    ]
    assert list(lengths.inputs["prefix_lengths"]) == [1, 3]


def test_a_buffer_is_empty_where_nothing_was_written() -> None:
    cases = named(graph(cache=CacheSpec(growth="static", max_length=11)))
    case = cases["uneven lengths"]
    counts, past = case.inputs["kv_lengths"], case.inputs["past_key"]
    assert list(counts) == [11, 10]
    for row, count in enumerate(counts):
        written = count - case.dims["q_len"]
        assert past[row, :, :written].all()
        assert not past[row, :, written:].any()
    assert not cases["ordinary"].inputs["past_key"].any(), "nothing but new tokens"


def test_small_values_show_an_epsilon() -> None:
    case = named(graph())["small values"]
    assert np.abs(case.inputs["query"]).max() < 0.05


def test_a_length_of_nothing_is_a_case_where_no_buffer_holds_the_new_tokens() -> None:
    mask = MaskSpec(lengths=True, empty_row=EmptyRow.ZERO)
    without = named(graph(mask=mask, q_len="seq", kv_len="seq"))["no tokens"]
    assert list(without.inputs["kv_lengths"]) == [0, 7]
    buffered = named(graph(cache=CacheSpec(growth="static", max_length=11)))["no tokens"]
    assert list(buffered.inputs["kv_lengths"]) == [7, 7]


def test_extreme_values_outbid_a_fill_of_ten_thousand() -> None:
    inputs = named(graph())["extreme values"].inputs
    scores = np.einsum("bsd,btd->bst", inputs["query"][..., :4], inputs["key"][..., :4]) / 2
    assert scores.max() > 1e4
