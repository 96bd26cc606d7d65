"""``tiled``: exact at every length, cut or not; what it must not read it does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import emitted_model, graph_input, run_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtimes import OrtSession, ReferenceSession, compare, mistakes
from strategies import attention_specs

from mha_export.cases import Case, cases
from mha_export.errors import InputError
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, Unsupported, build_model, form_named
from mha_export.forms._counts import Count, Counts, Span
from mha_export.forms._grouping import Groups
from mha_export.forms._layout import Sizes
from mha_export.forms._tile_mask import TileMask, visible
from mha_export.forms._tiles import Cuts, default_tiles
from mha_export.forms.tiled import MOST_TILES
from mha_export.operands import Heads, Layout, Operands, ScoreMask
from mha_export.oracle import attention
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkOutput,
)

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
SQUARE = {"q_len": "s", "kv_len": "s"}
FORM = form_named("tiled")


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 16} | fields)


def _causal(**mask: Any) -> MaskSpec:
    return MaskSpec(**{"causal": TOP_LEFT} | mask)


def _model(spec: AttentionSpec, *, opset: int = 13, **options: Any) -> ir.Model:
    return build_model(FORM, spec, FormParams(opset=opset, options=options))


def _case(spec: AttentionSpec, **dims: int) -> Case:
    return next(iter(cases(spec, dims={"batch": 1} | dims, battery="quick")))


def _exact(spec: AttentionSpec, case: Case, **options: Any) -> None:
    wrong = mistakes(spec, OrtSession(_model(spec, **options)), case)
    assert not wrong, "\n".join(str(finding) for finding in wrong)


def _types(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


LENGTHS = (1, 2, 7, 63, 64, 65)
LONG = 1000
DYNAMIC = {
    "causal": _spec(mask=_causal(), **SQUARE),
    "causal-one-head-each": _spec(kv_heads=4, mask=_causal(), **SQUARE),
    "window": _spec(mask=_causal(left_window=20), **SQUARE),
    "band": _spec(mask=MaskSpec(left_window=9, right_window=13), **SQUARE),
    "block": _spec(mask=MaskSpec(block=11), **SQUARE),
    "alibi": _spec(mask=_causal(alibi_slopes=(0.5, 0.25, 0.125, 0.0625)), **SQUARE),
    "sinks": _spec(sinks=True, softcap=3.0, mask=_causal(), **SQUARE),
    "padding": _spec(mask=_causal(padding=True, fill="min", empty_row=EmptyRow.UNIFORM), **SQUARE),
    "free": _spec(**SQUARE),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dynamic_length_is_exact(name: str) -> None:
    """One graph for all lengths, shorter than the tiles are many, and longer."""
    spec = DYNAMIC[name]
    session = OrtSession(_model(spec))
    for length in LENGTHS:
        wrong = mistakes(spec, session, _case(spec, q_len=length))
        assert not wrong, f"length {length}: {wrong[0]}"


@pytest.mark.parametrize("mask", [_causal(), _causal(left_window=20)], ids=["causal", "window"])
def test_a_long_dynamic_length_is_exact(mask: MaskSpec) -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=1, head_dim=8, mask=mask, **SQUARE)
    _exact(spec, _case(spec, q_len=LONG))


@pytest.mark.parametrize("mask", ["diagonal", "tile"])
@pytest.mark.parametrize("past", [0, 1, 11])
def test_a_past_before_fewer_queries_than_tiles(past: int, mask: str) -> None:
    spec = _spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec())
    session = OrtSession(_model(spec, mask=mask))
    for queries in (1, 2, 7, 8, 9, 17):
        case = _case(spec, q_len=queries, past_len=past, kv_len=past + queries)
        wrong = mistakes(spec, session, case)
        assert not wrong, f"{queries} queries: {wrong[0]}"


@pytest.mark.parametrize(
    "mask",
    [
        MaskSpec(causal=BOTTOM_RIGHT),
        MaskSpec(causal=TOP_LEFT),
        MaskSpec(causal=BOTTOM_RIGHT, left_window=2),
        MaskSpec(left_window=2, right_window=2),
        MaskSpec(causal=BOTTOM_RIGHT, block=3),
    ],
    ids=["bottom-right", "top-left", "bottom-right-window", "window", "bottom-right-block"],
)
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_other_keys_than_queries(mask: MaskSpec, static: bool) -> None:
    for queries, keys in ((1, 9), (5, 6), (5, 17), (9, 9)):
        sizes: dict[str, Any] = {"q_len": queries, "kv_len": keys} if static else {}
        spec = _spec(mask=mask, **sizes)
        _exact(spec, _case(spec, q_len=queries, kv_len=keys), tiles=4)


def test_queries_beyond_every_key_have_the_stated_row() -> None:
    """Bottom-right with fewer keys than queries: the first rows see nothing."""
    mask = MaskSpec(causal=BOTTOM_RIGHT, empty_row=EmptyRow.ZERO)
    for sizes in ({}, {"q_len": 9, "kv_len": 4}):
        spec = _spec(mask=mask, **sizes)
        rng = np.random.default_rng(1)
        arrays = {
            name: rng.standard_normal((1, length, heads * 16)).astype(np.float32)
            for name, length, heads in (("query", 9, 4), ("key", 4, 2), ("value", 4, 2))
        }
        found = OrtSession(_model(spec, tiles=4)).run(arrays)["output"]
        assert not found[:, :5].any()
        assert found[:, 5:].all()


@pytest.mark.parametrize("mask", ["diagonal", "tile"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("length", "tiles"), [(1, 8), (3, 8), (13, 4), (64, 8), (65, 8), (30, 7)])
def test_a_static_length_is_exact(length: int, tiles: int, dtype: DType, mask: str) -> None:
    spec = _spec(mask=_causal(), q_len=length, kv_len=length, io_dtype=dtype)
    case = _case(spec)
    model = _model(spec, tiles=tiles, mask=mask)
    wrong = mistakes(spec, OrtSession(model), case)
    assert not wrong, str(wrong[0])
    assert not {"Shape", "Range"} & _types(model), "lengths are known: nothing to compute"


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("width", [0, 1, 4, 5, 6, 14])
def test_windows_at_the_edges_of_tiles(width: int, side: str, static: bool) -> None:
    """Tiles of 5 rows; windows below, at and beyond a tile, alone and beside the diagonal."""
    mask = {
        "left": _causal(left_window=width),
        "right": MaskSpec(right_window=width),
        "both": MaskSpec(left_window=width, right_window=width + 1),
    }[side]
    spec = _spec(mask=mask, **({"q_len": 20, "kv_len": 20} if static else SQUARE))
    _exact(spec, _case(spec, q_len=20), tiles=4)


POLICIES = [
    ("-inf", EmptyRow.ZERO),
    ("-inf", EmptyRow.NAN),
    ("-inf", EmptyRow.UNIFORM),
    ("min", EmptyRow.UNIFORM),
    ("min", EmptyRow.FINITE),
    (-1e4, EmptyRow.FINITE),
]


@pytest.mark.parametrize(("fill", "policy"), POLICIES)
@pytest.mark.parametrize("causal", [None, TOP_LEFT], ids=["padded", "padded-causal"])
def test_rows_without_a_key(causal: CausalAlignment | None, fill: Any, policy: EmptyRow) -> None:
    """``uniform`` averages over all values, also those that the row's tile never reads."""
    mask = MaskSpec(causal=causal, padding=True, fill=fill, empty_row=policy)
    spec = _spec(mask=mask, **SQUARE)
    case = _case(spec, batch=2, q_len=9)
    padding = np.ones((2, 9), np.int64)
    padding[0, :4] = 0
    padding[1] = 0
    _exact(
        spec, dataclasses.replace(case, inputs=case.inputs.replace(key_padding=padding)), tiles=4
    )


