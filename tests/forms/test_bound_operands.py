"""Operands as a source graph has them: which of them a fused node reads, and in which layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.forms import FormParams, Scope, form_named
from mha_export.operands import Heads, Layout, Operands, Projection, RotaryTables, ScoreMask
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    RotarySpec,
)

FLOAT, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64
TOP_LEFT = CausalAlignment.TOP_LEFT
MASK_INPUT = {"onnx": 3, "ort-gqa": 10, "ort-mha": 5, "ort-attention": 5}
OPS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")


def _value(name: str, dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype))


def _heads(name: str, layout: Layout = Layout.BSM) -> Heads:
    return Heads(value=_value(name), layout=layout, heads=4, dim=16)


def _spec(**fields: Any) -> AttentionSpec:
    stated = {"q_heads": 4, "kv_heads": 4, "head_dim": 16, "q_len": "s", "kv_len": "s"}
    return AttentionSpec(**stated | fields)


class Emitted:
    """The nodes of one emission, and the fused one among them."""

    def __init__(self, form: str, spec: AttentionSpec, opset: int = 23, **operands: Any) -> None:
        self.scope = Scope("", opset=opset)
        if form == "ort-attention":
            operands["projection"] = Projection(value=_value("x"), weight=_value("w"))
        named = {name: _heads(name) for name in ("query", "key", "value")} | operands
        self.emitted = form_named(form).emit(
            self.scope, spec, FormParams(opset=opset), Operands(**named)
        )
        (self.node,) = (node for node in self.scope.nodes if node.op_type in OPS)

    def input(self, at: int) -> ir.Value | None:
        return self.node.inputs[at] if at < len(self.node.inputs) else None

    @property
    def types(self) -> list[str]:
        return [node.op_type for node in self.scope.nodes]

    @property
    def read(self) -> set[str]:
        return {str(v.name) for node in self.scope.nodes for v in node.inputs if v is not None}


def _bound(kind: Any) -> dict[str, ScoreMask]:
    value = _value("score_mask", BOOL if kind == "keep" else FLOAT)
    value.shape = ir.Shape([1, 1, "s", "s"])
    return {"score_mask": ScoreMask(value=value, kind=kind)}


@pytest.mark.parametrize("kind", ["keep", "additive"])
@pytest.mark.parametrize("form", ["onnx", "ort-gqa", "ort-mha", "ort-attention"])
def test_a_bound_mask_is_not_read_where_an_attribute_says_it(form: str, kind: str) -> None:
    made = Emitted(form, _spec(mask=MaskSpec(causal=TOP_LEFT)), **_bound(kind))
    assert made.types == [made.node.op_type] or form == "ort-gqa"
    assert made.input(MASK_INPUT[form]) is None
    said = {"onnx": "is_causal", "ort-gqa": "num_heads"}.get(form, "unidirectional")
    assert said in made.node.attributes
    assert "score_mask" not in made.read


@pytest.mark.parametrize("kind", ["keep", "additive"])
@pytest.mark.parametrize("form", ["onnx", "ort-mha", "ort-attention"])
def test_a_bound_mask_stands_for_all_parts_at_once(form: str, kind: str) -> None:
    """What it says beside the diagonal is not known apart, so the diagonal is left to it too."""
    spec = _spec(mask=MaskSpec(causal=TOP_LEFT, left_window=2))
    made = Emitted(form, spec, **_bound(kind))
    assert not {"is_causal", "unidirectional"} & set(made.node.attributes)
    assert "score_mask" in made.read


def test_a_bound_keep_mask_goes_into_the_op_as_it_is() -> None:
    spec = _spec(mask=MaskSpec(keep=("s", "s"), empty_row=EmptyRow.ZERO))
    made = Emitted("onnx", spec, **_bound("keep"))
    assert made.types == ["Attention"]
    mask = made.input(3)
    assert mask is not None
    assert mask.name == "score_mask"


def test_a_bound_additive_mask_is_added_not_taken_for_a_boolean() -> None:
    spec = _spec(mask=MaskSpec(keep=("s", "s"), empty_row=EmptyRow.ZERO))
    made = Emitted("onnx", spec, **_bound("additive"))
    mask = made.input(3)
    assert mask is not None
    assert mask.dtype is FLOAT
    assert "score_mask" in made.read


@pytest.mark.parametrize("kind", ["keep", "additive"])
def test_a_bound_mask_of_a_spec_that_adds_is_not_boolean(kind: str) -> None:
    spec = _spec(mask=MaskSpec(padding=True, fill=-9.0, empty_row=EmptyRow.FINITE))
    made = Emitted("onnx", spec, **_bound(kind))
    mask = made.input(3)
    assert mask is not None
    assert mask.dtype is FLOAT


TABLES = {"cos": "cos", "sin": "sin"}
KEY_TABLES = TABLES | {"key_cos": "key_cos", "key_sin": "key_sin"}


def _rotated(tables: dict[str, str]) -> dict[str, Any]:
    return {
        "rotary": RotaryTables(**{field: _value(name) for field, name in tables.items()}),
        "past_key": _heads("past_key", Layout.BHSD),
        "past_value": _heads("past_value", Layout.BHSD),
    }


PAST_INPUT = {"onnx": 4, "ort-mha": 6}


@pytest.mark.parametrize("form", PAST_INPUT)
def test_a_cache_whose_keys_are_rotated_later_is_not_the_op_s(form: str) -> None:
    spec = _spec(
        mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT),
        cache=CacheSpec(),
        rotary=RotarySpec(dim=16),
        q_len="q_len",
        kv_len="kv_len",
    )
    own = Emitted(form, spec, **_rotated(TABLES))
    past = own.input(PAST_INPUT[form])
    assert past is not None
    assert past.name == "past_key"
    later = Emitted(form, spec, **_rotated(KEY_TABLES))
    assert later.input(PAST_INPUT[form]) is None
    assert later.emitted.present_key is not None
    assert later.emitted.present_key.value.producer().op_type == "Concat"


B, F = Layout.BHSD, Layout.BSM


@pytest.mark.parametrize(
    ("layouts", "rank", "moves"),
    [
        ((F, F, F), F, []),
        ((B, B, B), B, []),
        ((B, F, F), F, ["Transpose", "Reshape"]),
        ((F, B, F), F, ["Transpose", "Reshape"]),
        ((B, B, F), B, ["Reshape", "Transpose"]),
        ((F, B, B), B, ["Reshape", "Transpose"]),
        ((Layout.BSHD, B, B), B, ["Transpose"]),
        ((Layout.BSHD, F, B), F, ["Reshape", "Transpose", "Reshape"]),
    ],
)
def test_the_most_of_three_layouts_wins(
    layouts: tuple[Layout, Layout, Layout], rank: Layout, moves: list[str]
) -> None:
    names = ("query", "key", "value")
    heads = {name: _heads(name, layout) for name, layout in zip(names, layouts, strict=True)}
    made = Emitted("onnx", _spec(), **heads)
    assert made.types == [*moves, "Attention"]
    assert made.emitted.output.layout is rank
    assert ("q_num_heads" in made.node.attributes) is (rank is F)


def test_a_projection_is_needed_by_the_form_that_has_it_inside() -> None:
    spec = _spec(projections=ProjectionSpec(d_model=8, packing="packed"))
    operands = Operands(**{name: _heads(name) for name in ("query", "key", "value")})
    with pytest.raises(ValueError, match=r"ort-attention needs operands\.projection"):
        form_named("ort-attention").emit(Scope("", opset=17), spec, FormParams(), operands)


def test_lengths_of_keys_are_int32_and_one_less() -> None:
    """GroupQueryAttention: valid keys - 1 by row, and the largest count as a scalar."""
    made = Emitted("ort-gqa", _spec())
    last, total = made.input(5), made.input(6)
    assert last is not None
    assert total is not None
    assert {last.dtype, total.dtype} == {ir.DataType.INT32}
    assert total.shape == ir.Shape([])
    sub = next(node for node in made.scope.nodes if node.op_type == "Sub")
    np.testing.assert_array_equal(sub.inputs[1].const_value.numpy(), [1])


@pytest.mark.parametrize("form", ["onnx", "ort-gqa", "ort-mha"])
def test_a_uniform_row_averages_over_the_past_too(form: str) -> None:
    """Over what the op has grown, not over the new values; without a cache they are all."""
    mask = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT, padding=True, empty_row=EmptyRow.UNIFORM)
    for cache in (None, CacheSpec()):
        past = {} if cache is None else {
            name: _heads(name, Layout.BHSD) for name in ("past_key", "past_value")
        }  # fmt: skip
        spec = _spec(mask=mask, cache=cache, batch=1)
        made = Emitted(form, spec, key_padding=_value("key_padding", INT64), **past)
        (mean,) = (node for node in made.scope.nodes if node.op_type == "ReduceMean")
        averaged = mean.inputs[0]
        while averaged.producer() is not None and averaged.producer().op_type in MOVES:
            averaged = averaged.producer().inputs[0]
        grown = averaged.producer() is made.node and averaged is made.node.outputs[2]
        assert grown if cache is not None else averaged.name == "value"


MOVES = ("Reshape", "Transpose", "Expand", "Unsqueeze")
