"""Rotary embedding around a form: each pair turned by its angle, in one op where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._layout import Sizes
from mha_export.forms._rotary import rotate_key, rotate_query
from mha_export.operands import Layout, Operands, RotaryTables
from mha_export.spec import AttentionSpec, RotarySpec, RotaryStyle

HALF, INTERLEAVED = RotaryStyle.HALF, RotaryStyle.INTERLEAVED
BATCH, HEADS, LENGTH, DIM = 3, 2, 5, 8
RNG = np.random.default_rng(11)
X = RNG.standard_normal((BATCH, HEADS, LENGTH, DIM)).astype(np.float32)


def _turned(x: np.ndarray, angle: np.ndarray, rotary: RotarySpec) -> np.ndarray:
    """Each pair of channels as a complex number, times e^(i angle) [b or 1, s, r/2]."""
    r, first = rotary.dim, rotary.offset
    channels = np.arange(first, first + r)
    a, b = (
        (channels[: r // 2], channels[r // 2 :])
        if rotary.style is HALF
        else (channels[::2], channels[1::2])
    )
    turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)[:, None]
    out = x.copy()
    out[..., a], out[..., b] = turned.real, turned.imag
    return out


TABLES = ("shared", "per-row", "position-ids", "full-width")
SHAPES = [(8, 0), (4, 0), (4, 2), (4, 4), (2, 0), (2, 6)]
"""How many channels are rotated, and from which on."""


class Turned:
    """The rotation of X as a form emits it."""

    def __init__(
        self,
        rotary: RotarySpec,
        tables: str,
        *,
        layout: Layout = Layout.BHSD,
        opset: int = 18,
        op: bool = False,
        key: bool = False,
        apart: bool = False,
    ) -> None:
        self.bench = Bench(opset=opset)
        spec = AttentionSpec(q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, rotary=rotary)
        heads = self.bench.heads("x", X, layout)
        operands = Operands(query=heads, key=heads, value=heads)
        sizes = Sizes(self.bench.scope, spec, operands)
        given, self.angle = self._tables(rotary, tables)
        if apart:
            other, self.key_angle = self._tables(rotary, "shared", prefix="key_")
            given = replace(given, key_cos=other.cos, key_sin=other.sin)
        rotate = rotate_key if key else rotate_query
        self.heads = rotate(self.bench.scope, spec, sizes, heads, given, op=op)

    def _tables(
        self, rotary: RotarySpec, kind: str, prefix: str = ""
    ) -> tuple[RotaryTables, np.ndarray]:
        rows = {"per-row": (BATCH, LENGTH), "position-ids": (9,)}.get(kind, (1, LENGTH))
        angle = RNG.standard_normal((*rows, rotary.dim // 2))
        width: Any = angle
        if kind == "full-width":
            twice = np.concatenate if rotary.style is HALF else _interleaved
            width = twice([angle, angle], axis=-1)
        cos, sin = (
            self.bench.value(f"{prefix}{name}", np.ascontiguousarray(f(width)).astype(np.float32))
            for name, f in (("cos", np.cos), ("sin", np.sin))
        )
        position_ids = None
        if kind == "position-ids":
            ids = RNG.integers(0, 9, (BATCH, LENGTH))
            position_ids, angle = self.bench.value("position_ids", ids), angle[ids]
        tables = RotaryTables(
            cos=cos, sin=sin, position_ids=position_ids, half_width=kind != "full-width"
        )
        return tables, angle

    def found(self) -> np.ndarray:
        return heads_of(self.bench.run(self.heads.value)[0], self.heads)


def _interleaved(tables: list[np.ndarray], *, axis: int) -> np.ndarray:
    return np.repeat(tables[0], 2, axis=axis)


def _check(turned: Turned, rotary: RotarySpec) -> None:
    assert (turned.heads.heads, turned.heads.dim) == (HEADS, DIM)
    expected = _turned(X, turned.angle, rotary)
    np.testing.assert_allclose(turned.found(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("style", list(RotaryStyle))
@pytest.mark.parametrize(("dim", "offset"), SHAPES)
def test_pairs_are_turned_in_plain_ops(
    dim: int, offset: int, style: RotaryStyle, tables: str, layout: Layout
) -> None:
    rotary = RotarySpec(dim=dim, offset=offset, style=style)
    turned = Turned(rotary, tables, layout=layout)
    assert "RotaryEmbedding" not in turned.bench.types
    _check(turned, rotary)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("style", list(RotaryStyle))
@pytest.mark.parametrize("dim", [8, 4, 2])
def test_pairs_are_turned_by_the_op(
    dim: int, style: RotaryStyle, tables: str, layout: Layout
) -> None:
    rotary = RotarySpec(dim=dim, style=style)
    turned = Turned(rotary, tables, layout=layout, opset=23, op=True)
    (node,) = (node for node in turned.bench.scope.nodes if node.op_type == "RotaryEmbedding")
    expected = {"interleaved": 1} if style is INTERLEAVED else {}
    expected |= {"rotary_embedding_dim": dim} if dim != DIM else {}
    expected |= {"num_heads": HEADS} if layout is not Layout.BHSD else {}
    assert {name: attribute.value for name, attribute in node.attributes.items()} == expected
    # One table for all rows becomes one a row; rows that are picked are not.
    assert turned.bench.types.count("Expand") == (0 if tables == "position-ids" else 2)
    _check(turned, rotary)


@pytest.mark.parametrize(
    ("opset", "op", "offset", "fused"),
    [(22, True, 0, False), (23, True, 0, True), (24, True, 0, True), (23, False, 0, False),
     (23, True, 1, False), (23, True, 4, False)],
)  # fmt: skip
def test_where_the_op_is_used(opset: int, op: bool, offset: int, fused: bool) -> None:
    turned = Turned(RotarySpec(dim=4, offset=offset), "shared", opset=opset, op=op)
    assert ("RotaryEmbedding" in turned.bench.types) is fused


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_keys_have_tables_of_their_own_where_there_are_some(key: bool, apart: bool) -> None:
    rotary = RotarySpec(dim=DIM)
    turned = Turned(rotary, "per-row", key=key, apart=apart)
    angle = turned.key_angle if key and apart else turned.angle
    np.testing.assert_allclose(turned.found(), _turned(X, angle, rotary), rtol=1e-5, atol=1e-6)


def test_keys_of_their_own_tables_have_no_positions_to_pick() -> None:
    """The ids are those of the queries."""
    rotary = RotarySpec(dim=DIM)
    turned = Turned(rotary, "position-ids", key=True, apart=True)
    assert "Gather" not in turned.bench.types
    np.testing.assert_allclose(
        turned.found(), _turned(X, turned.key_angle, rotary), rtol=1e-5, atol=1e-6
    )


def test_nothing_is_cut_or_joined_without_need() -> None:
    """All channels of a head, pairs side by side: only the pairs themselves are taken apart."""
    whole = Turned(RotarySpec(dim=DIM, style=INTERLEAVED), "shared").bench.types
    part = Turned(RotarySpec(dim=4, style=INTERLEAVED), "shared").bench.types
    assert (whole.count("Split"), part.count("Split")) == (1, 2)
    assert (whole.count("Concat"), part.count("Concat")) == (1, 2)
    half = Turned(RotarySpec(dim=DIM), "shared").bench.types
    assert (half.count("Split"), half.count("Concat"), half.count("Slice")) == (1, 1, 0)
