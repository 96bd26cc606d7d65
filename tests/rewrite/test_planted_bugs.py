"""Forms that are wrong in one way each: the proof catches every one, and none is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from rewrite_sites import Altered, always, recognition_of

from mha_export.evaluator import Evaluator
from mha_export.forms import Scope
from mha_export.forms._layout import as_layout, ints
from mha_export.operands import Heads, Layout, Operands
from mha_export.rewrite import rewrite
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkNormSpec,
    RotarySpec,
    RotaryStyle,
)

Rebind = Callable[[Scope, AttentionSpec, Operands], Operands]


def _spec(**changes: Any) -> AttentionSpec:
    mask = changes.pop("mask", {})
    fields = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, **changes}
    return AttentionSpec(mask=MaskSpec(**mask), **fields)


def _mask(**changes: Any) -> Callable[[AttentionSpec], AttentionSpec]:
    return lambda spec: spec.replace(mask=dataclasses.replace(spec.mask, **changes))


def _with(**changes: Any) -> Callable[[AttentionSpec], AttentionSpec]:
    return lambda spec: spec.replace(**changes)


def _without(*names: str) -> Rebind:
    return lambda scope, spec, operands: dataclasses.replace(operands, **dict.fromkeys(names))


def _changed(name: str, change: Callable[[Scope, ir.Value], ir.Value]) -> Rebind:
    """One operand's value run through some nodes first."""

    def rebind(scope: Scope, spec: AttentionSpec, operands: Operands) -> Operands:
        part = getattr(operands, name)
        if isinstance(part, Heads):
            part = dataclasses.replace(part, value=change(scope, part.value))
        else:
            part = change(scope, part)
        return dataclasses.replace(operands, **{name: part})

    return rebind


def _plus(amount: int) -> Callable[[Scope, ir.Value], ir.Value]:
    return lambda scope, value: scope.op(
        "Add", [value, scope.constant(np.array(amount, np.int64))], dtype=value.dtype
    )


def _inverted(scope: Scope, value: ir.Value) -> ir.Value:
    zero = scope.constant(np.array(0, np.int64))
    hidden = scope.op("Equal", [value, zero], dtype=ir.DataType.BOOL)
    return scope.op("Cast", [hidden], {"to": int(ir.DataType.INT64)}, dtype=ir.DataType.INT64)


def _negated(scope: Scope, value: ir.Value) -> ir.Value:
    return scope.op("Neg", [value], dtype=value.dtype)


def _zeroed(scope: Scope, value: ir.Value) -> ir.Value:
    return scope.op("Sub", [value, value], dtype=value.dtype)


def _tiled_heads(scope: Scope, spec: AttentionSpec, operands: Operands) -> Operands:
    """Key and value heads [k0, k1, k0, k1] where [k0, k0, k1, k1] is meant."""
    changes = {}
    for name in ("key", "value"):
        heads = as_layout(scope, getattr(operands, name), Layout.BHSD)
        tiled = scope.op("Tile", [heads.value, ints(scope, 1, 2, 1, 1)], dtype=heads.value.dtype)
        changes[name] = dataclasses.replace(heads, value=tiled, heads=4)
    return dataclasses.replace(operands, **changes)


def _swapped_cache(scope: Scope, spec: AttentionSpec, operands: Operands) -> Operands:
    """New tokens before the past."""
    changes = {}
    for new, past in (("key", "past_key"), ("value", "past_value")):
        fresh = as_layout(scope, getattr(operands, new), Layout.BHSD)
        old = getattr(operands, past)
        changes[new], changes[past] = old, fresh
    return dataclasses.replace(operands, **changes)


def _late_tables(scope: Scope, spec: AttentionSpec, operands: Operands) -> Operands:
    """Every position one too far: the tables roll by a row."""
    tables = operands.rotary
    assert tables is not None
    if tables.position_ids is not None:
        moved = _plus(1)(scope, tables.position_ids)
        return dataclasses.replace(operands, rotary=dataclasses.replace(tables, position_ids=moved))
    changes = {}
    for name in ("cos", "sin"):
        table = getattr(tables, name)
        head = scope.op("Slice", [table, *(ints(scope, n) for n in (0, 1, 1))], dtype=table.dtype)
        tail = scope.op(
            "Slice", [table, *(ints(scope, n) for n in (1, 1 << 40, 1))], dtype=table.dtype
        )
        changes[name] = scope.op("Concat", [tail, head], {"axis": 1}, dtype=table.dtype)
    return dataclasses.replace(operands, rotary=dataclasses.replace(tables, **changes))


