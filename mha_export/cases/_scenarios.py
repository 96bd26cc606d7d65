"""The battery: each scenario, when it applies, the lengths it wants, what it does to the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mha_export.cases import _shapes
from mha_export.cases._draw import Stream
from mha_export.cases._operands import Style
from mha_export.cases._sizes import Sizes, has_position_rule, is_static
from mha_export.oracle import OracleInputs
from mha_export.spec import AttentionSpec, CausalAlignment, EmptyRow

Reshape = Callable[[AttentionSpec, Sizes, Stream, OracleInputs], OracleInputs | None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of case.

    Attributes:
        tier: least battery that holds it: quick, ordinary or full.
        queries, keys: lengths wanted (keys count cached ones), possibly by spec.
        fits: whether the lengths found still are what the scenario is for.
        shape: what it does to ordinary operands; None: this spec has no such case.
        crosses_edge: ``keys`` matters more than ``queries`` where the two must be equal.
    """

    name: str
    traits: tuple[str, ...]
    tier: str = "full"
    batch: int = 2
    queries: int = 5
    keys: int | Callable[[AttentionSpec], int] = 9
    applies: Callable[[AttentionSpec], bool] = lambda spec: True
    fits: Callable[[Sizes], bool] = lambda sizes: True
    style: Style = field(default_factory=Style)
    shape: Reshape = _shapes.as_drawn
    crosses_edge: bool = False


def _edge_keys(spec: AttentionSpec) -> int:
    """Enough keys to look past every window and out of a block on either side."""
    mask = spec.mask
    reach = [size for size in (mask.left_window, mask.right_window, mask.block) if size is not None]
    return max(reach) + 6


def _may_empty(spec: AttentionSpec) -> bool:
    stated = spec.mask.empty_row is not EmptyRow.NOT_APPLICABLE
    return spec.mask.may_empty_a_row or (stated and spec.mask.bias is not None)


def _has_edge(spec: AttentionSpec) -> bool:
    mask = spec.mask
    return any(size is not None for size in (mask.left_window, mask.right_window, mask.block))


def _has_free_mask_axis(spec: AttentionSpec) -> bool:
    shapes = [shape for shape in (spec.mask.keep, spec.mask.bias) if shape is not None]
    return any(isinstance(s[-1], str) and s[-1] != spec.kv_len for s in shapes)


def _lengths_place_queries(spec: AttentionSpec) -> bool:
    mask = spec.mask
    return (
        mask.lengths
        and not is_static(spec)
        and not mask.documents
        and mask.causal is not CausalAlignment.TOP_LEFT
        and has_position_rule(spec)
    )


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="ordinary", traits=("gaussian", "distinct_heads"), tier="quick"),
    Scenario(
        name="decode",
        traits=("one_query", "many_keys"),
        tier="quick",
        queries=1,
        keys=17,
        fits=lambda z: z.q_len == 1 and z.kv_len > 1,
    ),
    Scenario(
        name="poison",
        traits=("poison",),
        tier="quick",
        queries=3,
        keys=9,
        style=Style(padding="holes"),
        shape=_shapes.poisoned,
    ),
    Scenario(
        name="one_token",
        traits=("length_one",),
        tier="ordinary",
        queries=1,
        keys=1,
        fits=lambda z: z.q_len == 1 and z.new_len == 1,
    ),
    Scenario(
        name="no_past",
        traits=("past_zero",),
        tier="ordinary",
        keys=5,
        applies=lambda spec: spec.cache is not None and not is_static(spec),
        fits=lambda z: z.past_len == 0 and z.q_len > 1,
    ),
    Scenario(
        name="short_query",
        traits=("query_shorter_than_keys",),
        tier="ordinary",
        queries=3,
        keys=11,
        fits=lambda z: 1 < z.q_len < z.kv_len,
    ),
    Scenario(
        name="long_query",
        traits=("query_longer_than_keys",),
        queries=7,
        keys=4,
        fits=lambda z: z.q_len > z.kv_len,
    ),
    Scenario(
        name="many_queries",
        traits=("another_kernel",),
        tier="ordinary",
        batch=1,
        queries=37,
        keys=41,
        fits=lambda z: z.q_len > 32,
    ),
    Scenario(
        name="wide_batch",
        traits=("batch",),
        tier="ordinary",
        batch=3,
        queries=4,
        keys=8,
        fits=lambda z: z.batch > 1,
    ),
    Scenario(name="peaked", traits=("peaked",), shape=_shapes.peaked),
    Scenario(name="extreme_logits", traits=("extreme_logits",), shape=_shapes.extreme),
    Scenario(name="ties", traits=("ties",), shape=_shapes.tied),
    Scenario(
        name="softcap_saturating",
        traits=("softcap",),
        applies=lambda spec: spec.softcap is not None,
        shape=_shapes.saturating,
    ),
    Scenario(
        name="left_padding",
        traits=("left_padding",),
        batch=3,
        applies=lambda spec: spec.mask.padding,
        style=Style(padding="left"),
        fits=lambda z: z.batch > 1 and z.kv_len > 2,
    ),
    Scenario(
        name="left_padded_prefill",
        traits=("left_padding", "past_zero"),
        batch=3,
        keys=5,
        applies=lambda spec: spec.mask.padding and spec.cache is not None and not is_static(spec),
        style=Style(padding="left"),
        fits=lambda z: z.batch > 1 and z.past_len == 0 and z.kv_len > 2,
    ),
    Scenario(
        name="holes",
        traits=("holes",),
        batch=3,
        applies=lambda spec: spec.mask.padding,
        style=Style(padding="holes"),
        fits=lambda z: z.kv_len > 3,
    ),
    Scenario(
        name="empty_row",
        traits=("empty_row",),
        tier="quick",
        applies=_may_empty,
        shape=_shapes.emptied,
    ),
    Scenario(
        name="negative_offset",
        traits=("empty_row", "lengths_below_queries"),
        applies=_lengths_place_queries,
        style=Style(short_lengths=True),
        fits=lambda z: z.q_len > 1,
    ),
    Scenario(
        name="short_mask",
        traits=("mask_shorter_than_keys",),
        tier="quick",
        applies=_has_free_mask_axis,
        style=Style(short_mask=True),
        fits=lambda z: z.kv_len > 2,
    ),
    Scenario(
        name="extreme_bias",
        traits=("bias_minus_inf", "bias_large"),
        applies=lambda spec: spec.mask.bias is not None,
        shape=_shapes.extreme_bias,
    ),
    Scenario(
        name="minimum_bias",
        traits=("bias_minimum",),
        applies=lambda spec: spec.mask.bias is not None,
        shape=_shapes.minimum_bias,
    ),
    Scenario(
        name="window_edge",
        traits=("window_edge",),
        batch=1,
        queries=4,
        keys=lambda spec: _edge_keys(spec),
        applies=_has_edge,
        crosses_edge=True,
        shape=_shapes.edged,
    ),
    Scenario(
        name="far_positions",
        traits=("far_positions",),
        applies=lambda spec: spec.rotary is not None and spec.rotary.positions == "input",
        style=Style(far_positions=True),
    ),
    Scenario(
        name="long_past",
        traits=("far_positions", "many_keys"),
        batch=1,
        queries=2,
        keys=300,
        applies=lambda spec: spec.rotary is not None and spec.cache is not None,
        fits=lambda z: z.q_len == 2 and z.kv_len >= 300,
    ),
)