def test_a_score_outbids_a_finite_fill() -> None:
    """So a finite fill leaves no key out of a tile; the form says that it does not."""
    mask = _causal(fill=-2.0)
    spec = _spec(mask=mask, **SQUARE)
    verdict = FORM.supports(spec, FormParams(opset=13))
    assert verdict
    assert "fill" in verdict.by_other_means
    case = _case(spec, q_len=9)
    _exact(spec, case, tiles=4)
    other = spec.replace(mask=_causal())
    hidden = attention(other, case.inputs).output - attention(spec, case.inputs).output
    assert np.abs(hidden).max() > 0.1, "the case must tell the two fills apart"


def test_a_static_prefix_is_seen_beyond_the_diagonal() -> None:
    spec = _spec(mask=_causal(prefix=True), q_len=12, kv_len=12)
    case = _case(spec)
    lengths = np.full(case.dims["batch"], 7)
    _exact(
        spec, dataclasses.replace(case, inputs=case.inputs.replace(prefix_lengths=lengths)), tiles=4
    )


def test_a_large_mask_is_computed_not_stored() -> None:
    """A file of many megabytes of zeros and -inf is nobody's wish."""
    sizes = {"q_len": 2048, "kv_len": 2048}
    stored = _model(_spec(mask=_causal(), **sizes), tiles=16, mask="tile")
    computed = _model(_spec(mask=_causal(), **sizes), tiles=1, mask="tile")
    masks = [
        [value for value in model.graph.initializers.values() if "tile_mask" in str(value.name)]
        for model in (stored, computed)
    ]
    assert [len(found) for found in masks] == [16, 0]


