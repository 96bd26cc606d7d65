"""Seeded inputs for a spec: ordinary ones, and the adversarial battery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mha_export.cases._draw import Stream
from mha_export.cases._operands import Style, draw_operands
from mha_export.cases._scenarios import SCENARIOS, Scenario
from mha_export.cases._shapes import rounded_inputs
from mha_export.cases._sizes import Sizes, fixed_dims, is_square, sizes_for
from mha_export.errors import InputError
from mha_export.oracle import OracleInputs, hidden_pairs
from mha_export.spec import AttentionSpec, EmptyRow

__all__ = ["Battery", "Case", "cases", "long_case", "sized_case"]

Battery = Literal["quick", "ordinary", "full"]

_TIERS = {"quick": 0, "ordinary": 1, "full": 2}

_LARGEST_CASE = 1 << 26
"""Elements of the largest tensor a battery may hold; a longer window is left to reduced specs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One set of inputs.

    Attributes:
        name: stable, one a scenario.
        traits: what the case is for (``poison``, ``empty_row``, ``window_edge``, ...).
        dims: ``batch``, ``q_len``, ``new_len`` (keys in ``inputs.key``), ``past_len`` (length of
            the cache tensor) and ``kv_len`` (keys in all).
        inputs: float64 arrays that already hold numbers of ``spec.io_dtype``, so that a target and
            the oracle see the same ones; masks bool, lengths and ids int64.
    """

    name: str
    traits: tuple[str, ...]
    dims: Mapping[str, int]
    inputs: OracleInputs


def cases(
    spec: AttentionSpec,
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    battery: Battery = "full",
) -> Iterator[Case]:
    """Inputs for ``spec``, lazily, in a fixed order; the same seed gives the same bytes.

    Args:
        spec: integers among its dimensions are kept; symbols get small lengths by scenario.
        seed: any non-negative number.
        dims: fixes some of ``batch``, ``q_len``, ``kv_len``, ``past_len`` (or the spec's symbols
            for them); scenarios that need another length are left out.
        battery: ``quick`` (three cases; rows without a key and short masks where there are some),
            ``ordinary`` (Gaussian numbers at every kind of length) or ``full``.

    Errors:
        InputError: an unknown battery or dimension, or one that contradicts the spec.
    """
    if battery not in _TIERS:
        raise InputError(f"unknown battery {battery!r}; expected one of {list(_TIERS)}")
    fixed = fixed_dims(spec, dims)
    return _cases(spec, seed, fixed, _TIERS[battery])


def _cases(spec: AttentionSpec, seed: int, fixed: Mapping[str, int], tier: int) -> Iterator[Case]:
    for scenario in SCENARIOS:
        if _TIERS[scenario.tier] > tier or not scenario.applies(spec):
            continue
        keys = scenario.keys if isinstance(scenario.keys, int) else scenario.keys(spec)
        queries = keys if scenario.crosses_edge and is_square(spec) else scenario.queries
        sizes = sizes_for(spec, fixed, batch=scenario.batch, queries=queries, keys=keys)
        if sizes is None or not scenario.fits(sizes) or _elements(spec, sizes) > _LARGEST_CASE:
            continue
        case = _case(spec, scenario, sizes, seed)
        if case is not None:
            yield case


def _case(spec: AttentionSpec, scenario: Scenario, sizes: Sizes, seed: int) -> Case | None:
    stream = Stream(seed, scenario.name)
    drawn = rounded_inputs(draw_operands(spec, sizes, stream, scenario.style), spec.io_dtype)
    shaped = scenario.shape(spec, sizes, stream, drawn)
    if shaped is None:
        return None
    inputs = rounded_inputs(shaped, spec.io_dtype)
    traits = dict.fromkeys(scenario.traits)
    if _has_empty_row(spec, inputs):
        if spec.mask.empty_row is EmptyRow.NOT_APPLICABLE:
            return None  # the spec says that there are none: such data is not for it
        traits["empty_row"] = None
    return Case(name=scenario.name, traits=tuple(traits), dims=sizes.as_dict(), inputs=inputs)


def sized_case(spec: AttentionSpec, *, dims: Mapping[str, int], seed: int = 0) -> Case | None:
    """Ordinary operands at exactly ``dims`` (as in :func:`cases`), however large: for timing.

    None where the spec has no attention of these lengths.

    Errors:
        InputError: an unknown dimension, or one that contradicts the spec.
    """
    fixed = fixed_dims(spec, dims)
    sizes = sizes_for(spec, fixed, batch=1, queries=128, keys=128)
    if sizes is None:
        return None
    drawn = draw_operands(spec, sizes, Stream(seed, "sized"), Style())
    inputs = rounded_inputs(drawn, spec.io_dtype)
    return Case(name="sized", traits=(), dims=sizes.as_dict(), inputs=inputs)


def long_case(spec: AttentionSpec, *, seed: int = 0, keys: int = 65_536) -> Case | None:
    """Two queries against very many keys; None where the spec has as many queries as keys.

    Evaluate it with ``attention(spec, inputs, scores=False)``.

    Errors:
        InputError: the arrays would not be reasonable at this width.
    """
    sizes = sizes_for(spec, fixed_dims(spec, None), batch=1, queries=2, keys=keys)
    if sizes is None or sizes.q_len > 16 or sizes.kv_len < keys:
        return None
    if _elements(spec, sizes) > 4 * _LARGEST_CASE:
        raise InputError(
            f"{keys} keys at {spec.kv_heads} heads of {spec.head_dim} are too many to draw",
            fix="ask for it with fewer or narrower heads",
        )
    stream = Stream(seed, "many_keys")
    inputs = rounded_inputs(draw_operands(spec, sizes, stream, Style()), spec.io_dtype)
    traits = ("many_keys", *(("empty_row",) if _has_empty_row(spec, inputs) else ()))
    return Case(name="many_keys", traits=traits, dims=sizes.as_dict(), inputs=inputs)


def _elements(spec: AttentionSpec, sizes: Sizes) -> int:
    """Elements of the largest tensor of a case."""
    scores = spec.q_heads * sizes.q_len * sizes.kv_len
    keys = spec.kv_heads * sizes.kv_len * max(spec.head_dim, spec.value_dim)
    return sizes.batch * max(scores, keys)


def _has_empty_row(spec: AttentionSpec, inputs: OracleInputs) -> bool:
    hidden = hidden_pairs(spec, inputs)
    if inputs.bias is not None:
        missing = hidden.shape[-1] - inputs.bias.shape[-1]
        widths = [(0, 0)] * (inputs.bias.ndim - 1) + [(0, missing)]
        hidden = hidden | np.isneginf(np.pad(inputs.bias, widths))
    return bool(hidden.all(axis=-1).any())
