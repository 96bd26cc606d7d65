"""The parts of a mask as graph values: each against the rule it states, in every kind of offset."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench

from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import added_parts, hiding_parts, may_be_shorter
from mha_export.operands import Operands, ScoreMask
from mha_export.oracle import OracleInputs, hidden_pairs
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
B, H, D = 2, 2, 4
ZERO = {"empty_row": EmptyRow.ZERO}
SIDE = ("keep", "bias", "key_padding", "kv_lengths", "prefix_lengths", "document_ids")


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": H, "kv_heads": H, "head_dim": D} | fields)


class Masked:
    """A mask over arrays: ``s`` queries, ``n`` new keys, ``p`` cached ones."""

    def __init__(self, spec: AttentionSpec, s: int, n: int, p: int = 0, **side: Any) -> None:
        rng = np.random.default_rng(0)
        dtype = np.float16 if spec.io_dtype is DType.FP16 else np.float32
        arrays = {
            "query": rng.normal(size=(B, H, s, D)),
            "key": rng.normal(size=(B, H, n, D)),
            "value": rng.normal(size=(B, H, n, D)),
        }
        if spec.cache is not None:
            arrays |= {"past_key": np.zeros((B, H, p, D)), "past_value": np.zeros((B, H, p, D))}
        self.spec = spec
        self.inputs = OracleInputs(**arrays, **side)
        self.bench = Bench()
        named: dict[str, Any] = {
            name: self.bench.heads(name, array.astype(dtype)) for name, array in arrays.items()
        }
        for name, array in side.items():
            array = array.astype(dtype) if array.dtype == np.float64 else array
            named[name] = self.bench.value(name, array)
        self.operands = Operands(**named)
        self.t = p if spec.uses_lengths and spec.cache is not None else p + n
        self.s = s

    @property
    def mask(self) -> Mask:
        sizes = Sizes(self.bench.scope, self.spec, self.operands)
        return Mask(self.bench.scope, self.spec, self.operands, sizes)

    def with_source(self, array: np.ndarray, kind: Any, shape: Any = None) -> None:
        value = self.bench.value("source", array, shape=shape)
        named = {name: getattr(self.operands, name) for name in ("query", "key", "value", *SIDE)}
        self.operands = Operands(**named, score_mask=ScoreMask(value=value, kind=kind))

    def run(self, value: ir.Value) -> np.ndarray:
        (found,) = self.bench.run(value)
        return np.broadcast_to(found, (B, H, self.s, self.t))


# Offsets: where query 0 stands. Each with operands that go with its lengths.

OFFSETS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the spec's fields, the mask's, the lengths
    "none": ({}, {}, {"s": 4, "n": 6}),
    "top-left": ({}, {"causal": TOP_LEFT}, {"s": 4, "n": 6}),
    "top-left past": ({"cache": CacheSpec()}, {"causal": TOP_LEFT}, {"s": 3, "n": 3, "p": 4}),
    "square": ({"q_len": "s", "kv_len": "s"}, {"causal": BOTTOM_RIGHT}, {"s": 6, "n": 6}),
    "more keys": ({}, {"causal": BOTTOM_RIGHT}, {"s": 3, "n": 7}),
    "fewer keys": ({}, {"causal": BOTTOM_RIGHT}, {"s": 7, "n": 3}),
    "past": ({"cache": CacheSpec()}, {"causal": BOTTOM_RIGHT}, {"s": 3, "n": 3, "p": 4}),
    "past alone": ({"cache": CacheSpec()}, {}, {"s": 3, "n": 3, "p": 4}),
    "lengths": (
        {},
        {"lengths": True, "causal": BOTTOM_RIGHT} | ZERO,
        {"s": 3, "n": 7, "kv_lengths": np.array([7, 4])},
    ),
    "short lengths": (
        {},
        {"lengths": True, "causal": BOTTOM_RIGHT} | ZERO,
        {"s": 4, "n": 7, "kv_lengths": np.array([0, 2])},
    ),
    "short lengths, not causal": (
        {},
        {"lengths": True} | ZERO,
        {"s": 4, "n": 7, "kv_lengths": np.array([1, 2])},
    ),
    "static": (
        {"cache": CacheSpec(growth="static")},
        {"causal": BOTTOM_RIGHT},
        {"s": 3, "n": 3, "p": 8, "kv_lengths": np.array([3, 7])},
    ),
}
FIRST = {
    "more keys": [4],
    "fewer keys": [-4],
    "past": [4],
    "past alone": [4],
    "lengths": [4, 1],
    "short lengths": [-4, -2],
    "short lengths, not causal": [-3, -2],
    "static": [0, 4],
}
"""Position of query 0 in each batch row, where that is not 0."""
BEFORE_THE_KEYS = [name for name, first in FIRST.items() if min(first) < 0]
PARTS: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "left window 0": {"left_window": 0},
    "left window": {"left_window": 2},
    "right window 0": {"right_window": 0},
    "right window": {"right_window": 1},
    "block of 1": {"block": 1},
    "block of 2": {"block": 2},
    "block of 3": {"block": 3},
    "prefix": {"prefix": True},
    "documents": {"documents": True},
    "padding": {"padding": True} | ZERO,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_who_sees_whom(offset: str, part: str) -> None:
    fields, mask, lengths = OFFSETS[offset]
    if part == "prefix" and "causal" not in mask:
        return
    if part == "documents" and offset in BEFORE_THE_KEYS:
        return  # a query before the first key has no document
    spec = _spec(mask=MaskSpec(**mask | PARTS[part]), **fields)
    size = Masked(spec.replace(mask=MaskSpec(**mask)), **lengths)
    rng = np.random.default_rng(1)
    side = {
        "prefix": {"prefix_lengths": np.array([2, 5])},
        "documents": {"document_ids": rng.integers(0, 2, (B, size.t))},
        "padding": {"key_padding": rng.integers(0, 2, (B, size.t))},
    }
    made = Masked(spec, **lengths, **side.get(part, {}))
    parts = hiding_parts(spec)
    allowed = made.mask.allowed(parts)
    if not parts:
        assert allowed is None
        assert made.bench.types == []
        return
    assert allowed is not None
    assert allowed.dtype is ir.DataType.BOOL
    found = made.run(allowed)
    np.testing.assert_array_equal(~found, hidden_pairs(spec, made.inputs))
    (has_key,) = made.bench.run(made.mask.row_has_key())
    assert has_key.shape[-1] == 1
    np.testing.assert_array_equal(
        np.broadcast_to(has_key[..., 0], (B, H, made.s)), found.any(axis=-1)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("offset", OFFSETS)
def test_blocks_alone(offset: str, size: int) -> None:
    """A query before the first key is in no key's block, whatever else the mask says."""
    fields, mask, lengths = OFFSETS[offset]
    spec = _spec(mask=MaskSpec(**mask, block=size), **fields)
    made = Masked(spec, **lengths)
    allowed = made.mask.allowed(frozenset({"block"}))
    assert allowed is not None
    first = np.array(FIRST.get(offset, [0]))[:, None, None, None]
    positions = first + np.arange(made.s)[:, None]
    expected = positions // size == np.arange(made.t) // size
    found = made.run(allowed)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    # Only where positions can be negative does that cost anything.
    may_be_negative = offset in FIRST and "past" not in offset
    assert ("Max" in made.bench.types) is may_be_negative


