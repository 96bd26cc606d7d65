"""Which lengths a model is judged at, by what its attentions are."""

from __future__ import annotations

import pytest

from mha_export.forms import FormParams, build_model, form_named
from mha_export.jobs._reach import every_row_has_keys, widest
from mha_export.measure.model_inputs import model_cases
from mha_export.recognise import recognise
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT


@pytest.mark.parametrize(
    ("mask", "reach", "has_keys"),
    [
        pytest.param(MaskSpec(), 0, True, id="none"),
        pytest.param(MaskSpec(causal=TOP_LEFT), 0, True, id="top-left"),
        pytest.param(MaskSpec(causal=BOTTOM_RIGHT), 0, False, id="bottom-right"),
        pytest.param(MaskSpec(causal=TOP_LEFT, left_window=60), 64, False, id="window"),
        pytest.param(MaskSpec(left_window=3, right_window=9), 13, False, id="two-sided"),
    ],
)
def test_masks_say_which_lengths_show_them(mask: MaskSpec, reach: int, has_keys: bool) -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4, mask=mask)
    model = build_model(form_named("primitive"), spec, FormParams(opset=17))
    recognition = recognise(model)
    assert len(recognition.sites) == 1
    assert (widest(recognition), every_row_has_keys(recognition)) == (reach, has_keys)
    cases = {
        case.name: case.dims for case in model_cases(model, reach=reach, many_queries=has_keys)
    }
    many = cases.get("more queries than keys")
    assert (many is not None) == has_keys
    assert many is None or many["q_len"] > many["kv_len"]
    assert ("beyond the windows" in cases) == (reach > 37)


def test_one_length_has_no_more_queries_than_keys() -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4, q_len="s", kv_len="s")
    model = build_model(form_named("primitive"), spec, FormParams(opset=17))
    assert "more queries than keys" not in {
        case.name for case in model_cases(model, many_queries=True)
    }
