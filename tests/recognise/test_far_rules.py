"""What small sizes do not show: windows, blocks and factors that only begin far from the start.

Each is small enough to hide nothing, or to be one, at the sizes that recognition looks at first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from spellings import BATCH, FLOAT, QUERIES, Sketch

from mha_export.forms import FormParams, build_model, form_named
from mha_export.recognise import Site, recognise
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec

HEADS, DIM = 2, 4
WIDTH = HEADS * DIM
LONG = 320

Edit = Callable[[Sketch, ir.Value, ir.Value, ir.Value, ir.Value], ir.Value]
"""Scores, the positions of queries [s, 1] and of keys [t], and the length: other scores."""


def causal(g: Sketch, row: ir.Value, key: ir.Value) -> ir.Value:
    return g.op("LessOrEqual", key, row)


def hidden(g: Sketch, scores: ir.Value, keep: ir.Value) -> ir.Value:
    return g.op("Where", keep, scores, np.float32(-np.inf))


def back(limit: int) -> Edit:
    def edit(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
        near = g.op("LessOrEqual", g.op("Sub", row, key), g.const(limit))
        return hidden(g, scores, g.op("And", causal(g, row, key), near))

    return edit


def added_window(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    near = g.op("LessOrEqual", g.op("Abs", g.op("Sub", row, key)), g.const(32))
    return g.add(scores, g.op("Where", near, np.float32(0), np.float32(-np.inf)))


def blocks(size: int, *, back: int = 0) -> Edit:
    def edit(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
        own, other = (g.op("Div", x, g.const(size)) for x in (row, key))
        near = g.op("LessOrEqual", g.op("Sub", own, other), g.const(back))
        return hidden(g, scores, g.op("And", causal(g, row, key), near))

    return edit


def squared(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
    apart = g.op("Cast", g.op("Sub", row, key), to=int(FLOAT))
    near = g.op("LessOrEqual", g.mul(apart, apart), np.float32(100 * 100))
    return hidden(g, scores, g.op("And", causal(g, row, key), near))


def shifted(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
    near = g.op("LessOrEqual", g.op("Sub", row, g.const(60)), g.add(key, g.const(60)))
    return hidden(g, scores, g.op("And", causal(g, row, key), near))


def half(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
    limit = g.add(g.op("Div", n, g.const(2)), g.const(20))
    near = g.op("LessOrEqual", g.op("Sub", row, key), limit)
    return hidden(g, scores, g.op("And", causal(g, row, key), near))


def first_and_near(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    near = g.op("LessOrEqual", g.op("Sub", row, key), g.const(60))
    keep = g.op("Or", near, g.op("Less", key, g.const(6)))
    return hidden(g, scores, g.op("And", causal(g, row, key), keep))


def window_in_wide_blocks(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    return back(100)(g, blocks(8192)(g, scores, row, key, n), row, key, n)


def times_log_of_length(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    log = g.op("Log", g.op("Cast", n, to=int(FLOAT)))
    return g.mul(scores, g.op("Max", g.mul(log, np.float32(1 / np.log(64))), np.float32(1)))


def times_log_of_row(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    log = g.op("Log", g.op("Cast", g.add(row, g.const(1)), to=int(FLOAT)))
    return g.mul(scores, g.op("Max", g.mul(log, np.float32(1 / np.log(64))), np.float32(1)))


def less_for_far_keys(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    far = g.op("Greater", key, g.const(64))
    return g.mul(scores, g.op("Where", far, np.float32(0.5), np.float32(1)))


def table(g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value) -> ir.Value:
    bias = np.zeros(400, np.float32)
    bias[100:] = 2
    return g.add(scores, g.op("Gather", g.const(bias), g.op("Abs", g.op("Sub", row, key))))


def width_from_shape(
    g: Sketch, scores: ir.Value, row: ir.Value, key: ir.Value, n: ir.Value
) -> ir.Value:
    width = g.op("Cast", g.size(g.inputs[0], 2), to=int(FLOAT))
    return g.op("Div", scores, g.op("Sqrt", width))


def model_of(edit: Edit) -> ir.Model:
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    query, key, value = (
        g.transpose(g.reshape(g.linear(x, WIDTH, WIDTH), 0, 0, HEADS, DIM), 0, 2, 1, 3)
        for _ in range(3)
    )
    n = g.squeeze(g.size(x, 1), 0)
    keys = g.op("Range", g.const(0), n, g.const(1))
    rows = g.unsqueeze(keys, 1)
    scores = edit(g, g.matmul(query, g.transpose(key, 0, 1, 3, 2)), rows, keys, n)
    weights = g.op("Softmax", scores, axis=-1)
    merged = g.reshape(g.transpose(g.matmul(weights, value), 0, 2, 1, 3), 0, 0, WIDTH)
    g.output(g.linear(merged, WIDTH, WIDTH), "y")
    return g.model()


NAMED: dict[str, tuple[Edit, dict[str, Any]]] = {
    "window": (back(100), {"left_window": 100}),
    "wide-window": (back(9000), {"left_window": 9000}),
    "added-window": (added_window, {"left_window": 32, "right_window": 32}),
    "blocks": (blocks(100), {"block": 100}),
    "wide-blocks": (blocks(8192), {"block": 8192}),
    "shifted": (shifted, {"left_window": 120}),
}

RAW: dict[str, tuple[Edit, str]] = {
    "blocks-and-the-one-before": (blocks(100, back=1), "keep"),
    "squared-distance": (squared, "keep"),
    "half-the-length": (half, "keep"),
    "first-keys-and-near-ones": (first_and_near, "keep"),
    "window-in-wide-blocks": (window_in_wide_blocks, "keep"),
    "table": (table, "bias"),
}

FACTORS: dict[str, Edit] = {
    "log-of-the-length": times_log_of_length,
    "log-of-the-row": times_log_of_row,
}


def site_of(
    edit: Edit, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> Site:
    model = model_of(edit)
    recognition = recognise(model)
    (site,) = recognition.sites
    assert_sound(recognition, random_feeds(model))
    assert_sound(recognition, random_feeds(model, batch=1, seq=LONG))
    return site


@pytest.mark.parametrize(("edit", "mask"), NAMED.values(), ids=NAMED)
def test_a_far_rule_has_its_name(
    edit: Edit,
    mask: dict[str, Any],
    random_feeds: Callable[..., Any],
    assert_sound: Callable[..., None],
) -> None:
    found = site_of(edit, random_feeds, assert_sound).spec.mask
    assert {name: getattr(found, name) for name in mask} == mask
    assert found.keep is None
    assert found.bias is None


@pytest.mark.parametrize(("edit", "part"), RAW.values(), ids=RAW)
def test_a_far_rule_without_a_name_is_bound_as_it_is(
    edit: Edit,
    part: str,
    random_feeds: Callable[..., Any],
    assert_sound: Callable[..., None],
) -> None:
    assert site_of(edit, random_feeds, assert_sound).spec.mask.parts == (part,)


@pytest.mark.parametrize("edit", FACTORS.values(), ids=FACTORS)
def test_a_factor_that_is_one_only_at_first_is_not_the_scale(
    edit: Edit, random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    assert site_of(edit, random_feeds, assert_sound).spec.effective_scale == 1.0


def test_a_factor_of_far_keys_is_refused() -> None:
    recognition = recognise(model_of(less_for_far_keys))
    assert not recognition.sites
    (verdict,) = recognition.verdicts
    assert verdict.reason.code == "scores-not-affine"


def test_a_width_read_off_a_shape_is_the_scale(
    random_feeds: Callable[..., Any], assert_sound: Callable[..., None]
) -> None:
    site = site_of(width_from_shape, random_feeds, assert_sound)
    assert site.spec.effective_scale == pytest.approx(WIDTH**-0.5)


@pytest.mark.parametrize("width", [5, 60, 700])
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": CausalAlignment.TOP_LEFT, "left_window": 1},
        {"causal": CausalAlignment.BOTTOM_RIGHT, "left_window": 1},
        {"left_window": 1},
        {"right_window": 1},
        {"block": 1},
    ],
    ids=lambda mask: "-".join(mask),
)
def test_a_rule_is_seen_where_queries_have_a_length_of_their_own(
    mask: dict[str, object], width: int
) -> None:
    """Few queries and many keys show no window that is counted from the first key."""
    stated = {name: width if value == 1 else value for name, value in mask.items()}
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4, mask=MaskSpec(**stated))  # type: ignore[arg-type]
    model = build_model(form_named("primitive"), spec, FormParams(opset=17))
    (site,) = recognise(model).sites
    assert site.spec.mask == spec.mask
