"""The small graphs on which other tools were seen to go wrong: each kind must be right here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from spellings import (
    BATCH,
    BOOL,
    INT64,
    PAST,
    PLAIN,
    QUERIES,
    SHARED,
    Choices,
    Sketch,
    attention,
)

from mha_export.recognise import NotAttention, Recognition, Rejection, Site, recognise
from mha_export.spec import EmptyRow

Feeds = dict[str, np.ndarray]
Sound = Callable[..., None]
Random = Callable[..., Feeds]

HEADS, DIM, WIDTH = 4, 8, 32


def heads(g: Sketch, x: ir.Value, count: int = HEADS) -> ir.Value:
    return g.transpose(g.reshape(g.linear(x, WIDTH, count * DIM), 0, 0, count, DIM), 0, 2, 1, 3)


def merged(g: Sketch, context: ir.Value) -> ir.Value:
    return g.reshape(g.transpose(context, 0, 2, 1, 3), 0, 0, WIDTH)


def scored(g: Sketch, query: ir.Value, key: ir.Value) -> ir.Value:
    return g.mul(g.matmul(query, g.transpose(key, 0, 1, 3, 2)), DIM**-0.5)


def positions(g: Sketch, scores: ir.Value, *, from_end: bool) -> tuple[ir.Value, ir.Value]:
    """[s, 1] query positions and [1, t] key positions; queries stand at the end of the keys."""
    rows, columns = (g.squeeze(g.size(scores, axis), 0) for axis in (2, 3))
    i = g.op("Range", np.int64(0), rows, np.int64(1))
    if from_end:
        i = g.add(i, g.op("Sub", columns, rows))
    j = g.op("Range", np.int64(0), columns, np.int64(1))
    return g.unsqueeze(i, 1), g.unsqueeze(j, 0)


def only_site(recognition: Recognition) -> Site:
    (verdict,) = recognition.verdicts
    assert isinstance(verdict, Site), verdict.reason
    return verdict


def with_mask(
    make: Callable[[Sketch, ir.Value], ir.Value], *, cache: bool, kv_heads: int = 2
) -> ir.Model:
    """A grouped decoder attention, with or without a cache, under the mask that ``make`` writes."""
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    query, key, value = heads(g, x), heads(g, x, kv_heads), heads(g, x, kv_heads)
    if cache:
        for name, new in (("key", key), ("value", value)):
            past = g.input(f"past_{name}", [BATCH, kv_heads, PAST, DIM])
            whole = g.output(g.concat(past, new, axis=2), f"present_{name}")
            key, value = (whole, value) if name == "key" else (key, whole)
    group = list(np.repeat(np.arange(kv_heads), HEADS // kv_heads))
    scores = scored(g, query, g.op("Gather", key, group, axis=1))
    weights = g.op("Softmax", make(g, scores), axis=-1)
    context = g.matmul(weights, g.op("Gather", value, group, axis=1))
    g.output(merged(g, context), "y")
    return g.model()


def prefix(g: Sketch, scores: ir.Value) -> ir.Value:
    i, j = positions(g, scores, from_end=True)
    length = g.input("prefix", [BATCH], INT64)
    seen = g.op("Less", j, g.unsqueeze(length, 1))
    keep = g.op("Or", g.op("LessOrEqual", j, i), g.unsqueeze(seen, 1))
    return g.op("Where", g.unsqueeze(keep, 1), scores, -np.inf)


def test_a_prefix_mask_over_a_cache_is_not_causal(
    random_feeds: Random, assert_sound: Sound
) -> None:
    model = with_mask(prefix, cache=True)
    recognition = recognise(model)
    site = only_site(recognition)
    assert site.spec.cache is not None
    assert site.spec.mask.causal is None or site.spec.mask.prefix
    feeds = random_feeds(model) | {"prefix": np.array([2, 6], np.int64)}
    assert_sound(recognition, feeds)


def window(g: Sketch, scores: ir.Value) -> ir.Value:
    i, j = positions(g, scores, from_end=True)
    near = g.op("Greater", j, g.op("Sub", i, np.int64(4)))
    keep = g.op("And", g.op("LessOrEqual", j, i), near)
    return g.op("Where", keep, scores, -np.inf)


def test_a_sliding_window_survives_a_long_past(random_feeds: Random, assert_sound: Sound) -> None:
    model = with_mask(window, cache=True)
    recognition = recognise(model)
    site = only_site(recognition)
    assert site.spec.mask.causal == "bottom_right"
    assert site.spec.mask.left_window == 3
    assert_sound(recognition, random_feeds(model, seq=8, past=16))


@pytest.mark.parametrize(("scale", "factor"), [("none", None), ("query", 0.125), ("after", 0.125)])
def test_an_unusual_scale_is_stated(scale: str, factor: float | None) -> None:
    choices = PLAIN.but(dim=16, value_dim=16, scale=scale, factor=factor)
    site = only_site(recognise(attention(choices)))
    assert site.spec.scale == pytest.approx(factor or 1.0)


def test_a_padding_mask_with_holes_is_no_end_index(
    random_feeds: Random, assert_sound: Sound
) -> None:
    model = attention(PLAIN.but(mask="padding"))
    recognition = recognise(model)
    assert only_site(recognition).spec.mask.parts == ("padding",)
    holes = np.array([[0, 0, 0, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0, 0, 1]], np.bool_)
    assert_sound(recognition, random_feeds(model, seq=8) | {"padding": holes})


@pytest.mark.parametrize(("from_end", "alignment"), [(False, "top_left"), (True, "bottom_right")])
def test_causal_alignment_is_told_apart(
    from_end: bool, alignment: str, random_feeds: Random, assert_sound: Sound
) -> None:
    """With one query and six keys the two differ by everything but the first key."""

    def causal(g: Sketch, scores: ir.Value) -> ir.Value:
        i, j = positions(g, scores, from_end=from_end)
        return g.op("Where", g.op("LessOrEqual", j, i), scores, -np.inf)

    model = with_mask(causal, cache=True)
    recognition = recognise(model)
    assert only_site(recognition).spec.mask.causal == alignment
    assert_sound(recognition, random_feeds(model, seq=1, past=5))


@pytest.mark.parametrize(
    ("fill", "guard", "policy"),
    [
        (-np.inf, "none", EmptyRow.NAN),
        (-np.inf, "nan", EmptyRow.ZERO),
        (float(np.finfo(np.float32).min), "none", EmptyRow.UNIFORM),
    ],
    ids=["infinite", "guarded", "minimum"],
)
def test_a_row_without_keys_has_a_policy(
    fill: float, guard: str, policy: EmptyRow, random_feeds: Random, assert_sound: Sound
) -> None:
    model = attention(PLAIN.but(mask=f"weak:{fill}", guard=guard))
    recognition = recognise(model)
    assert only_site(recognition).spec.mask.empty_row is policy
    feeds = random_feeds(model)
    feeds["padding"][0] = False
    assert_sound(recognition, feeds)


def test_the_cap_comes_before_the_mask(random_feeds: Random, assert_sound: Sound) -> None:
    model = attention(PLAIN.but(softcap=2.0, mask="padding", factor=6.0))
    recognition = recognise(model)
    assert only_site(recognition).spec.softcap == 2.0
    assert_sound(recognition, random_feeds(model))


def test_a_past_without_a_present(random_feeds: Random, assert_sound: Sound) -> None:
    model = attention(SHARED.but(cache="no-present"))
    recognition = recognise(model)
    site = only_site(recognition)
    assert site.operands.past_key is not None
    assert site.present_key is None
    assert_sound(recognition, random_feeds(model))


def test_bias_and_sinks_on_grouped_heads(random_feeds: Random, assert_sound: Sound) -> None:
    model = attention(SHARED.but(mask="bias", sink="last"))
    recognition = recognise(model)
    site = only_site(recognition)
    assert site.spec.sinks
    assert site.spec.mask.parts == ("bias",)
    assert_sound(recognition, random_feeds(model))


@pytest.mark.parametrize(
    "choices",
    [
        Choices(heads=1, kv_heads=1, dim=512, value_dim=512),
        SHARED.but(value_dim=12),
    ],
    ids=["head-of-512", "value-wider-than-key"],
)
def test_odd_head_widths(choices: Choices, random_feeds: Random, assert_sound: Sound) -> None:
    model = attention(choices)
    recognition = recognise(model)
    site = only_site(recognition)
    assert (site.spec.head_dim, site.spec.value_dim) == (choices.dim, choices.value_dim)
    assert_sound(recognition, random_feeds(model))


def test_a_head_width_that_is_no_number_is_named() -> None:
    g = Sketch()
    query, key, value = (g.input(name, [BATCH, HEADS, QUERIES, "width"]) for name in "qkv")
    root = g.op("Sqrt", g.op("Cast", g.size(query, 3), to=1))
    scores = g.op("Div", g.matmul(query, g.transpose(key, 0, 1, 3, 2)), root)
    g.output(g.matmul(g.op("Softmax", scores, axis=-1), value), "y")
    (verdict,) = recognise(g.model()).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "head-dim-varies"
    assert "head_dim is 3 or 5" in verdict.reason.message


def test_softmax_of_old_opsets_over_flattened_scores(
    random_feeds: Random, assert_sound: Sound
) -> None:
    """Opset 11: no axis means everything from axis 1, so exporters flatten to two axes first."""
    g = Sketch(opset=11)
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    query, key, value = (heads(g, x) for _ in range(3))
    scores = scored(g, query, key)
    shape = g.op("Shape", scores)
    last = g.op("Gather", shape, g.const([3]), axis=0)
    flat = g.op("Reshape", scores, g.concat(g.const([-1]), last, axis=0))
    weights = g.op("Reshape", g.op("Softmax", flat), shape)
    g.output(merged(g, g.matmul(weights, value)), "y")
    model = g.model()
    recognition = recognise(model)
    assert only_site(recognition).spec.q_heads == HEADS
    assert_sound(recognition, random_feeds(model))


def test_weights_shared_by_two_values_are_recognised_once(random_feeds: Random) -> None:
    """One softmax weighs two values: the first is the attention, the weights stay needed."""
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    query, key, first, second = (heads(g, x) for _ in range(4))
    weights = g.op("Softmax", scored(g, query, key), axis=-1)
    g.output(merged(g, g.matmul(weights, first)), "y")
    g.output(merged(g, g.matmul(weights, second)), "z")
    site = only_site(recognise(g.model()))
    assert site.spec.qk_output == "probabilities" or not site.replaceable


def test_keys_read_by_two_layers_are_shared(random_feeds: Random, assert_sound: Sound) -> None:
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    key, value = heads(g, x), heads(g, x)
    for _ in range(2):
        weights = g.op("Softmax", scored(g, heads(g, x), key), axis=-1)
        x = g.add(x, g.linear(merged(g, g.matmul(weights, value)), WIDTH, WIDTH))
    g.output(x, "y")
    model = g.model()
    recognition = recognise(model)
    first, second = recognition.sites
    assert (first.spec.kv_source, second.spec.kv_source) == ("own", first.id)
    assert_sound(recognition, random_feeds(model))


def test_weights_of_over_2_gb_are_left_on_disk(tmp_path: Path) -> None:
    rows = (1 << 31) // (4 * WIDTH) + 1
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(rows * 4 * WIDTH)  # sparse: nothing is written
    tensor = ir.ExternalTensor(
        "table.bin", 0, rows * 4 * WIDTH, ir.DataType.FLOAT, shape=ir.Shape([rows, WIDTH]),
        name="table", base_dir=tmp_path,
    )  # fmt: skip
    g = Sketch()
    table = ir.Value(name="table", const_value=tensor, shape=tensor.shape)
    table.type = ir.TensorType(ir.DataType.FLOAT)
    g.weights.append(table)
    x = g.op("Gather", table, g.input("ids", [BATCH, QUERIES], INT64))
    query, key, value = (heads(g, x) for _ in range(3))
    weights = g.op("Softmax", scored(g, query, key), axis=-1)
    g.output(merged(g, g.matmul(weights, value)), "y")
    model = g.model()
    site = only_site(recognise(model))
    assert site.replaceable
    assert tensor.raw is None


def router(g: Sketch, x: ir.Value) -> ir.Value:
    values, _ = g.multi(2, "TopK", g.linear(x, WIDTH, 8), [2], axis=-1)
    return g.op("Softmax", values, axis=-1)


def choosing_router(g: Sketch, x: ir.Value) -> ir.Value:
    weights = g.op("Softmax", g.linear(x, WIDTH, 8), axis=-1)
    values, _ = g.multi(2, "TopK", weights, [2], axis=-1)
    return values


def classifier(g: Sketch, x: ir.Value) -> ir.Value:
    return g.op("Softmax", g.linear(x, WIDTH, 10), axis=-1)


def pooling(g: Sketch, x: ir.Value) -> ir.Value:
    weights = g.op("Softmax", g.linear(x, WIDTH, 1), axis=1)
    return g.op("ReduceSum", g.mul(weights, x), [1], keepdims=0)


def pooling_by_product(g: Sketch, x: ir.Value) -> ir.Value:
    weights = g.op("Softmax", g.linear(x, WIDTH, 1), axis=1)
    return g.matmul(g.transpose(weights, 0, 2, 1), x)


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (router, "router"),
        (choosing_router, "router"),
        (classifier, "classifier"),
        (pooling, "pooling"),
        (pooling_by_product, "pooling"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_no_attention_is_named(
    write: Callable[[Sketch, ir.Value], ir.Value], kind: str
) -> None:
    g = Sketch()
    g.output(write(g, g.input("x", [BATCH, QUERIES, WIDTH])), "y")
    (verdict,) = recognise(g.model()).verdicts
    assert isinstance(verdict, NotAttention), verdict
    assert verdict.reason.code == kind
    assert kind in verdict.reason.message


def test_a_refusal_names_the_value_and_the_node() -> None:
    (verdict,) = recognise(attention(PLAIN.but(axis=-2))).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "softmax-axis"
    assert verdict.reason.value
    assert verdict.reason.nodes
    assert verdict.to_json()["reason"]["message"].startswith("P·V sums over another axis")


def test_a_model_without_softmax_has_no_verdict() -> None:
    g = Sketch()
    g.output(g.linear(g.input("x", [BATCH, QUERIES, WIDTH]), WIDTH, WIDTH), "y")
    assert recognise(g.model()).verdicts == ()


def guarded(g: Sketch, *, keep_where: bool, number: float | None) -> ir.Model:
    """A masked attention whose rows without keys are given a value after softmax."""
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    keep = g.unsqueeze(g.input("padding", [BATCH, QUERIES], BOOL), 1, 2)
    query, key, value = (heads(g, x) for _ in range(3))
    weights = g.op("Softmax", g.op("Where", keep, scored(g, query, key), -np.inf), axis=-1)
    count = g.op("ReduceMax", g.op("Cast", keep, to=6), axes=[3], keepdims=1)
    some = g.op("Cast", count, to=9)
    length = g.op("Cast", g.op("Gather", g.op("Shape", x), np.int64(1)), to=1)
    instead = g.op("Div", 1.0, length) if number is None else g.const(np.float32(number))
    if keep_where:
        weights = g.op("Where", some, weights, instead)
    else:
        weights = g.op("Where", g.op("Not", some), instead, weights)
    g.output(merged(g, g.matmul(weights, value)), "y")
    return g.model()


@pytest.mark.parametrize(
    ("number", "policy"), [(0.0, EmptyRow.ZERO), (None, EmptyRow.UNIFORM)], ids=["zero", "mean"]
)
@pytest.mark.parametrize("keep_where", [True, False], ids=["kept-where", "replaced-where"])
def test_a_value_for_rows_without_keys_is_their_policy(
    keep_where: bool,
    number: float | None,
    policy: EmptyRow,
    random_feeds: Random,
    assert_sound: Sound,
) -> None:
    model = guarded(Sketch(opset=13), keep_where=keep_where, number=number)
    recognition = recognise(model)
    assert only_site(recognition).spec.mask.empty_row is policy
    feeds = random_feeds(model)
    feeds["padding"][0] = False
    assert_sound(recognition, feeds)


def test_weights_replaced_where_keys_are_left_is_refused() -> None:
    """The same Where under a condition that is not the mask's own."""
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    padding = g.input("padding", [BATCH, QUERIES], BOOL)
    keep = g.unsqueeze(padding, 1, 2)
    query, key, value = (heads(g, x) for _ in range(3))
    weights = g.op("Softmax", g.op("Where", keep, scored(g, query, key), -np.inf), axis=-1)
    other = g.unsqueeze(g.input("other", [BATCH, QUERIES], BOOL), 1, 2)
    g.output(merged(g, g.matmul(g.op("Where", other, 0.0, weights), value)), "y")
    (verdict,) = recognise(g.model()).verdicts
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "probabilities-masked"