@pytest.mark.parametrize("rows", [1, 9])
def test_rows_of_a_name_of_their_own_may_broadcast(rows: int) -> None:
    """Whether such an axis is 1 is known at run time alone."""
    spec = _spec(mask=MaskSpec(keep=("rows", "s"), empty_row=EmptyRow.ZERO), **SQUARE)
    session = OrtSession(_model(spec, tiles=4))
    inputs = _case(_spec(**SQUARE), q_len=9).inputs
    keep = np.random.default_rng(6).random((rows, 9)) < 0.6
    inputs = inputs.replace(keep=keep)
    found = oracle_outputs(spec, session.run(feeds(spec, inputs)))["output"]
    np.testing.assert_allclose(found, attention(spec, inputs).output, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_wider_softmax(sinks: bool) -> None:
    mask = _causal()
    spec = _spec(mask=mask, sinks=sinks, io_dtype=DType.FP16, softmax_dtype=DType.FP32, **SQUARE)
    model = _model(spec, tiles=3)
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    assert softmax.inputs[0].dtype == ir.DataType.FLOAT
    wrong = mistakes(spec, OrtSession(model), _case(spec, q_len=7))
    assert not wrong, str(wrong[0])


# Tiles of an Attention node each

OP: dict[str, Any] = {"opset": 23, "product": "attention"}
OPS = ("causal", "causal-one-head-each", "window", "band", "block", "padding", "free")


@pytest.mark.parametrize("name", OPS)
def test_an_op_a_tile_is_exact_at_every_length(name: str) -> None:
    session = OrtSession(_model(DYNAMIC[name], **OP))
    for length in (*LENGTHS, LONG) if name in ("causal", "window") else LENGTHS:
        wrong = mistakes(DYNAMIC[name], session, _case(DYNAMIC[name], q_len=length))
        assert not wrong, f"length {length}: {wrong[0]}"


@pytest.mark.parametrize("past", [0, 1, 11])
def test_an_op_a_tile_after_a_past(past: int) -> None:
    spec = _spec(mask=MaskSpec(causal=BOTTOM_RIGHT), cache=CacheSpec())
    session = OrtSession(_model(spec, **OP))
    for queries in (1, 2, 7, 8, 9, 17):
        case = _case(spec, q_len=queries, past_len=past, kv_len=past + queries)
        wrong = mistakes(spec, session, case)
        assert not wrong, f"{queries} queries: {wrong[0]}"


@pytest.mark.parametrize(
    "mask",
    [_causal(), _causal(left_window=5), MaskSpec(block=5), MaskSpec(left_window=4, right_window=3)],
    ids=["causal", "window", "block", "band"],
)
@pytest.mark.parametrize(("length", "tiles"), [(1, 8), (3, 8), (13, 4), (64, 8), (65, 8), (30, 7)])
def test_an_op_a_tile_of_a_static_length_is_exact(length: int, tiles: int, mask: MaskSpec) -> None:
    """The last tile may be shorter, and be the second or the only one."""
    spec = _spec(mask=mask, q_len=length, kv_len=length)
    _exact(spec, _case(spec), tiles=tiles, **OP)


@pytest.mark.parametrize("causal", [TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (5, 6), (5, 17), (9, 9)])
def test_an_op_a_tile_of_other_keys_than_queries(
    causal: CausalAlignment, queries: int, keys: int
) -> None:
    mask = MaskSpec(causal=causal, empty_row=EmptyRow.ZERO)
    spec = _spec(mask=mask, q_len=queries, kv_len=keys)
    _exact(spec, _case(spec), tiles=4, **OP)


@pytest.mark.parametrize(("fill", "policy"), POLICIES[:-1])
@pytest.mark.parametrize("causal", [None, TOP_LEFT], ids=["padded", "padded-causal"])
def test_an_op_a_tile_has_the_stated_rows(
    causal: CausalAlignment | None, fill: Any, policy: EmptyRow
) -> None:
    mask = MaskSpec(causal=causal, padding=True, fill=fill, empty_row=policy)
    spec = _spec(mask=mask, **SQUARE)
    case = _case(spec, batch=2, q_len=9)
    padding = np.ones((2, 9), np.int64)
    padding[0, :4] = 0
    padding[1] = 0
    inputs = case.inputs.replace(key_padding=padding)
    _exact(spec, dataclasses.replace(case, inputs=inputs), tiles=4, **OP)


def test_static_causal_ops_need_one_mask() -> None:
    """The last tile's: constants of a mask a tile would be half of all scores."""
    sizes = {"q_len": 64, "kv_len": 64}
    model = _model(_spec(mask=_causal(), **sizes), tiles=8, **OP)
    masks = [v.shape for v in model.graph.initializers.values() if "tile_mask" in str(v.name)]
    assert masks == [ir.Shape([1, 1, 8, 64])]
    assert sum(node.op_type == "Attention" for node in model.graph) == 8


REFUSED_OPS = {
    "opset": (_spec(mask=_causal(), **SQUARE), 22, {}),
    "heads": (_spec(mask=_causal(), **SQUARE), 23, {"heads": "rows"}),
    "mask": (_spec(mask=_causal(), **SQUARE), 23, {"mask": "tile"}),
    "sinks": (_spec(sinks=True, mask=_causal(), **SQUARE), 23, {}),
    "softcap": (_spec(softcap=3.0, mask=_causal(), **SQUARE), 23, {}),
    "bias": (DYNAMIC["alibi"], 23, {}),
    "fill": (_spec(mask=_causal(fill=-5.0), **SQUARE), 23, {}),
    "scale": (_spec(scale=-1.0, mask=_causal(), **SQUARE), 23, {}),
}


@pytest.mark.parametrize("name", REFUSED_OPS)
def test_what_the_op_of_a_tile_cannot_say_is_refused(name: str) -> None:
    spec, opset, options = REFUSED_OPS[name]
    params = FormParams(opset=opset, options={"product": "attention", **options})
    verdict = FORM.supports(spec, params)
    assert isinstance(verdict, Unsupported)
    assert verdict.feature == (
        name if name in ("sinks", "softcap", "bias", "fill", "scale") else "product"
    )
    plain = FORM.supports(spec, FormParams(opset=opset, options=options))
    assert plain, "the products of MatMul say it"


# A mask that the source graph made

BOUND = {
    "b1st": lambda hidden: hidden[:, None],
    "11st": lambda hidden: hidden[:1, None],
    "st": lambda hidden: hidden[0],
    "b11t": lambda hidden: hidden[:, None, :1],
}


@pytest.mark.parametrize("kind", ["additive", "keep"])
@pytest.mark.parametrize("shape", BOUND)
@pytest.mark.parametrize("known", ["static", "shaped", "bare"])
def test_a_bound_mask_is_cut(known: str, shape: str, kind: str) -> None:
    """Causality and padding in one tensor: rows and columns of it go with their tile."""
    length, batch = 11, 2
    causal = None if shape == "b11t" else TOP_LEFT
    mask = MaskSpec(causal=causal, padding=True, empty_row=EmptyRow.ZERO)
    sizes: dict[str, Any] = {"q_len": length, "kv_len": length} if known == "static" else SQUARE
    spec = _spec(mask=mask, **sizes)
    inputs = _case(spec, batch=batch, q_len=length).inputs
    padding = np.ones((batch, length), np.int64)
    padding[:, [0, 5]] = 0
    if shape in ("b1st", "b11t"):
        padding[1, 7] = 0
    inputs = inputs.replace(key_padding=padding)
    hidden = np.broadcast_to(padding[:, None] == 0, (batch, length, length))
    if causal is not None:
        hidden = hidden | (np.arange(length) > np.arange(length)[:, None])
    hidden = BOUND[shape](hidden)
    array = np.where(hidden, -np.inf, 0.0).astype(np.float32) if kind == "additive" else ~hidden
    named, arrays = {}, {"key_padding": padding, "score_mask": np.ascontiguousarray(array)}
    for name in ("query", "key", "value"):
        arrays[name] = getattr(inputs, name).astype(np.float32)
        value = graph_input(name, arrays[name], shaped=known != "bare")
        heads, dim = arrays[name].shape[1], arrays[name].shape[3]
        named[name] = Heads(value=value, layout=Layout.BHSD, heads=heads, dim=dim)
    bound = graph_input("score_mask", arrays["score_mask"], shaped=known != "bare")
    if known == "static":
        bound.shape = ir.Shape(array.shape)
    operands = Operands(
        **named,
        key_padding=graph_input("key_padding", padding),
        score_mask=ScoreMask(value=bound, kind=kind),  # type: ignore[arg-type]
    )
    model, _ = emitted_model("tiled", spec, operands)
    found_bshd = run_model(model, arrays)["output"]
    expected_bhsd = attention(spec, inputs).output
    np.testing.assert_allclose(
        found_bshd.transpose(0, 2, 1, 3), expected_bhsd, rtol=2e-5, atol=2e-5
    )


# What is read, and what is emitted


class _Numbers:
    """The cuts of a spec of static lengths."""

    def __init__(self, spec: AttentionSpec, tiles: int, *, split: bool = True) -> None:
        from mha_export.forms import Scope

        scope = Scope("", opset=13)
        shape = ir.Shape([1, 4, spec.q_len, 16])
        query = ir.Value(name="q", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        key = ir.Value(name="k", type=query.type, shape=ir.Shape([1, 2, spec.kv_len, 16]))
        operands = Operands(
            query=Heads(value=query, layout=Layout.BHSD, heads=4, dim=16),
            key=Heads(value=key, layout=Layout.BHSD, heads=2, dim=16),
            value=Heads(value=key, layout=Layout.BHSD, heads=2, dim=16),
        )
        sizes = Sizes(scope, spec, operands)
        cuts = Cuts(scope, spec, operands, sizes, Counts(scope))
        self.tiles = cuts.tiles(tiles, split=split)
        assert not scope.nodes, "numbers need no nodes"


def _pair(span: Span | None) -> tuple[Count, Count] | None:
    return None if span is None else (span.start, span.end)


CUTS = [
    # mask, rows, keys, free
    (_causal(), [(0, 4), (4, 8), (8, 10)], [(0, 4), (0, 8), (0, 10)], [None, (0, 4), (0, 8)]),
    (MaskSpec(), [(0, 4), (4, 8), (8, 10)], [(0, 10)] * 3, [(0, 10)] * 3),
    (
        MaskSpec(left_window=1, right_window=1),
        [(0, 4), (4, 8), (8, 10)],
        [(0, 5), (3, 9), (7, 10)],
        [None, None, (8, 10)],
    ),
    (
        MaskSpec(block=5),
        [(0, 4), (4, 8), (8, 10)],
        [(0, 5), (0, 10), (5, 10)],
        [(0, 5), None, (5, 10)],
    ),
    (_causal(fill=-5.0), [(0, 4), (4, 8), (8, 10)], [(0, 10)] * 3, [None] * 3),
]


@pytest.mark.parametrize(
    ("mask", "rows", "keys", "free"), CUTS, ids=["causal", "free", "band", "block", "finite-fill"]
)
def test_the_cuts_of_ten_queries(mask: MaskSpec, rows: list, keys: list, free: list) -> None:
    tiles = _Numbers(_spec(mask=mask, q_len=10, kv_len=10), 3).tiles
    assert [_pair(tile.rows) for tile in tiles] == rows
    assert [_pair(tile.keys) for tile in tiles] == keys
    assert [_pair(tile.free) for tile in tiles] == free


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    q=st.integers(1, 40),
    extra=st.integers(0, 9),
    tiles=st.integers(1, 9),
    causal=st.sampled_from([None, TOP_LEFT, BOTTOM_RIGHT]),
    left=st.none() | st.integers(0, 12),
    right=st.none() | st.integers(0, 12),
    block=st.none() | st.integers(1, 12),
)
def test_a_tile_reads_what_it_sees_and_its_free_keys_are_free(
    q: int, extra: int, tiles: int, causal: Any, left: Any, right: Any, block: Any
) -> None:
    mask = MaskSpec(causal=causal, left_window=left, right_window=right, block=block)
    spec = _spec(mask=mask, q_len=q, kv_len=q + extra)
    offset = extra if causal is BOTTOM_RIGHT else 0
    seen = visible(mask, np.arange(q) + offset, np.arange(q + extra))
    covered = 0
    for tile in _Numbers(spec, tiles).tiles:
        (a, e), (lo, hi) = _pair(tile.rows), _pair(tile.keys)
        assert a == covered
        assert e > a
        assert 0 <= lo < hi <= q + extra
        covered = e
        outside = seen[a:e].copy()
        outside[:, lo:hi] = False
        assert not outside.any(), "a key that a query sees is not read"
        if tile.free is not None:
            first, last = _pair(tile.free)
            assert lo <= first <= last <= hi
            assert seen[a:e, first:last].all(), "a key that needs a mask has none"
    assert covered == q


def test_a_causal_mask_is_one_diagonal_block() -> None:
    """512 queries in 8 tiles: one constant of 64 x 64 serves all of them."""
    model = _model(_spec(mask=_causal(), q_len=512, kv_len=512), tiles=8)
    masks = [v for v in model.graph.initializers.values() if "tile_mask" in str(v.name)]
    assert [tuple(value.shape) for value in masks] == [(1, 1, 64, 64)]
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 8 + 7 + 8, "diagonal, before it, and values"


def test_keys_are_never_repeated() -> None:
    for sizes in (SQUARE, {"q_len": 64, "kv_len": 64}):
        assert not {"Expand", "Tile"} & _types(_model(_spec(mask=_causal(), **sizes)))


def test_plain_ops_of_opset_13() -> None:
    for spec in DYNAMIC.values():
        model = _model(spec)
        assert model.opset_imports == {"": 13}
        assert not {"Attention", "If", "Loop", "Scan"} & _types(model)


@pytest.mark.parametrize(
    ("length", "tiles"),
    [("s", 8), (1, 1), (64, 1), (65, 2), (128, 2), (512, 8), (1024, 8), (2048, 16), (4096, 32)],
)
def test_default_tiles(length: int | str, tiles: int) -> None:
    assert default_tiles(_spec(q_len=length, kv_len=length)) == tiles


@pytest.mark.parametrize(
    ("length", "tiles"), [("s", 8), (64, 1), (4096, 32), (8192, 64), (16384, 64)]
)
def test_default_tiles_of_a_window(length: int | str, tiles: int) -> None:
    assert default_tiles(_spec(q_len=length, kv_len=length, mask=_causal(left_window=9))) == tiles


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"tiles": 0}, "tiles"),
        ({"tiles": MOST_TILES + 1}, "tiles"),
        ({"tiles": True}, "tiles"),
        ({"tiles": "8"}, "tiles"),
        ({"tiles": 2.0}, "tiles"),
        ({"mask": "none"}, "mask"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], feature: str) -> None:
    spec = _spec(mask=_causal(), **SQUARE)
    verdict = FORM.supports(spec, FormParams(opset=13, options=options))
    assert isinstance(verdict, Unsupported)
    assert verdict.feature == feature
    with pytest.raises(InputError, match=feature):
        build_model(FORM, spec, FormParams(opset=13, options=options))


