"""What the inputs of a canonical graph are called, and the dimensions they are declared with."""

from __future__ import annotations

from typing import Any

import pytest

from mha_export.forms import FormParams, build_model, form_named
from mha_export.forms._weights import random_weights
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    JointSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
)

BOTTOM_RIGHT = CausalAlignment.BOTTOM_RIGHT
PADDED = MaskSpec(padding=True, empty_row=EmptyRow.ZERO)
LAYER = ProjectionSpec(d_model=24)
DECODER = {"mask": MaskSpec(causal=BOTTOM_RIGHT), "cache": CacheSpec()}

DECLARED: dict[str, tuple[dict[str, Any], dict[str, list[int | str]]]] = {
    "bare": (
        {"v_head_dim": 6},
        {"query": ["batch", "q_len", 32], "key": ["batch", "kv_len", 16],
         "value": ["batch", "kv_len", 12]},
    ),
    "padding of keys elsewhere": (
        {"mask": PADDED}, {"key": ["batch", "kv_len", 16], "key_padding": ["batch", "kv_len"]},
    ),
    "padding of one input": (
        {"mask": PADDED, "projections": LAYER},
        {"hidden_states": ["batch", "q_len", 24], "key_padding": ["batch", "q_len"]},
    ),
    "documents of equal lengths": (
        {"mask": MaskSpec(documents=True, causal=BOTTOM_RIGHT), "q_len": "s", "kv_len": "s"},
        {"key": ["batch", "s", 16], "document_ids": ["batch", "s"]},
    ),
    "memory": (
        {"cross": True, "mask": PADDED, "projections": ProjectionSpec(d_model=24, kv_d_model=20)},
        {"hidden_states": ["batch", "q_len", 24],
         "encoder_hidden_states": ["batch", "kv_len", 20], "key_padding": ["batch", "kv_len"]},
    ),
    "memory of the same width": (
        {"cross": True, "projections": LAYER}, {"encoder_hidden_states": ["batch", "kv_len", 24]},
    ),
    "two streams": (
        {"projections": ProjectionSpec(d_model=24, joint=JointSpec(lengths=("s1", "s2"))),
         "q_len": "s", "kv_len": "s"},
        {"hidden_states": ["batch", "s1", 24], "encoder_hidden_states": ["batch", "s2", 24]},
    ),
    "concat cache": (
        DECODER,
        {"query": ["batch", "q_len", 32], "key": ["batch", "q_len", 16],
         "past_key": ["batch", 2, "past_len", 8], "past_value": ["batch", 2, "past_len", 8]},
    ),
    "concat cache of numbers": (
        DECODER | {"q_len": 3, "kv_len": 7}, {"query": ["batch", 3, 32],
                                              "key": ["batch", "new_len", 16]},
    ),
    "static cache": (
        {"cache": CacheSpec(growth="static", layout="bshd", max_length=12)},
        {"past_key": ["batch", 12, 2, 8], "kv_lengths": ["batch"]},
    ),
    "static cache as long as the keys": (
        {"cache": CacheSpec(growth="static")}, {"past_key": ["batch", 2, "kv_len", 8],
         "kv_lengths": ["batch"]},
    ),
    "masks": (
        {"mask": MaskSpec(keep=("q_len", "m"), bias=(4, 1, "kv_len"), lengths=True, prefix=True,
                          causal=BOTTOM_RIGHT, empty_row=EmptyRow.ZERO)},
        {"keep": ["q_len", "m"], "bias": [4, 1, "kv_len"], "kv_lengths": ["batch"],
         "prefix_lengths": ["batch"]},
    ),
    "sinks and norms": (
        {"sinks": True, "qk_norm": QkNormSpec(kind="layer", bias=True, over="hidden")},
        {"sinks": [4], "q_norm_weight": [32], "k_norm_weight": [16], "q_norm_bias": [32],
         "k_norm_bias": [16]},
    ),
    "tables": (
        {"rotary": RotarySpec(dim=8), "q_len": "s", "kv_len": "s"},
        {"cos": ["table_batch", "s", 4], "sin": ["table_batch", "s", 4]},
    ),
    "tables and positions": (
        {"rotary": RotarySpec(dim=8, positions="input")},
        {"cos": ["positions", 4], "position_ids": ["batch", "q_len"]},
    ),
    "tables of other keys": (
        {"cross": True, "rotary": RotarySpec(dim=8)},
        {"cos": ["table_batch", "q_len", 4], "key_cos": ["key_table_batch", "kv_len", 4],
         "key_sin": ["key_table_batch", "kv_len", 4]},
    ),
    "positions of a stated base": (
        {"rotary": RotarySpec(dim=8, theta=1e4, max_positions=16, positions="input")},
        {"position_ids": ["batch", "q_len"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_inputs_are_named_as_operands_and_declared_by_the_spec(name: str) -> None:
    fields, expected = DECLARED[name]
    spec = AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 8} | fields)
    weights = random_weights(spec, 0)
    model = build_model(form_named("primitive"), spec, FormParams(opset=18), weights=weights)
    declared = {
        value.name: [size if isinstance(size, int) else size.value for size in value.shape or ()]
        for value in model.graph.inputs
    }
    assert {key: declared.get(key) for key in expected} == expected
    unexpected = set(declared) - set(expected) - {"query", "key", "value", "past_value", "sin"}
    assert unexpected <= {"past_key", "hidden_states"}, unexpected
