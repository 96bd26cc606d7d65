"""What a canonical graph binds for a form: positions and tables of rotary, values out of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import Bench

from mha_export.errors import InputError
from mha_export.forms import all_forms, form_named
from mha_export.forms._inputs import GraphInputs, bind
from mha_export.operands import Layout, Operands
from mha_export.oracle import rotary_tables
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    RotarySpec,
)

CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
LENGTHS = {"batch": 2, "q_len": 3, "kv_len": 5, "past_len": 4}


class BoundSpec:
    """The operands of a spec, over inputs of zeros unless they are given."""

    def __init__(self, **fields: Any) -> None:
        self.spec = AttentionSpec(**{"q_heads": 2, "kv_heads": 2, "head_dim": 8} | fields)
        self.bench = Bench()
        self.inputs = GraphInputs(self.spec)
        self.operands: Operands = bind(self.bench.scope, self.spec, self.inputs, {})

    def run(self, *values: ir.Value, **given: Any) -> list[np.ndarray]:
        """``given``: arrays of inputs, and lengths that are not those of the table above."""
        lengths = LENGTHS | {name: size for name, size in given.items() if isinstance(size, int)}
        self.bench.inputs = self.inputs.values
        for value in self.inputs.values:
            sizes = [size if isinstance(size, int) else size.value for size in value.shape or ()]
            shape = [size if isinstance(size, int) else lengths[str(size)] for size in sizes]
            assert value.dtype is not None
            self.bench.arrays[str(value.name)] = np.zeros(shape, value.dtype.numpy())
        self.bench.arrays |= {n: array for n, array in given.items() if n not in lengths}
        return self.bench.run(*values)


ROTARY = RotarySpec(dim=6, theta=50.0, max_positions=16)
POSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[int]]]] = {
    "no cache": ({}, {}, [[0, 1, 2]] * 2),
    "concat": ({"cache": CacheSpec(), "mask": CAUSAL}, {}, [[4, 5, 6]] * 2),
    "static": (
        {"cache": CacheSpec(growth="static", max_length=9), "mask": CAUSAL},
        {"kv_lengths": np.array([3, 8])},
        [[0, 1, 2], [5, 6, 7]],
    ),
    "one query": ({"cache": CacheSpec(), "mask": CAUSAL}, {"q_len": 1}, [[4]] * 2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_go_on_where_the_cache_ends(name: str) -> None:
    fields, given, expected = POSITIONS[name]
    bound = BoundSpec(rotary=ROTARY, **fields)
    tables = bound.operands.rotary
    assert tables is not None
    assert tables.position_ids is not None
    (found,) = bound.run(tables.position_ids, **given)
    assert found.tolist() == expected
    assert found.dtype == np.int64


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16])
def test_tables_of_a_stated_base_are_constants(dtype: DType) -> None:
    bound = BoundSpec(rotary=ROTARY, io_dtype=dtype)
    tables = bound.operands.rotary
    assert tables is not None
    assert tables.half_width
    for value, exact in zip(
        (tables.cos, tables.sin), rotary_tables(ROTARY, np.arange(16)), strict=True
    ):
        assert value.const_value is not None
        array = value.const_value.numpy()
        assert array.dtype == (np.float32 if dtype is DType.FP32 else np.float16)
        np.testing.assert_allclose(array.astype(float), exact, atol=1e-3)


KEY_TABLES: dict[str, tuple[dict[str, Any], bool]] = {
    "cross": ({"cross": True}, True),
    "lengths that may differ": ({}, True),
    "equal lengths": ({"q_len": "s", "kv_len": "s"}, False),
    "cache": ({"cache": CacheSpec(), "mask": CAUSAL}, False),
    "given positions": ({"positions": "input"}, False),
    "given positions of queries alone": ({"cross": True, "positions": "input"}, True),
    "keys that come rotated": ({"cross": True, "key": False}, False),
}


@pytest.mark.parametrize("name", KEY_TABLES)
def test_keys_of_another_sequence_count_from_zero(name: str) -> None:
    fields, own_tables = KEY_TABLES[name]
    fields = dict(fields)
    own = {key: fields.pop(key) for key in ("positions", "key") if key in fields}
    rotary = RotarySpec(dim=6, theta=50.0, max_positions=16, **own)
    bound = BoundSpec(rotary=rotary, **fields)
    tables = bound.operands.rotary
    assert tables is not None
    if not own_tables:
        assert tables.key_cos is tables.key_sin is None
        return
    assert tables.key_cos is not None
    assert tables.key_sin is not None
    found = bound.run(tables.key_cos, tables.key_sin)
    exact = rotary_tables(rotary, np.arange(LENGTHS["kv_len"])[None])
    for array, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "keys"),
    [({"cross": True}, True), ({}, False), ({"cross": True, "key": False}, False)],
    ids=["cross", "self", "rotated already"],
)
def test_given_tables_of_the_keys(fields: dict[str, Any], keys: bool) -> None:
    fields = dict(fields)
    rotary = RotarySpec(dim=6, key=fields.pop("key", True))
    bound = BoundSpec(rotary=rotary, **fields)
    names = [value.name for value in bound.inputs.values]
    assert names[3:] == (["cos", "sin", "key_cos", "key_sin"] if keys else ["cos", "sin"])
    tables = bound.operands.rotary
    assert tables is not None
    assert (tables.key_cos is not None) is (tables.key_sin is not None) is keys
    assert tables.cos.shape == ir.Shape(["table_batch", "q_len", 3])


def test_no_rotary_no_tables() -> None:
    assert BoundSpec().operands.rotary is None


def test_a_value_out_of_the_key_is_the_key() -> None:
    bound = BoundSpec(value_source="key_prefix", v_head_dim=4, cache=CacheSpec(), mask=CAUSAL)
    assert bound.operands.value is bound.operands.key
    assert bound.operands.past_value is None
    assert bound.operands.past_key is not None
    assert [value.name for value in bound.inputs.values] == ["query", "key", "past_key"]


def test_values_of_their_own_width() -> None:
    bound = BoundSpec(kv_heads=1, v_head_dim=4, cache=CacheSpec(layout="bshd"), mask=CAUSAL)
    value, past = bound.operands.value, bound.operands.past_value
    assert past is not None
    assert (value.layout, value.heads, value.dim) == (Layout.BSM, 1, 4)
    assert (past.layout, past.heads, past.dim) == (Layout.BSHD, 1, 4)
    assert past.value.shape == ir.Shape(["batch", "past_len", 1, 4])


def test_new_keys_of_a_cache_of_numbers_have_a_length_of_their_own() -> None:
    """ONNX allows a past and new keys that do not add up to the queries; a name leaves it open."""
    for fields, expected in (
        ({"q_len": 3, "kv_len": 7}, "new_len"),
        ({"q_len": 3}, 3),
        ({"kv_len": 7}, "q_len"),
        ({"q_len": 3, "kv_len": 7, "cache": CacheSpec(growth="static")}, 3),
        ({"q_len": 3, "kv_len": 7, "cache": None}, 7),
    ):
        bound = BoundSpec(**{"cache": CacheSpec(), "mask": CAUSAL} | fields)
        assert bound.operands.key.value.shape == ir.Shape(["batch", expected, 16])


TYPES = {
    "keep": ir.DataType.BOOL,
    "bias": ir.DataType.FLOAT16,
    "key_padding": ir.DataType.INT64,
    "kv_lengths": ir.DataType.INT64,
    "prefix_lengths": ir.DataType.INT64,
    "document_ids": ir.DataType.INT64,
    "query": ir.DataType.FLOAT16,
    "sinks": ir.DataType.FLOAT16,
    "position_ids": ir.DataType.INT64,
}


def test_inputs_have_the_type_of_their_operand() -> None:
    mask = MaskSpec(
        causal=CausalAlignment.BOTTOM_RIGHT,
        keep=("kv_len",),
        bias=("kv_len",),
        padding=True,
        lengths=True,
        prefix=True,
        documents=True,
        empty_row=EmptyRow.ZERO,
    )
    rotary = RotarySpec(dim=8, positions="input")
    bound = BoundSpec(mask=mask, sinks=True, rotary=rotary, io_dtype=DType.FP16)
    found = {value.name: value.dtype for value in bound.inputs.values}
    assert {name: found[name] for name in TYPES} == TYPES
    for name in ("keep", "bias", "key_padding", "kv_lengths", "prefix_lengths", "document_ids"):
        assert getattr(bound.operands, name).name == name
    assert bound.operands.sinks is not None


def test_what_is_not_stated_is_not_bound() -> None:
    operands = BoundSpec().operands
    assert {name for name, _ in operands.values()} == {"query", "key", "value"}


def test_an_unknown_form_is_answered_with_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown form 'flash'") as caught:
        form_named("flash")
    assert all(name in str(caught.value) for name in all_forms())


def test_packed_weights_reach_the_form_that_projects_itself() -> None:
    spec = AttentionSpec(
        q_heads=2, kv_heads=2, head_dim=8, projections=ProjectionSpec(d_model=6, packing="packed")
    )
    bench = Bench()
    weight = bench.value("w_qkv", np.zeros((6, 48), np.float32))
    operands = bind(bench.scope, spec, GraphInputs(spec), {"w_qkv": weight})
    assert operands.projection is not None
    assert operands.projection.weight is weight
    assert operands.projection.bias is None