def test_scores_as_output_are_refused() -> None:
    verdict = FORM.supports(_spec(qk_output=QkOutput.RAW), FormParams(opset=13))
    assert isinstance(verdict, Unsupported)
    assert verdict.feature == "qk_output"


# Any spec, and other runtimes


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spec=attention_specs(without=("projections", "qk_output")),
    tiles=st.integers(1, 6),
    mask=st.sampled_from(["diagonal", "tile"]),
)
def test_any_spec_in_any_tiles(spec: AttentionSpec, tiles: int, mask: str) -> None:
    spec = spec.replace(io_dtype=DType.FP32, softmax_dtype=None)
    if not FORM.supports(spec, FormParams(opset=13)):
        return
    session = OrtSession(_model(spec, tiles=tiles, mask=mask))
    for case in cases(spec, battery="quick"):
        wrong = mistakes(spec, session, case)
        assert not wrong, str(wrong[0])


@pytest.mark.parametrize("name", ["causal", "window", "sinks", "padding"])
def test_the_reference_evaluator_agrees(name: str) -> None:
    spec = DYNAMIC[name]
    session = ReferenceSession(_model(spec))
    for length in (1, 3, 17):
        wrong = mistakes(spec, session, _case(spec, q_len=length))
        assert not wrong, str(wrong[0])


