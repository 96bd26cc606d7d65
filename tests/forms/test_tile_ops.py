"""Tiles as the form writes them: an Attention node each, or two products, nothing needless."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from runtimes import OrtSession, compare

from mha_export.cases import cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, Unsupported, build_model, form_named
from mha_export.forms._counts import Span
from mha_export.forms._tiles import Tile
from mha_export.forms.tiled import _pieces
from mha_export.spec import AttentionSpec, CausalAlignment, DType, EmptyRow, MaskSpec

TOP_LEFT, BOTTOM_RIGHT = CausalAlignment.TOP_LEFT, CausalAlignment.BOTTOM_RIGHT
FORM = form_named("tiled")
OP = {"product": "attention"}
CAUSAL = MaskSpec(causal=TOP_LEFT)
SIZES = {"q_len": 12, "kv_len": 12}
SQUARE = {"q_len": "s", "kv_len": "s"}
ZERO = EmptyRow.ZERO


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 16, "mask": CAUSAL} | fields)


def _model(spec: AttentionSpec, *, opset: int = 23, **options: Any) -> ir.Model:
    return build_model(FORM, spec, FormParams(opset=opset, options={"tiles": 4} | options))


def _nodes(model: ir.Model, op_type: str = "Attention") -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def _wrong(spec: AttentionSpec, model: ir.Model, dims: dict[str, int]) -> list[str]:
    case = next(iter(cases(spec, dims=dims, battery="quick")))
    outputs = OrtSession(model).run(feeds(spec, case.inputs))
    return [str(found) for found in compare(spec, case, oracle_outputs(spec, outputs))]


def _refused(spec: AttentionSpec, opset: int = 23, **options: Any) -> str | None:
    verdict = FORM.supports(spec, FormParams(opset=opset, options=OP | options))
    return verdict.feature if isinstance(verdict, Unsupported) else None


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        (_spec(), None),
        (_spec(scale=1e-9), None),
        (_spec(scale=0.0), "scale"),
        (_spec(scale=-1.0), "scale"),
        (_spec(sinks=True), "sinks"),
        (_spec(softcap=2.0), "softcap"),
        (_spec(mask=MaskSpec(causal=TOP_LEFT, fill=-9.0)), "fill"),
        (_spec(mask=MaskSpec(causal=TOP_LEFT, fill="min")), None),
        (_spec(mask=MaskSpec(bias=("q_len", "kv_len"))), "bias"),
        (_spec(mask=MaskSpec(alibi_slopes=(1.0, 0.5, 0.25, 0.125))), "bias"),
    ],
)
def test_what_tiles_of_an_op_cannot_state(spec: AttentionSpec, refused: str | None) -> None:
    assert _refused(spec) == refused


def test_tiles_of_an_op_need_its_opset_and_none_of_the_other_choices() -> None:
    assert _refused(_spec(), 22) == "product"
    assert _refused(_spec(), mask="tile") == "product"
    assert _refused(_spec(), heads="rows") == "product"


@pytest.mark.parametrize(
    ("tiles", "refused"), [(0, "tiles"), (1, None), (256, None), (257, "tiles")]
)
def test_as_many_tiles_as_one_may_ask_for(tiles: int, refused: str | None) -> None:
    assert _refused(_spec(), tiles=tiles) == refused


SCALED = [_spec(**SIZES, scale=0.7), _spec(**SQUARE, scale=0.7), _spec(**SIZES, scale=1.0)]


@pytest.mark.parametrize("spec", SCALED)
def test_the_scale_is_said_of_every_tile(spec: AttentionSpec) -> None:
    model = _model(spec, **OP)
    found = [node.attributes["scale"].as_float() for node in _nodes(model)]
    assert found == pytest.approx([spec.scale] * 4)
    assert not _wrong(spec, model, {"batch": 3, "q_len": 12, "kv_len": 12})


def test_the_precision_of_softmax_is_said_of_every_tile() -> None:
    narrow = _spec(**SIZES, io_dtype=DType.FP16)
    wide = narrow.replace(softmax_dtype=DType.FP32)
    for spec, expected in ((narrow, [None] * 4), (wide, [1] * 4)):
        nodes = _nodes(_model(spec, **OP))
        precision = [node.attributes.get("softmax_precision") for node in nodes]
        assert [None if p is None else p.as_int() for p in precision] == expected


def test_a_causal_tile_grows_the_keys_of_the_one_before() -> None:
    """The first has no past, the last a mask and no present; each between has both."""
    nodes = _nodes(_model(_spec(**SIZES), **OP))
    causal = ["is_causal" in node.attributes for node in nodes]
    assert causal == [True, True, True, False]
    inputs = [[value is not None for value in node.inputs] for node in nodes]
    own, past = [True] * 3, [True] * 3 + [False, True, True]
    assert inputs == [own, past, past, [True] * 4]
    assert [len(node.outputs) for node in nodes] == [1, 3, 3, 1]
    typed = {value.dtype for node in nodes for value in node.outputs}
    assert typed == {ir.DataType.FLOAT}


@pytest.mark.parametrize(
    "spec",
    [
        _spec(**SQUARE),
        _spec(q_len=12, kv_len=16),
        _spec(q_len=12, kv_len=16, mask=MaskSpec(causal=BOTTOM_RIGHT)),
        _spec(**SIZES, mask=MaskSpec(causal=TOP_LEFT, left_window=4)),
        _spec(**SIZES, mask=MaskSpec(causal=TOP_LEFT, prefix=True)),
        _spec(**SIZES, mask=MaskSpec(causal=BOTTOM_RIGHT, lengths=True, empty_row=ZERO)),
        _spec(**SIZES, mask=MaskSpec()),
    ],
    ids=["symbols", "more-keys", "offset", "window", "prefix", "lengths", "none"],
)
def test_other_tiles_have_a_mask_each(spec: AttentionSpec) -> None:
    """Keys do not grow from tile to tile."""
    nodes = _nodes(_model(spec, **OP))
    assert len(nodes) == 4
    assert not any("is_causal" in node.attributes for node in nodes)
    masked = spec.mask != MaskSpec()
    assert [len(node.inputs) for node in nodes] == [4 if masked else 3] * 4
    assert [len(node.outputs) for node in nodes] == [1] * 4


@pytest.mark.parametrize(
    "mask",
    [
        MaskSpec(padding=True, empty_row=ZERO),
        MaskSpec(lengths=True, empty_row=ZERO),
        MaskSpec(causal=TOP_LEFT, prefix=True),
        MaskSpec(causal=BOTTOM_RIGHT, lengths=True, empty_row=ZERO),
    ],
    ids=["padding", "lengths", "prefix", "lengths-causal"],
)
@pytest.mark.parametrize("options", [OP, {"heads": "broadcast"}, {"heads": "rows"}])
@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["numbers", "symbols"])
def test_masks_that_differ_by_batch_row(
    mask: MaskSpec, options: dict[str, str], sizes: dict[str, Any]
) -> None:
    spec = _spec(mask=mask, **sizes)
    assert not _wrong(spec, _model(spec, **options), {"batch": 3, "q_len": 12, "kv_len": 12})


@pytest.mark.parametrize("policy", [EmptyRow.ZERO, EmptyRow.NAN, EmptyRow.UNIFORM])
@pytest.mark.parametrize("options", [OP, {}], ids=["op", "products"])
def test_rows_are_put_in_place_where_the_tile_does_not_give_them(
    policy: EmptyRow, options: dict[str, str]
) -> None:
    """Products of -inf give NaN by themselves; an op is not relied on."""
    mask = MaskSpec(causal=TOP_LEFT, padding=True, empty_row=policy)
    fixed = len([
        node
        for node in _nodes(_model(_spec(mask=mask, **SIZES), **options), "Where")
        if node.outputs[0].dtype is ir.DataType.FLOAT and len(node.outputs[0].uses()) == 1
        and next(iter(node.outputs[0].uses())).node.op_type == "Transpose"
    ])  # fmt: skip
    assert fixed == (0 if policy is EmptyRow.NAN and not options else 4)


def test_keys_that_all_queries_see_are_a_piece_without_a_mask() -> None:
    rows, keys = Span(start=4, end=8), Span(start=0, end=8)
    assert _pieces(Tile(rows=rows, keys=keys, free=None)) == [(keys, True)]
    free = Span(start=2, end=6)
    before, after = Span(start=0, end=2), Span(start=6, end=8)
    expected = [(before, True), (free, False), (after, True)]
    assert _pieces(Tile(rows=rows, keys=keys, free=free)) == expected
    assert _pieces(Tile(rows=rows, keys=keys, free=keys)) == [(keys, False)]
    start = Span(start=0, end=6)
    assert _pieces(Tile(rows=rows, keys=keys, free=start)) == [(start, False), (after, True)]


@pytest.mark.parametrize(("mask", "pieces"), [("diagonal", 2), ("tile", 1)])
@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["numbers", "symbols"])
def test_a_tile_has_one_mask_or_the_diagonal_s(
    mask: str, pieces: int, sizes: dict[str, Any]
) -> None:
    """Tiles after the first: keys before the diagonal are a product of their own."""
    products = len(_nodes(_model(_spec(**sizes), mask=mask), "MatMul"))
    assert products == 4 * 2 + 3 * (pieces - 1)


def test_an_op_looks_for_no_keys_without_a_mask() -> None:
    """It reads a tile's keys as a whole: a diagonal apart would be arithmetic for nothing."""
    spec = _spec(**SQUARE)
    cuts = len(_nodes(_model(spec, **OP), "Min"))
    assert cuts == len(_nodes(_model(spec, mask="tile"), "Min"))


