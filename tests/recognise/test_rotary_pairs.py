"""Interleaved rotations whose pairs are joined on an axis of their own (stack, then flatten)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from spellings import BATCH, QUERIES, Sketch

from mha_export.recognise import recognise
from mha_export.spec import RotaryStyle

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


def _tables(g: Sketch, x: ir.Value, kind: str) -> list[ir.Value]:
    """Cosine and sine [s, DIM / 2], computed or looked up."""
    place = g.op("Range", np.int64(0), g.squeeze(g.size(x, 1), 0), np.int64(1))
    if kind == "looked-up":
        angles = np.arange(64)[:, None] * (1e4 ** (-np.arange(0, DIM, 2) / DIM))[None]
        rows = g.op("Gather", g.const(np.concatenate([np.cos(angles), np.sin(angles)], 1)), place)
        return g.multi(2, "Split", rows, [DIM // 2] * 2, axis=1)
    angles = g.mul(
        g.unsqueeze(g.op("Cast", place, to=1), 1), (1e4 ** (-np.arange(0, DIM, 2) / DIM))[None]
    )
    return [g.op("Cos", angles), g.op("Sin", angles)]


def _turned(g: Sketch, x: ir.Value, tables: list[ir.Value], how: str) -> ir.Value:
    even, odd = g.slice(x, 0, DIM, 3, 2), g.slice(x, 1, DIM, 3, 2)
    if how == "pairs":
        cos, sin = tables
        first = g.op("Sub", g.mul(even, cos), g.mul(odd, sin))
        second = g.add(g.mul(even, sin), g.mul(odd, cos))
        joined = g.concat(g.unsqueeze(first, 4), g.unsqueeze(second, 4), axis=4)
        return g.reshape(joined, 0, 0, 0, -1)
    cos, sin = (
        g.reshape(g.op("Tile", g.unsqueeze(table, 2), [1, 1, 2]), 0, -1) for table in tables
    )
    joined = g.concat(g.unsqueeze(g.op("Neg", odd), 4), g.unsqueeze(even, 4), axis=4)
    return g.add(g.mul(x, cos), g.mul(g.reshape(joined, 0, 0, 0, -1), sin))


@pytest.mark.parametrize("kind", ["computed", "looked-up"])
@pytest.mark.parametrize("how", ["pairs", "repeated"])
def test_pairs_are_named(
    how: str,
    kind: str,
    random_feeds: Callable[..., dict[str, np.ndarray]],
    assert_sound: Callable[..., None],
) -> None:
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    tables = _tables(g, x, kind)
    query, key, value = (
        g.transpose(g.reshape(g.linear(x, WIDTH, WIDTH), 0, 0, HEADS, DIM), 0, 2, 1, 3)
        for _ in range(3)
    )
    query, key = (_turned(g, part, tables, how) for part in (query, key))
    scores = g.mul(g.matmul(query, g.transpose(key, 0, 1, 3, 2)), DIM**-0.5)
    context = g.matmul(g.op("Softmax", scores, axis=-1), value)
    merged = g.reshape(g.transpose(context, 0, 2, 1, 3), 0, 0, WIDTH)
    g.output(g.linear(merged, WIDTH, WIDTH), "y")
    model = g.model()
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.spec.rotary is not None
    assert (site.spec.rotary.style, site.spec.rotary.dim) == (RotaryStyle.INTERLEAVED, DIM)
    assert_sound(recognition, random_feeds(model))
