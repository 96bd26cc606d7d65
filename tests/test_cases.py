"""The battery: what each case is for, that it is reproducible, and that it tells mutants apart."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import attention_specs

from mha_export.cases import Case, cases, long_case
from mha_export.cases._draw import Stream, rounded, short_factor
from mha_export.errors import InputError
from mha_export.oracle import OracleInputs, RotaryInputs, attention, hidden_pairs
from mha_export.presets import load_preset
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    QkOutput,
    RotaryScaling,
    RotarySpec,
    RotaryStyle,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
ZERO = EmptyRow.ZERO


def make_spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 8, **changes})


def masked(**changes: Any) -> AttentionSpec:
    return make_spec(mask=MaskSpec(**changes))


def by_name(spec: AttentionSpec, **others: Any) -> dict[str, Case]:
    return {case.name: case for case in cases(spec, **others)}


def digest(case: Case) -> str:
    found = hashlib.sha256()
    for name, array in case.inputs.named():
        found.update(name.encode() + str(array.dtype).encode() + np.ascontiguousarray(array).data)
    return found.hexdigest()


# --- numbers -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_for_ever() -> None:
    """A changed digest means that recorded results no longer replay: say so in the changelog."""
    drawn = Stream(1, "x")
    assert drawn.integers(0, 1000, 4).tolist() == [855, 472, 2, 372]
    assert drawn.normal(2).tolist() == [-0.21518490105019833, -0.6390531696627113]
    spec = make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec())
    assert digest(by_name(spec)["ordinary"])[:16] == "c754b46e854a7a6c"


def test_another_seed_gives_other_numbers_and_other_scenarios_are_unmoved() -> None:
    spec = make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec())
    first, again, other = (by_name(spec, seed=seed) for seed in (0, 0, 1))
    assert {n: digest(c) for n, c in first.items()} == {n: digest(c) for n, c in again.items()}
    assert all(digest(first[name]) != digest(other[name]) for name in first)
    alone = by_name(spec, battery="quick")
    assert digest(alone["decode"]) == digest(first["decode"])


def test_draws_are_centred_and_of_unit_spread() -> None:
    x = Stream(0, "y").normal(20_000)
    assert abs(x.mean()) < 0.03
    assert abs(x.std() - 1) < 0.02
    u = Stream(0, "z").uniform(20_000)
    assert 0 <= u.min() < 0.01
    assert 0.99 < u.max() < 1


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.concatenate(
        [
            Stream(0, "r").normal(5000) * 10.0 ** np.linspace(-30, 30, 5000)[None],
            [[1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, -np.inf, 0.0]],
        ],
        axis=1,
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(rounded(x, DType.BF16), expected)


@pytest.mark.parametrize(
    ("dtype", "numpy"),
    [(DType.FP16, np.float16), (DType.FP32, np.float32), (DType.FP64, np.float64)],
)
def test_inputs_are_numbers_of_the_io_dtype(dtype: DType, numpy: type) -> None:
    spec = make_spec(io_dtype=dtype, sinks=True, mask=MaskSpec(bias=("q_len", "kv_len")))
    for case in cases(spec):
        for name, array in case.inputs.named():
            if array.dtype.kind == "f":
                assert array.dtype == np.float64
                np.testing.assert_array_equal(array.astype(numpy), array, err_msg=name)


def test_a_short_factor_has_four_bits() -> None:
    assert short_factor(0.7) == 0.6875
    assert short_factor(100.0) == 96.0


# --- which cases there are ---------------------------------------------------------------------

TRAITS = {
    "plain": (make_spec(), {"one_query", "query_longer_than_keys", "ties", "extreme_logits"}),
    "past": (
        make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec()),
        {"past_zero", "many_keys", "length_one", "query_shorter_than_keys", "batch"},
    ),
    "padding": (
        masked(padding=True, empty_row=ZERO),
        {"left_padding", "holes", "empty_row", "poison"},
    ),
    "lengths": (
        masked(lengths=True, causal=BOTTOM_RIGHT, empty_row=ZERO),
        {"lengths_below_queries", "empty_row", "poison"},
    ),
    "keep": (
        masked(keep=("batch", 1, "q_len", "mask_len"), empty_row=ZERO),
        {"mask_shorter_than_keys", "poison", "empty_row"},
    ),
    "bias": (masked(bias=("q_len", "kv_len"), empty_row=ZERO), {"bias_minus_inf", "empty_row"}),
    "window": (masked(causal=TOP_LEFT, left_window=20), {"window_edge"}),
    "softcap": (make_spec(softcap=30.0), {"softcap"}),
    "rotary": (
        make_spec(rotary=RotarySpec(dim=8, theta=1e4, positions="input"), cache=CacheSpec()),
        {"far_positions"},
    ),
    "static": (
        make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec(growth="static")),
        {"poison", "one_query"},
    ),
}


@pytest.mark.parametrize("name", TRAITS)
def test_the_battery_holds_what_the_spec_calls_for(name: str) -> None:
    spec, wanted = TRAITS[name]
    found = {trait for case in cases(spec) for trait in case.traits}
    assert found >= wanted


@pytest.mark.parametrize("io_dtype", list(DType))
def test_extreme_logits_are_extreme_and_can_be_written(io_dtype: DType) -> None:
    case = by_name(make_spec(io_dtype=io_dtype))["extreme_logits"]
    result = attention(make_spec(io_dtype=io_dtype), case.inputs)
    top = np.abs(result.scores(QkOutput.RAW)).max()
    if io_dtype is DType.FP16:
        assert 5e4 < top * 8**0.5 <= 6e4 * 1.01
        assert np.isfinite(case.inputs.query.astype(np.float16)).all()
    else:
        assert 9e3 < top <= 1.01e4


@pytest.mark.parametrize("fill", ["-inf", "min", -1e9])
@pytest.mark.parametrize("io_dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_poison_is_huge_and_finite_and_never_arrives(fill: Any, io_dtype: DType) -> None:
    spec = make_spec(
        mask=MaskSpec(padding=True, fill=fill, empty_row=ZERO), cache=CacheSpec(), io_dtype=io_dtype
    )
    case = by_name(spec)["poison"]
    arrays = [x for x in (case.inputs.value, case.inputs.past_value) if x is not None]
    top = max(float(np.abs(x).max()) for x in arrays)
    assert top == pytest.approx(6e4 if io_dtype is DType.FP16 else 1e30, rel=0.01)
    assert np.abs(attention(spec, case.inputs).output).max() < 10
    key = np.concatenate([case.inputs.past_key, case.inputs.key], axis=2)  # type: ignore[list-item]
    assert bool(np.abs(key).max() > 50) is (fill != -1e9)


def test_rows_marked_empty_are_empty_and_others_are_not() -> None:
    for spec, _ in TRAITS.values():
        for case in cases(spec):
            empty = attention(spec, case.inputs).empty_rows.any()
            assert empty == ("empty_row" in case.traits), case.name


def test_padding_with_holes_is_no_end_index() -> None:
    spec = masked(padding=True, empty_row=ZERO)
    padding = by_name(spec)["holes"].inputs.key_padding
    assert padding is not None
    for row in padding:
        count = int(row.sum())
        assert row.tolist() != [1] * count + [0] * (len(row) - count)
        assert row.any()


def test_window_edges_are_crossed() -> None:
    for window in ({"left_window": 3}, {"right_window": 3}, {"block": 4}):
        for square in (True, False):
            spec = masked(**window)
            spec = (
                spec.replace(q_len="s", kv_len="s") if square else spec.replace(cache=CacheSpec())
            )
            case = by_name(spec)["window_edge"]
            hidden = hidden_pairs(spec, case.inputs)
            if square or "right_window" not in window:
                assert hidden.any(), window
            assert not hidden.all()


def test_a_window_too_long_to_cross_is_left_to_narrower_specs() -> None:
    wide = masked(left_window=100_000).replace(q_len="s", kv_len="s")
    assert "window_edge" not in by_name(wide)


# --- dimensions --------------------------------------------------------------------------------


def test_integers_of_the_spec_are_kept() -> None:
    spec = make_spec(batch=1, q_len=3, kv_len=6, mask=MaskSpec(keep=(1, 4, 3, 6), empty_row=ZERO))
    found = list(cases(spec))
    assert found
    for case in found:
        assert (case.dims["batch"], case.dims["q_len"], case.dims["kv_len"]) == (1, 3, 6)


def test_projections_of_one_input_give_as_many_keys_as_queries() -> None:
    spec = make_spec(projections=ProjectionSpec(d_model=8))
    assert all(case.dims["q_len"] == case.dims["kv_len"] for case in cases(spec))
    apart = make_spec(projections=ProjectionSpec(d_model=8), kv_source="layer.0.self")
    assert any(case.dims["q_len"] < case.dims["kv_len"] for case in cases(apart))


def test_axes_of_masks_pin_lengths() -> None:
    spec = masked(bias=(3, 4, 2, 5))
    assert all(
        (c.dims["batch"], c.dims["q_len"], c.dims["kv_len"]) == (3, 2, 5) for c in cases(spec)
    )


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (make_spec(), {"q_len": 2, "kv_len": 4}),
        (make_spec(cache=CacheSpec()), {"past_len": 3, "q_len": 2}),
        (make_spec(cache=CacheSpec()), {"past_len": 3, "kv_len": 5}),
        (make_spec(cache=CacheSpec()), {"q_len": 2, "kv_len": 5}),
        (make_spec(q_len="seq", kv_len="seq", batch="n"), {"seq": 6, "n": 1}),
        (make_spec(cache=CacheSpec(growth="static", max_length=12)), {"q_len": 2}),
    ],
)
def test_asked_dims_are_honoured(spec: AttentionSpec, dims: dict[str, int]) -> None:
    names = {"seq": "q_len", "n": "batch"}
    found = list(cases(spec, dims=dims))
    assert found
    for case in found:
        assert {names.get(k, k): v for k, v in dims.items()}.items() <= case.dims.items()
        attention(spec, case.inputs)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (make_spec(cache=CacheSpec(growth="static", max_length=2)), {"q_len": 5}),
        (make_spec(cache=CacheSpec()), {"q_len": 2, "kv_len": 4, "past_len": 3}),
        (make_spec(), {"past_len": 3}),
        (make_spec(rotary=RotarySpec(dim=4)), {"q_len": 2, "kv_len": 4}),
        (masked(causal=BOTTOM_RIGHT), {"q_len": 5, "kv_len": 4}),
    ],
)
def test_dims_that_no_case_can_have(spec: AttentionSpec, dims: dict[str, int]) -> None:
    assert list(cases(spec, dims=dims)) == []


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="unknown battery"):
        cases(make_spec(), battery="all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown dimension 'width'"):
        cases(make_spec(), dims={"width": 3})
    with pytest.raises(InputError, match="is 4 in the spec, but 5 was asked"):
        cases(make_spec(q_len=4), dims={"q_len": 5})


def test_batteries_grow() -> None:
    spec = make_spec(cache=CacheSpec(), mask=MaskSpec(padding=True, empty_row=ZERO))
    quick, ordinary, full = (list(by_name(spec, battery=b)) for b in ("quick", "ordinary", "full"))
    assert quick == ["ordinary", "decode", "poison", "empty_row"]
    assert set(quick) < set(ordinary) < set(full)


@pytest.mark.parametrize("part", ["keep", "bias"])
@pytest.mark.parametrize(
    "shape",
    [
        ("kv_len",),
        ("mask_len",),
        (1, "kv_len"),
        ("q_len", "kv_len"),
        (4, 1, "kv_len"),
        (1, 1, 1, "kv_len"),
        ("batch", 1, 1, "kv_len"),
        ("batch", 4, "q_len", "kv_len"),
    ],
)
def test_a_mask_of_every_rank_can_leave_a_query_without_a_key(
    part: str, shape: tuple[int | str, ...]
) -> None:
    mask: dict[str, Any] = {part: shape, "empty_row": ZERO}
    spec = make_spec(q_heads=4, kv_heads=4, mask=MaskSpec(**mask))
    found = by_name(spec)["empty_row"]
    assert attention(spec, found.inputs).empty_rows.any()


def test_very_many_keys() -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=4, io_dtype=DType.FP16, cache=CacheSpec())
    case = long_case(spec)
    assert case is not None
    assert case.dims["kv_len"] == 65_536
    output = attention(spec, case.inputs, scores=False).output
    assert np.isfinite(output).all()
    assert long_case(spec.replace(cache=None, q_len="s", kv_len="s")) is None
    with pytest.raises(InputError, match="too many to draw"):
        long_case(load_preset("deepseek-v3-mla"))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(attention_specs(dtypes=(DType.FP32, DType.FP16, DType.BF16)))
def test_every_spec_has_cases_and_the_oracle_takes_them(spec: AttentionSpec) -> None:
    found = list(cases(spec))
    assert found[0].name == "ordinary"
    for case in found:
        result = attention(spec, case.inputs)
        finite = np.isfinite(result.output)
        assert finite.all() or spec.mask.empty_row is EmptyRow.NAN
        d = case.dims
        assert case.inputs.query.shape[::2] == (d["batch"], d["q_len"])
        assert case.inputs.key.shape[2] == d["new_len"]
        assert result.present_key.shape[2] == d["kv_len"]
        past = case.inputs.past_key
        assert d["past_len"] == (0 if past is None else past.shape[2])


# --- mutants -----------------------------------------------------------------------------------

Mutant = Callable[[AttentionSpec, OracleInputs], np.ndarray]


def respecified(**changes: Any) -> Mutant:
    """The same inputs under another spec (operands it does not state are dropped)."""

    def run(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
        mutated = spec.replace(**changes)
        for name in ("sinks", "q_norm_weight", "k_norm_weight"):
            if not (mutated.sinks if name == "sinks" else mutated.qk_norm):
                inputs = inputs.replace(**{name: None})
        return attention(mutated, inputs).output

    return run


def remasked(**changes: Any) -> Mutant:
    def run(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
        mask = dataclasses.replace(spec.mask, **changes)
        dropped = {
            "bias": mask.bias is not None,
            "keep": mask.keep is not None,
            "key_padding": mask.padding,
            "prefix_lengths": mask.prefix,
            "document_ids": mask.documents,
            "kv_lengths": mask.lengths or (spec.uses_lengths and not spec.mask.lengths),
        }
        gone = {name: None for name, stays in dropped.items() if not stays}
        return attention(spec.replace(mask=mask), inputs.replace(**gone)).output

    return run


def with_inputs(change: Callable[[OracleInputs], dict[str, Any]]) -> Mutant:
    def run(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
        return attention(spec, inputs.replace(**change(inputs))).output

    return run


def tiled_heads(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    order = np.arange(spec.q_heads) % spec.kv_heads
    assert inputs.value is not None
    wide = spec.replace(kv_heads=spec.q_heads)
    return attention(
        wide, inputs.replace(key=inputs.key[:, order], value=inputs.value[:, order])
    ).output


def softcap_after_the_mask(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    result = attention(spec.replace(softcap=None), inputs)
    assert spec.softcap is not None
    masked_scores = result.scores(QkOutput.MASKED)
    return _weigh(spec, inputs, spec.softcap * np.tanh(masked_scores / spec.softcap), axis=-1)


def softmax_over_queries(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    return _weigh(spec, inputs, attention(spec, inputs).scores(QkOutput.MASKED), axis=-2)


def mask_multiplied(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    """The keep-mask times the score: a forbidden key scores 0, not -inf."""
    result = attention(spec, inputs)
    scores = np.where(
        np.isneginf(result.scores(QkOutput.MASKED)), 0.0, result.scores(QkOutput.CAPPED)
    )
    return _weigh(spec, inputs, scores, axis=-1)


def _weigh(
    spec: AttentionSpec, inputs: OracleInputs, scores: np.ndarray, *, axis: int
) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        weight = np.exp(scores - scores.max(axis=axis, keepdims=True))
        weight = np.nan_to_num(weight / weight.sum(axis=axis, keepdims=True))
    value = attention(spec, inputs).present_value
    assert value is not None
    return weight @ value.repeat(spec.group, axis=1)


def queries_from_zero(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    """Rotary positions that forget the past."""
    assert spec.rotary is not None
    shifted = spec.replace(rotary=dataclasses.replace(spec.rotary, positions="input"))
    b, s = inputs.query.shape[0], inputs.query.shape[2]
    ids = np.broadcast_to(np.arange(s), (b, s))
    return attention(shifted, inputs.replace(rotary=RotaryInputs(position_ids=ids))).output


def rotary_ids_plus_one(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    assert inputs.rotary is not None
    assert inputs.rotary.position_ids is not None
    later = dataclasses.replace(inputs.rotary, position_ids=inputs.rotary.position_ids + 1)
    return attention(spec, inputs.replace(rotary=later)).output


def new_before_past(spec: AttentionSpec, inputs: OracleInputs) -> np.ndarray:
    result = attention(spec, inputs)
    assert result.present_value is not None
    n = inputs.key.shape[2]
    plain = spec.replace(cache=None, rotary=None, q_len="a", kv_len="b")
    return attention(
        plain,
        inputs.replace(
            key=np.roll(result.present_key, n, axis=2),
            value=np.roll(result.present_value, n, axis=2),
            past_key=None,
            past_value=None,
        ),
    ).output


ROTARY = RotarySpec(dim=8, theta=10_000.0)
DECODER = make_spec(mask=MaskSpec(causal=BOTTOM_RIGHT), rotary=ROTARY, cache=CacheSpec())
IDS = DECODER.replace(rotary=RotarySpec(dim=8, theta=10_000.0, positions="input"))
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def scaled(**kind: Any) -> AttentionSpec:
    return IDS.replace(rotary=dataclasses.replace(IDS.rotary, scaling=RotaryScaling(**kind)))


def rerotated(spec: AttentionSpec, **changes: Any) -> Mutant:
    assert spec.rotary is not None
    return respecified(rotary=dataclasses.replace(spec.rotary, **changes))


KEEP = masked(keep=("batch", 1, "q_len", "kv_len"), empty_row=ZERO)
PADDED = masked(padding=True, empty_row=ZERO)
LENGTHS = masked(lengths=True, causal=BOTTOM_RIGHT, empty_row=ZERO)
WINDOWED = masked(causal=BOTTOM_RIGHT, left_window=3)
BOTH_SIDES = masked(left_window=2, right_window=1)
STATIC = make_spec(cache=CacheSpec(growth="static"), mask=MaskSpec(causal=BOTTOM_RIGHT))
YARN = scaled(kind="yarn", factor=8.0, original_max_positions=64)
LLAMA3 = scaled(kind="llama3", factor=8.0, original_max_positions=64)
CAPPED = make_spec(softcap=2.0, mask=MaskSpec(padding=True, empty_row=ZERO))
NORMED = make_spec(qk_norm=QkNormSpec(kind="rms"))


def flipped(name: str) -> Mutant:
    return with_inputs(lambda inputs: {name: np.logical_not(getattr(inputs, name))})


def as_end_index(inputs: OracleInputs) -> dict[str, Any]:
    """A padding mask read as the number of its ones."""
    assert inputs.key_padding is not None
    t = inputs.key_padding.shape[1]
    return {"key_padding": np.arange(t) < inputs.key_padding.sum(1, keepdims=True)}


MUTANTS: dict[str, tuple[AttentionSpec, Mutant]] = {
    "scale dropped": (make_spec(scale=0.125), respecified(scale=1.0)),
    "scale by default": (make_spec(scale=0.5), respecified(scale=None)),
    "scale applied twice": (make_spec(), respecified(scale=1 / 8)),
    "heads tiled": (make_spec(), tiled_heads),
    "heads tiled, three to one": (make_spec(q_heads=6), tiled_heads),
    "K used for V": (make_spec(), with_inputs(lambda i: {"value": i.key})),
    "V used for K": (make_spec(), with_inputs(lambda i: {"key": i.value})),
    "softmax over queries": (make_spec(), softmax_over_queries),
    "softcap dropped": (make_spec(softcap=2.0), respecified(softcap=None)),
    "softcap doubled": (make_spec(softcap=2.0), respecified(softcap=4.0)),
    "softcap after the mask": (CAPPED, softcap_after_the_mask),
    "large softcap dropped": (make_spec(softcap=50.0), respecified(softcap=None)),
    "sinks dropped": (make_spec(sinks=True), respecified(sinks=False)),
    "sinks of other heads": (
        make_spec(sinks=True),
        with_inputs(lambda i: {"sinks": i.sinks[::-1]}),
    ),
    "causal dropped": (masked(causal=TOP_LEFT), remasked(causal=None)),
    "causal added": (make_spec(), remasked(causal=BOTTOM_RIGHT)),
    "top-left for bottom-right": (masked(causal=BOTTOM_RIGHT), remasked(causal=TOP_LEFT)),
    "bottom-right for top-left": (masked(causal=TOP_LEFT), remasked(causal=BOTTOM_RIGHT)),
    "alignment swapped with a past": (DECODER, remasked(causal=TOP_LEFT)),
    "causal off by one": (masked(causal=TOP_LEFT), remasked(causal=None, right_window=1)),
    "window dropped": (WINDOWED, remasked(left_window=None)),
    "window one wider": (WINDOWED, remasked(left_window=4)),
    "window one narrower": (WINDOWED, remasked(left_window=2)),
    "wide window one wider": (
        make_spec(cache=CacheSpec(), mask=MaskSpec(causal=BOTTOM_RIGHT, left_window=127)),
        remasked(left_window=128),
    ),
    "square window one narrower": (
        masked(causal=TOP_LEFT, left_window=15).replace(q_len="s", kv_len="s"),
        remasked(left_window=14),
    ),
    "right window one wider": (BOTH_SIDES, remasked(right_window=2)),
    "windows swapped": (BOTH_SIDES, remasked(left_window=1, right_window=2)),
    "window by the past of none": (
        make_spec(cache=CacheSpec(), mask=MaskSpec(left_window=2)),
        remasked(causal=TOP_LEFT),
    ),
    "prefix dropped": (masked(causal=TOP_LEFT, prefix=True), remasked(prefix=False)),
    "prefix as everything": (
        masked(causal=TOP_LEFT, prefix=True),
        remasked(causal=None, prefix=False),
    ),
    "prefix off by one": (
        masked(causal=TOP_LEFT, prefix=True),
        with_inputs(lambda i: {"prefix_lengths": i.prefix_lengths + 1}),
    ),
    "blocks dropped": (masked(block=3), remasked(block=None)),
    "blocks of another size": (masked(block=3), remasked(block=4)),
    "documents dropped": (
        masked(documents=True).replace(q_len="s", kv_len="s"),
        remasked(documents=False),
    ),
    "keep inverted": (KEEP, flipped("keep")),
    "keep dropped": (KEEP, remasked(keep=None)),
    "keep multiplied": (KEEP, mask_multiplied),
    "padding inverted": (PADDED, flipped("key_padding")),
    "padding dropped": (PADDED, remasked(padding=False)),
    "padding as an end index": (PADDED, with_inputs(as_end_index)),
    "padding of row 0 for all": (
        PADDED,
        with_inputs(
            lambda i: {"key_padding": np.broadcast_to(i.key_padding[:1], i.key_padding.shape)}
        ),
    ),
    "lengths dropped": (masked(lengths=True, empty_row=ZERO), remasked(lengths=False)),
    "lengths off by one": (
        LENGTHS,
        with_inputs(lambda i: {"kv_lengths": np.maximum(i.kv_lengths - 1, 0)}),
    ),
    "lengths not moving the diagonal": (LENGTHS, remasked(causal=TOP_LEFT)),
    "empty rows uniform": (PADDED, remasked(empty_row=EmptyRow.UNIFORM)),
    "empty rows uniform by keep": (KEEP, remasked(empty_row=EmptyRow.UNIFORM)),
    "minimum for minus infinity": (
        masked(padding=True, empty_row=EmptyRow.FINITE, fill="min"),
        remasked(empty_row=ZERO, fill="-inf"),
    ),
    "bias dropped": (masked(bias=("q_len", "kv_len")), remasked(bias=None)),
    "bias scaled": (
        masked(bias=("q_len", "kv_len")).replace(scale=0.5),
        with_inputs(lambda i: {"bias": 0.5 * i.bias}),
    ),
    "bias of other heads": (
        masked(bias=(4, "q_len", "kv_len")),
        with_inputs(lambda i: {"bias": i.bias[::-1]}),
    ),
    "bias transposed": (
        masked(bias=("q_len", "kv_len")).replace(q_len="s", kv_len="s"),
        with_inputs(lambda i: {"bias": i.bias.T if i.bias.shape[0] == i.bias.shape[1] else i.bias}),
    ),
    "alibi dropped": (masked(alibi_slopes=SLOPES), remasked(alibi_slopes=None)),
    "alibi of other heads": (masked(alibi_slopes=SLOPES), remasked(alibi_slopes=SLOPES[::-1])),
    "rotary dropped": (DECODER, respecified(rotary=None)),
    "rotary style swapped": (DECODER, rerotated(DECODER, style=RotaryStyle.INTERLEAVED)),
    "rotary half as wide": (DECODER, rerotated(DECODER, dim=4)),
    "rotary theta": (DECODER, rerotated(DECODER, theta=500_000.0)),
    "keys not rotated": (DECODER, rerotated(DECODER, key=False)),
    "positions forget the past": (DECODER, queries_from_zero),
    "positions off by one": (IDS, rotary_ids_plus_one),
    "position ids ignored": (
        IDS,
        lambda spec, i: attention(DECODER, i.replace(rotary=None)).output,
    ),
    "linear scaling dropped": (scaled(kind="linear", factor=4.0), rerotated(IDS, scaling=None)),
    "ntk scaling dropped": (scaled(kind="ntk", factor=4.0), rerotated(IDS, scaling=None)),
    "yarn dropped": (YARN, rerotated(IDS, scaling=None)),
    "yarn without its factor": (
        YARN,
        rerotated(YARN, scaling=dataclasses.replace(YARN.rotary.scaling, attention_factor=1.0)),
    ),
    "llama3 dropped": (LLAMA3, rerotated(IDS, scaling=None)),
    "llama3 factor": (
        LLAMA3,
        rerotated(LLAMA3, scaling=dataclasses.replace(LLAMA3.rotary.scaling, factor=4.0)),
    ),
    "qk-norm dropped": (NORMED, respecified(qk_norm=None)),
    "qk-norm of queries alone": (
        NORMED,
        lambda spec, i: (
            attention(
                spec.replace(qk_norm=QkNormSpec(kind="rms", key=False)),
                i.replace(k_norm_weight=None),
            ).output
        ),
    ),
    "qk-norm layer for rms": (NORMED, respecified(qk_norm=QkNormSpec(kind="layer"))),
    "qk-norm over all heads": (
        make_spec(qk_norm=QkNormSpec(kind="rms", weight=False)),
        respecified(qk_norm=QkNormSpec(kind="rms", weight=False, over="hidden")),
    ),
    "qk-norm after rotary": (
        make_spec(qk_norm=QkNormSpec(kind="rms"), rotary=ROTARY),
        respecified(qk_norm=None),
    ),
    "new keys before the past": (
        make_spec(cache=CacheSpec(), mask=MaskSpec(causal=BOTTOM_RIGHT)),
        new_before_past,
    ),
    "past values ignored": (DECODER, with_inputs(lambda i: {"past_value": 0 * i.past_value})),
    "static cache written one late": (
        STATIC,
        with_inputs(lambda i: {"kv_lengths": np.minimum(i.kv_lengths + 1, i.past_key.shape[2])}),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_some_case_tells_a_mutant_apart(name: str) -> None:
    spec, mutant = MUTANTS[name]
    best = 0.0
    for case in cases(spec):
        exact = attention(spec, case.inputs).output
        with np.errstate(all="ignore"):
            other = mutant(spec, case.inputs)
        size = np.abs(np.nan_to_num(exact)).max()
        if size > 1e3:
            continue
        difference = np.abs(np.nan_to_num(other, nan=1e3) - np.nan_to_num(exact, nan=1e3)).max()
        best = max(best, float(difference / max(size, 1.0)))
    # fp32 attention errs by some 1e-6 on these, fp16 by some 1e-3.
    assert best > 1e-2, f"no case tells it apart: the largest difference is {best:.1e}"


def test_the_unchanged_spec_is_not_told_apart() -> None:
    for spec, _ in MUTANTS.values():
        for case in cases(spec, battery="quick"):
            np.testing.assert_array_equal(
                respecified()(spec, case.inputs), attention(spec, case.inputs).output
            )
