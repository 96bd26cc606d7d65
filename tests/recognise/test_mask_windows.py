"""Biases that cut the batch into windows, or the keys into image rows, before they are added."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from spellings import BATCH, Sketch

from mha_export.recognise import recognise

HEADS, DIM, WINDOWS, ROWS = 2, 8, 3, 4
WIDTH = HEADS * DIM


def _windows(g: Sketch, scores: ir.Value) -> ir.Value:
    """[b * windows, h, s, t] viewed as [b, windows, h, s, t]: a mask a window (shifted windows)."""
    hidden = g.random.random((1, WINDOWS, 1, ROWS * ROWS, ROWS * ROWS)) < 0.3
    wide = g.reshape(scores, -1, WINDOWS, HEADS, ROWS * ROWS, ROWS * ROWS)
    wide = g.add(wide, g.const(np.where(hidden, -100.0, 0.0)))
    return g.reshape(wide, -1, HEADS, ROWS * ROWS, ROWS * ROWS)


def _rows(g: Sketch, scores: ir.Value) -> ir.Value:
    """Queries and keys viewed as rows and columns: a bias a row of keys, and one a column."""
    wide = g.reshape(scores, -1, HEADS, ROWS, ROWS, ROWS, ROWS)
    wide = g.add(wide, g.const(g.random.standard_normal((1, HEADS, ROWS, ROWS, ROWS, 1))))
    wide = g.add(wide, g.const(g.random.standard_normal((1, HEADS, ROWS, ROWS, 1, ROWS))))
    return g.reshape(wide, -1, HEADS, ROWS * ROWS, ROWS * ROWS)


@pytest.mark.parametrize("write", [_windows, _rows], ids=["windows", "rows"])
def test_bias_under_more_axes(
    write: Callable[[Sketch, ir.Value], ir.Value],
    random_feeds: Callable[..., dict[str, np.ndarray]],
    assert_sound: Callable[..., None],
) -> None:
    g = Sketch()
    x = g.input("x", [BATCH, WINDOWS, ROWS * ROWS, WIDTH])
    x = g.reshape(x, -1, ROWS * ROWS, WIDTH)
    query, key, value = (
        g.transpose(g.reshape(g.linear(x, WIDTH, WIDTH), 0, 0, HEADS, DIM), 0, 2, 1, 3)
        for _ in range(3)
    )
    scores = g.mul(g.matmul(query, g.transpose(key, 0, 1, 3, 2)), DIM**-0.5)
    weights = g.op("Softmax", write(g, scores), axis=-1)
    merged = g.reshape(g.transpose(g.matmul(weights, value), 0, 2, 1, 3), 0, 0, WIDTH)
    g.output(g.linear(merged, WIDTH, WIDTH), "y")
    model = g.model()
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.replaceable
    assert site.spec.mask.parts == ("bias",)
    assert_sound(recognition, random_feeds(model))
    assert_sound(recognition, random_feeds(model, seed=1, batch=5))