@pytest.mark.parametrize("name", ["causal", "window", "sinks", "padding"])
def test_openvino_agrees(name: str, openvino_run: Callable[..., dict]) -> None:
    spec = DYNAMIC[name]
    model = _model(spec, tiles=4)
    for length in (1, 9):
        case = _case(spec, q_len=length)
        outputs = openvino_run(model, feeds(spec, case.inputs))
        wrong = list(compare(spec, case, oracle_outputs(spec, outputs)))
        assert not wrong, f"length {length}: {wrong[0]}"


# Planted bugs: each is one edit of the form, and the cases catch it


def _early(keys: Callable) -> Callable:
    """Keys end one too early."""
    return lambda self, rows: Span(start=keys(self, rows).start, end=rows.end - 1)


def _late(lows: Callable) -> Callable:
    """The window's first key is left out."""
    return lambda self, rows: [count + 1 for count in lows(self, rows)]


def _freer(free: Callable) -> Callable:
    """One key too many goes without a mask."""

    def planted(self: Cuts, rows: Span, keys: Span) -> Span | None:
        found = free(self, rows, keys)
        return None if found is None else Span(start=found.start, end=found.end + 2)

    return planted


def _unshifted(positions: Callable) -> Callable:
    """Every tile's queries stand where the first tile's do."""

    def planted(self: TileMask) -> ir.Value:
        return self._counts.rows(
            self._whole.query_positions(), Span(start=0, end=self._rows.end - self._rows.start), 2
        )

    return planted