@pytest.mark.parametrize("offset", ["fewer keys", "short lengths"])
def test_a_query_before_the_first_key_reads_no_document(offset: str) -> None:
    """It sees nothing anyway; what it must not do is read out of bounds."""
    fields, mask, lengths = OFFSETS[offset]
    spec = _spec(mask=MaskSpec(**mask, documents=True), **fields)
    ids = np.zeros((B, lengths["n"]), np.int64)
    made = Masked(spec, **lengths, document_ids=ids)
    allowed = made.mask.allowed(hiding_parts(spec))
    assert allowed is not None
    without = Masked(spec.replace(mask=MaskSpec(**mask)), **lengths)
    expected = without.mask.allowed(hiding_parts(without.spec))
    assert expected is not None
    np.testing.assert_array_equal(made.run(allowed), without.run(expected))


KEEPS: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "t": (("kv_len",), (5,)),
    "short t": (("m",), (3,)),
    "st": (("q_len", "kv_len"), (4, 5)),
    "hst": ((H, "q_len", "kv_len"), (H, 4, 5)),
    "bhst": (("batch", H, "q_len", "kv_len"), (B, H, 4, 5)),
    "short b11t": (("batch", 1, 1, "m"), (B, 1, 1, 2)),
    "short hst": ((H, "q_len", "m"), (H, 4, 3)),
    "one key": (("batch", H, "q_len", 1), (B, H, 4, 1)),
    "maybe short": (("q_len", "m"), (4, 5)),
}