def test_tiles_of_numbers_are_joined_and_no_row_is_cut() -> None:
    model = _model(_spec(**SIZES, mask=MaskSpec(left_window=1)))
    joined = [node for node in _nodes(model, "Concat") if node.attributes["axis"].as_int() == 1]
    assert len(joined) == 1
    assert joined[0].outputs[0].dtype is ir.DataType.FLOAT
    assert [use.node.op_type for use in joined[0].outputs[0].uses()] == ["Reshape"]
    np.testing.assert_array_equal(len(joined[0].inputs), 4)


@pytest.mark.parametrize("options", [OP, {}], ids=["op", "products"])
@pytest.mark.parametrize(("tiles", "joins"), [(1, 0), (2, 1), (3, 1)])
def test_one_tile_is_not_joined(tiles: int, joins: int, options: dict[str, str]) -> None:
    spec = _spec(**SIZES)
    model = _model(spec, **options | {"tiles": tiles})
    joined = [node for node in _nodes(model, "Concat") if node.attributes["axis"].as_int() == 1]
    assert [len(node.inputs) for node in joined] == [tiles] * joins


def test_positions_meet_scores_of_groups_as_the_product_has_them() -> None:
    """However many parts they are: nothing is reshaped between the two products."""
    several = {"left_window": 9, "right_window": 9, "block": 12}
    causal, four = (
        _nodes(_model(_spec(mask=mask, **SIZES), heads="broadcast"), "Reshape")
        for mask in (CAUSAL, MaskSpec(causal=TOP_LEFT, **several))
    )
    assert len(causal) == len(four)
    padded = MaskSpec(causal=TOP_LEFT, padding=True, empty_row=ZERO)
    assert len(_nodes(_model(_spec(mask=padded, **SIZES), heads="broadcast"), "Reshape")) > len(
        four
    )