CAUSAL = {"causal": CausalAlignment.BOTTOM_RIGHT}
PADDED = {"padding": True, "fill": "min", "empty_row": EmptyRow.UNIFORM}
TABLES = RotarySpec(dim=8)

BUGS: dict[str, tuple[AttentionSpec, Altered]] = {
    "dropped scale": (_spec(scale=0.25), Altered(name="x", respec=_with(scale=1.0))),
    "default scale": (_spec(scale=0.3), Altered(name="x", respec=_with(scale=None))),
    "scale applied twice": (_spec(), Altered(name="x", respec=_with(scale=1 / 8))),
    "tiled heads": (
        _spec(),
        Altered(name="x", respec=_with(kv_heads=4), rebind=_tiled_heads),
    ),
    "causal dropped": (_spec(mask=CAUSAL), Altered(name="x", respec=_mask(causal=None))),
    "causal added": (_spec(), Altered(name="x", respec=_mask(**CAUSAL))),
    "causal alignment swapped": (
        _spec(mask=CAUSAL, cross=True),
        Altered(name="x", respec=_mask(causal=CausalAlignment.TOP_LEFT)),
    ),
    "causal alignment swapped with a past": (
        _spec(mask=CAUSAL, cache=CacheSpec()),
        Altered(name="x", respec=_mask(causal=CausalAlignment.TOP_LEFT)),
    ),
    "window dropped": (
        _spec(mask={**CAUSAL, "left_window": 3}),
        Altered(name="x", respec=_mask(left_window=None)),
    ),
    "window one too long": (
        _spec(mask={**CAUSAL, "left_window": 3}),
        Altered(name="x", respec=_mask(left_window=4)),
    ),
    "window one too short": (
        _spec(mask={**CAUSAL, "left_window": 3}),
        Altered(name="x", respec=_mask(left_window=2)),
    ),
    "long window dropped": (
        _spec(mask={**CAUSAL, "left_window": 4095}),
        Altered(name="x", respec=_mask(left_window=None)),
    ),
    "right window off by one": (
        _spec(mask={"right_window": 2}),
        Altered(name="x", respec=_mask(right_window=3)),
    ),
    "block one too large": (
        _spec(mask={**CAUSAL, "block": 3}),
        Altered(name="x", respec=_mask(block=4)),
    ),
    "padding dropped": (
        _spec(mask=PADDED),
        Altered(
            name="x", respec=_mask(padding=False, empty_row="n/a"), rebind=_without("key_padding")
        ),
    ),
    "padding inverted": (
        _spec(mask=PADDED),
        Altered(name="x", rebind=_changed("key_padding", _inverted)),
    ),
    "empty row as zero": (
        _spec(mask=PADDED),
        Altered(name="x", respec=_mask(fill="-inf", empty_row=EmptyRow.ZERO)),
    ),
    "lengths off by one": (
        _spec(mask={"lengths": True, "empty_row": EmptyRow.ZERO}),
        Altered(name="x", rebind=_changed("kv_lengths", _plus(1))),
    ),
    "bias dropped": (
        _spec(mask={"bias": ("batch", 1, "q_len", "kv_len")}),
        Altered(name="x", rebind=_changed("bias", _zeroed)),
    ),
    "bias negated": (
        _spec(mask={"bias": ("batch", 1, "q_len", "kv_len")}),
        Altered(name="x", rebind=_changed("bias", _negated)),
    ),
    "slopes shifted by a head": (
        _spec(mask={**CAUSAL, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
        Altered(name="x", respec=_mask(alibi_slopes=(0.25, 0.125, 0.0625, 0.5))),
    ),
    "softcap dropped": (_spec(softcap=5.0), Altered(name="x", respec=_with(softcap=None))),
    "softcap halved": (_spec(softcap=5.0), Altered(name="x", respec=_with(softcap=2.5))),
    "sinks dropped": (
        _spec(sinks=True),
        Altered(name="x", respec=_with(sinks=False), rebind=_without("sinks")),
    ),
    "rotary dropped": (
        _spec(rotary=TABLES),
        Altered(name="x", respec=_with(rotary=None), rebind=_without("rotary")),
    ),
    "rotary style swapped": (
        _spec(rotary=TABLES),
        Altered(name="x", respec=_with(rotary=RotarySpec(dim=8, style=RotaryStyle.INTERLEAVED))),
    ),
    "rotary of queries alone": (
        _spec(rotary=TABLES),
        Altered(name="x", respec=_with(rotary=RotarySpec(dim=8, key=False))),
    ),
    "positions one too far": (
        _spec(rotary=dataclasses.replace(TABLES, positions="input"), cache=CacheSpec()),
        Altered(name="x", rebind=_late_tables),
    ),
    "tables one row late": (_spec(rotary=TABLES), Altered(name="x", rebind=_late_tables)),
    "past after the new tokens": (
        _spec(cache=CacheSpec()),
        Altered(name="x", rebind=_swapped_cache),
    ),
    "norm weight dropped": (
        _spec(qk_norm=QkNormSpec(kind="rms")),
        Altered(
            name="x",
            respec=_with(qk_norm=QkNormSpec(kind="rms", weight=False)),
            rebind=_without("q_norm_weight", "k_norm_weight"),
        ),
    ),
    "norm over all heads": (
        _spec(qk_norm=QkNormSpec(kind="rms", weight=False)),
        Altered(
            name="x", respec=_with(qk_norm=QkNormSpec(kind="rms", weight=False, over="hidden"))
        ),
    ),
    "layer norm for rms": (
        _spec(qk_norm=QkNormSpec(kind="rms", weight=False)),
        Altered(name="x", respec=_with(qk_norm=QkNormSpec(kind="layer", weight=False))),
    ),
    "prefix one too short": (
        _spec(mask={**CAUSAL, "prefix": True}),
        Altered(name="x", rebind=_changed("prefix_lengths", _plus(-1))),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, evaluator: Evaluator) -> None:
    spec, form = BUGS[name]
    done = rewrite(recognition_of(spec), always(form), evaluator=evaluator)
    outcome = done.outcomes["attn.0"]
    assert outcome.status == "proof_failed", outcome
    assert outcome.proof is not None
    assert "against" in (outcome.reason or "")
    assert not any("mha_export.site" in node.metadata_props for node in done.model.graph)


@pytest.mark.parametrize("name", BUGS)
def test_the_same_site_without_the_bug_is_rewritten(name: str, evaluator: Evaluator) -> None:
    spec, _ = BUGS[name]
    done = rewrite(recognition_of(spec), always(Altered(name="right")), evaluator=evaluator)
    outcome = done.outcomes["attn.0"]
    assert outcome.status == "fused", outcome.reason
    assert outcome.proof is not None
    assert outcome.proof.status == "pass"
    assert outcome.proof.against == ("oracle", "original")


HALF_BUGS = (
    "dropped scale",
    "tiled heads",
    "causal alignment swapped",
    "window one too long",
    "padding dropped",
    "softcap dropped",
    "sinks dropped",
    "rotary style swapped",
    "tables one row late",
)


@pytest.mark.parametrize("name", HALF_BUGS)
def test_coarse_arithmetic_hides_no_bug(name: str, evaluator: Evaluator) -> None:
    """In fp16 the bounds are 8,000 times as wide; a semantic fault is still no imprecision."""
    spec, form = BUGS[name]
    half = spec.replace(io_dtype=DType.FP16)
    done = rewrite(recognition_of(half), always(form), evaluator=evaluator)
    assert done.outcomes["attn.0"].status == "proof_failed", done.outcomes["attn.0"]
    right = rewrite(recognition_of(half), always(Altered(name="right")), evaluator=evaluator)
    assert right.outcomes["attn.0"].status == "fused", right.outcomes["attn.0"].reason


def test_a_site_that_is_not_what_it_is_said_to_be_is_left_alone(evaluator: Evaluator) -> None:
    """The form is right for the spec, but the graph computes something else."""
    truth = _spec(scale=0.5)
    found = recognition_of(truth, claimed=truth.replace(scale=0.25))
    outcome = rewrite(found, always("primitive"), evaluator=evaluator).outcomes["attn.0"]
    assert outcome.status == "proof_failed"
    assert "the original graph does not compute this spec" in (outcome.reason or "")