@pytest.mark.parametrize("name", KEEPS)
def test_keeps_of_any_rank(name: str) -> None:
    stated, shape = KEEPS[name]
    spec = _spec(mask=MaskSpec(keep=stated, **ZERO))
    keep = np.random.default_rng(2).random(shape) < 0.6
    made = Masked(spec, 4, 5, keep=keep)
    allowed = made.mask.allowed(frozenset({"keep"}))
    assert allowed is not None
    np.testing.assert_array_equal(~made.run(allowed), hidden_pairs(spec, made.inputs))
    assert made.bench.run(allowed)[0].ndim == 4
    # A mask that is as long as the keys for sure is not padded.
    assert ("Pad" in made.bench.types) is (stated[-1] != "kv_len")


def test_a_keep_that_is_as_it_should_be_costs_nothing() -> None:
    spec = _spec(mask=MaskSpec(keep=("batch", H, "q_len", "kv_len"), **ZERO))
    made = Masked(spec, 4, 5, keep=np.ones((B, H, 4, 5), np.bool_))
    assert made.mask.allowed(frozenset({"keep"})) is made.operands.keep
    assert made.bench.types == []


@pytest.mark.parametrize("name", KEEPS)
def test_biases_of_any_rank(name: str) -> None:
    """A short bias is padded with 0; that keys beyond it are hidden is a part of its own."""
    stated, shape = KEEPS[name]
    spec = _spec(mask=MaskSpec(bias=stated))
    bias = np.random.default_rng(2).normal(size=shape)
    made = Masked(spec, 4, 5, bias=bias)
    mask = made.mask
    added = mask.added()
    assert added is not None
    padded = np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, 5 - shape[-1])])
    np.testing.assert_allclose(made.run(added), np.broadcast_to(padded, (B, H, 4, 5)), rtol=1e-6)
    assert made.bench.run(added)[0].ndim == 4
    assert ("bias" in hiding_parts(spec)) is (stated[-1] != "kv_len")
    allowed = mask.allowed(hiding_parts(spec))
    if allowed is not None:
        np.testing.assert_array_equal(~made.run(allowed), hidden_pairs(spec, made.inputs))
    nodes = len(made.bench.scope.nodes)
    assert mask.added() is added, "emitted once"
    assert len(made.bench.scope.nodes) == nodes


def test_a_bias_of_another_type_is_cast() -> None:
    spec = _spec(mask=MaskSpec(bias=("batch", H, "q_len", "kv_len")), io_dtype=DType.FP16)
    made = Masked(spec, 4, 5, bias=np.ones((B, H, 4, 5)))
    assert made.mask.added() is made.operands.bias
    wide = Masked(spec, 4, 5, bias=np.ones((B, H, 4, 5), np.float32))
    added = wide.mask.added()
    assert added is not None
    assert added.dtype is ir.DataType.FLOAT16
    assert wide.bench.types == ["Cast"]