def _swapped(queries: Callable) -> Callable:
    """[b, h, s, d] as [b, g, k, ...]: heads tile where they interleave."""

    def planted(self: Groups, q_bhsd: ir.Value) -> ir.Value:
        apart = self._reshape(q_bhsd, 0, self.spec.group, self.spec.kv_heads, -1, 16)
        turned = self.scope.op("Transpose", [apart], {"perm": [0, 2, 1, 3, 4]}, dtype=apart.dtype)
        return self._reshape(turned, 0, self.spec.kv_heads, -1, 16) if self.rows else turned

    return planted


PLANTED = {
    "keys-end-early": (Cuts, "_keys", _early, _spec(mask=_causal(), q_len=12, kv_len=12)),
    "window-starts-late": (
        Cuts,
        "_lows",
        _late,
        _spec(mask=_causal(left_window=3), q_len=12, kv_len=12),
    ),
    "diagonal-unmasked": (
        Cuts,
        "_free_numbers",
        _freer,
        _spec(mask=_causal(), q_len=12, kv_len=12),
    ),
    "mask-of-another-tile": (
        TileMask,
        "query_positions",
        _unshifted,
        _spec(mask=_causal(padding=True, empty_row=EmptyRow.ZERO), q_len=12, kv_len=12),
    ),
    "heads-tiled": (Groups, "queries", _swapped, _spec(mask=_causal(), q_len=12, kv_len=12)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, plant, spec = PLANTED[bug]
    case = _case(spec)
    _exact(spec, case, tiles=4)
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    wrong = mistakes(spec, OrtSession(_model(spec, tiles=4)), case)
    assert wrong, "the case does not see it"


def test_a_planted_repeat_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tiles to spare that are not cut off are rows too many."""
    spec = _spec(mask=_causal(), **SQUARE)
    monkeypatch.setattr(Cuts, "repeats", False)
    arrays = feeds(spec, _case(spec, q_len=3).inputs)
    assert OrtSession(_model(spec)).run(arrays)["output"].shape[1] > 3