ALIBI = (0.5, -2.0)


@pytest.mark.parametrize("offset", ["none", "past", "lengths", "more keys"])
@pytest.mark.parametrize("biased", [False, True], ids=["alone", "beside a bias"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=["fp32", "fp16"])
def test_what_is_added(dtype: DType, biased: bool, offset: str) -> None:
    fields, mask, lengths = OFFSETS[offset]
    stated = {"bias": ("q_len", "kv_len")} if biased else {}
    spec = _spec(mask=MaskSpec(**mask, **stated, alibi_slopes=ALIBI), io_dtype=dtype, **fields)
    total = lengths["n"] + lengths.get("p", 0)
    bias = np.random.default_rng(3).integers(-4, 4, (lengths["s"], total)).astype(float)
    made = Masked(spec, **lengths, **({"bias": bias} if biased else {}))
    added = made.mask.added()
    assert added is not None
    found = made.run(added)
    assert found.dtype == (np.float32 if dtype is DType.FP32 else np.float16)
    positions = np.array(FIRST.get(offset, [0]))[:, None, None, None] + np.arange(made.s)[:, None]
    expected = np.array(ALIBI)[None, :, None, None] * (np.arange(total) - positions)
    np.testing.assert_array_equal(
        found, np.broadcast_to(expected + (bias if biased else 0), found.shape)
    )


def test_nothing_is_added_where_nothing_is_stated() -> None:
    made = Masked(_spec(), 4, 5)
    assert made.mask.added() is None
    assert made.mask.additive(frozenset(), -math.inf) is None
    assert made.bench.types == []


FILLS = [-math.inf, -5.0]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("biased", [False, True], ids=["alone", "beside a bias"])
def test_a_finite_fill_adds_to_the_bias_and_infinity_replaces_it(biased: bool, fill: float) -> None:
    stated = {"bias": ("q_len", "kv_len")} if biased else {}
    spec = _spec(mask=MaskSpec(causal=TOP_LEFT, **stated))
    bias = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
    if biased:
        bias[0, 4] = np.inf  # hidden: adding -inf to it would be no number
    made = Masked(spec, 4, 5, **({"bias": bias} if biased else {}))
    value = made.mask.additive(frozenset({"causal"}), fill)
    assert value is not None
    hidden = np.triu(np.ones((4, 5), np.bool_), 1)
    added = bias if biased else np.zeros((4, 5), np.float32)
    expected = np.where(hidden, fill if math.isinf(fill) else added + fill, added)
    np.testing.assert_allclose(made.run(value)[0, 0], expected, rtol=1e-6)
    # Without parts only what is added stays.
    assert (made.mask.additive(frozenset(), fill) is None) is not biased


@pytest.mark.parametrize("biased", [False, True], ids=["alone", "beside a bias"])
@pytest.mark.parametrize("kind", ["keep", "additive"])
def test_a_source_mask_stands_for_the_parts(kind: str, biased: bool) -> None:
    stated = {"bias": ("q_len", "kv_len")} if biased else {}
    spec = _spec(mask=MaskSpec(causal=TOP_LEFT, fill=-5.0, **stated))
    bias = np.random.default_rng(3).normal(size=(4, 5))
    made = Masked(spec, 4, 5, **({"bias": bias} if biased else {}))
    assert not made.mask.bound
    assert made.mask.source is None
    keep = np.tril(np.ones((4, 5), np.bool_), 2)[None, None]
    array = keep if kind == "keep" else np.where(keep, 0, -7.0).astype(np.float32)
    made.with_source(array, kind)
    assert made.mask.bound
    assert made.mask.source is made.operands.score_mask
    value = made.mask.additive(frozenset({"causal"}), -5.0)
    assert value is not None
    fill = -5.0 if kind == "keep" else -7.0
    expected = np.where(keep[0, 0], 0.0, fill) + (bias if biased else 0.0)
    np.testing.assert_allclose(made.run(value)[0, 0], expected, rtol=1e-6)
    # A form that has words for every part reads the mask no more.
    rest = made.mask.additive(frozenset(), -5.0)
    assert (rest is None) is not biased
    if rest is not None:
        np.testing.assert_allclose(made.run(rest)[0, 0], bias, rtol=1e-6)


ROWS = {
    # fill, what a hidden pair of the source holds, what a seen one may hold
    "infinity": ("-inf", -np.inf, -1e30),
    "minimum": ("min", np.finfo(np.float32).min, -1e30),
    "below the minimum's half": ("min", np.finfo(np.float32).min * 0.51, -1.6e38),
    "finite": (-100.0, -100.0, -20.0),
    "beyond half of a finite one": (-100.0, -51.0, -49.0),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_an_additive_source_has_a_key_above_half_of_its_fill(name: str) -> None:
    fill, hidden, seen = ROWS[name]
    spec = _spec(mask=MaskSpec(padding=True, fill=fill, empty_row=EmptyRow.ZERO))
    made = Masked(spec, 4, 5, key_padding=np.ones((B, 5), np.int64))
    array = np.full((B, 1, 4, 5), hidden, np.float32)
    array[0, 0, 1, 3] = array[1, 0, 3, 0] = seen
    made.with_source(array, "additive")
    (found,) = made.bench.run(made.mask.row_has_key())
    expected = np.zeros((B, 1, 4, 1), np.bool_)
    expected[0, 0, 1] = expected[1, 0, 3] = True
    np.testing.assert_array_equal(found, expected)


def test_a_row_of_a_boolean_source_has_a_key() -> None:
    made = Masked(_spec(mask=MaskSpec(padding=True, **ZERO)), 4, 5, key_padding=np.ones((B, 5)))
    keep = np.zeros((B, 1, 4, 5), np.bool_)
    keep[1, 0, 2, 4] = True
    made.with_source(keep, "keep")
    (found,) = made.bench.run(made.mask.row_has_key())
    np.testing.assert_array_equal(found[..., 0], keep.any(-1))


def test_a_bias_of_minus_infinity_empties_a_row() -> None:
    """Alone, and together with a rule: each leaves a key that the other hides."""
    bias = np.array([[0.0, -np.inf], [-np.inf, -np.inf], [-np.inf, 0.0]])
    for mask, side, expected in (
        (MaskSpec(**ZERO, bias=("q_len", "kv_len")), {}, [True, False, True]),
        (
            MaskSpec(**ZERO, bias=("q_len", "kv_len"), padding=True),
            {"key_padding": np.array([[0, 1]] * B)},
            [False, False, True],
        ),
    ):
        made = Masked(_spec(mask=mask), 3, 2, bias=bias, **side)
        (found,) = made.bench.run(made.mask.row_has_key())
        assert found[0, 0, :, 0].tolist() == expected


# The whole [.., s, t]


def test_a_mask_of_keys_alone_is_expanded() -> None:
    spec = _spec(mask=MaskSpec(padding=True, **ZERO))
    made = Masked(spec, 4, 5, key_padding=np.array([[1, 0, 1, 1, 0]] * B))
    parts = hiding_parts(spec)
    value = made.mask.additive(parts, -1.0)
    assert value is not None
    assert made.bench.run(value)[0].shape == (B, 1, 1, 5)
    assert made.bench.run(made.mask.full(value, parts))[0].shape == (B, 1, 4, 5)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"causal": TOP_LEFT}, True),
        ({"left_window": 1}, True),
        ({"right_window": 1}, True),
        ({"block": 2}, True),
        ({"alibi_slopes": ALIBI}, True),
        ({"alibi_slopes": ALIBI, "padding": True} | ZERO, True),
        ({"causal": TOP_LEFT, "padding": True} | ZERO, True),
        ({"padding": True} | ZERO, False),
        ({"bias": ("q_len", "kv_len")}, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_whole_is_not_expanded(fields: dict[str, Any], full: bool) -> None:
    spec = _spec(mask=MaskSpec(**fields))
    side: dict[str, Any] = {}
    if spec.mask.padding:
        side["key_padding"] = np.ones((B, 5), np.int64)
    if spec.mask.bias:
        side["bias"] = np.zeros((4, 5))
    made = Masked(spec, 4, 5, **side)
    parts = hiding_parts(spec)
    value = made.mask.additive(parts, -1.0)
    assert value is not None
    whole = made.mask.full(value, parts)
    assert (whole is value) is full
    assert made.bench.run(whole)[0].shape[-2:] == (4, 5)


@pytest.mark.parametrize(
    ("shape", "parts", "full"),
    [
        ((B, 1, "q_len", "kv_len"), {"causal"}, True),
        ((1, 1, "q_len", "kv_len"), {"padding"}, True),
        ((B, 1, "q_len", "t"), {"causal"}, False),
        ((B, 1, 1, "kv_len"), {"causal"}, False),
        (("q_len", "kv_len"), {"causal"}, False),
        ((B, "q_len", "kv_len"), {"causal"}, False),
        (None, {"causal"}, False),
        ((B, 1, "q_len", "kv_len"), set(), False),
    ],
    ids=str,
)
def test_a_source_mask_is_whole_where_its_shape_says_so(
    shape: tuple[Any, ...] | None, parts: set[str], full: bool
) -> None:
    spec = _spec(mask=MaskSpec(causal=TOP_LEFT))
    made = Masked(spec, 4, 5)
    numbers = {"q_len": 4, "kv_len": 5, "t": 5}
    known = shape if shape is not None else (B, 1, "q_len", "kv_len")
    array = np.zeros([numbers.get(n, n) for n in known], np.float32)
    made.with_source(array, "additive", known)
    assert made.operands.score_mask is not None
    value = made.operands.score_mask.value
    if shape is None:
        value.shape = None
    whole = made.mask.full(value, frozenset(parts))
    assert (whole is value) is full
    assert made.bench.run(whole)[0].shape[-2:] == (4, 5)


# Which parts there are

PART_OF: dict[str, dict[str, Any]] = {
    "causal": {"causal": TOP_LEFT},
    "left_window": {"left_window": 0},
    "right_window": {"right_window": 0},
    "keep": {"keep": ("kv_len",)} | ZERO,
    "padding": {"padding": True} | ZERO,
    "lengths": {"lengths": True} | ZERO,
    "block": {"block": 1},
    "documents": {"documents": True},
    "bias": {"bias": ("m",)},
}


@pytest.mark.parametrize("name", PART_OF)
def test_each_rule_is_a_part(name: str) -> None:
    assert hiding_parts(_spec(mask=MaskSpec(**PART_OF[name]))) == {name}
    assert hiding_parts(_spec()) == set()


def test_a_static_cache_has_lengths_and_a_concat_cache_none() -> None:
    assert hiding_parts(_spec(cache=CacheSpec(growth="static"))) == {"lengths"}
    assert hiding_parts(_spec(cache=CacheSpec())) == set()


def test_what_is_added_to_scores() -> None:
    assert added_parts(MaskSpec()) == ()
    assert added_parts(MaskSpec(bias=("kv_len",))) == ("bias",)
    assert added_parts(MaskSpec(alibi_slopes=ALIBI)) == ("alibi",)
    assert added_parts(MaskSpec(bias=("t",), alibi_slopes=ALIBI)) == ("bias", "alibi")


def test_only_the_name_of_the_keys_is_as_long_as_the_keys() -> None:
    spec = _spec()
    assert not may_be_shorter(("q_len", "kv_len"), spec)
    assert may_be_shorter(("kv_len", "q_len"), spec)
    assert may_be_shorter((5,), spec)
    assert not may_be_shorter((5,), spec.replace(kv_len=5))
