"""A mask given as numbers beside one that the graph makes: rows whose keys are hidden by either.

Where both hide a key the graph's own arithmetic decides what such a row gets: a minimum and
another is -inf, a bounded sum is the minimum. Whatever is read must give the same, which the oracle
checks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from spellings import BATCH, FLOAT, INT64, QUERIES, Sketch

from mha_export.recognise import Site, recognise

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM
LOWEST = float(np.finfo(np.float32).min)

Sound = Callable[..., None]
Step = Callable[[Sketch, ir.Value, ir.Value, ir.Value], ir.Value]


def _hidden(g: Sketch, keep: ir.Value, scores: ir.Value, fill: float) -> ir.Value:
    return g.op("Where", keep, scores, g.const(np.float32(fill)))


def _floor(g: Sketch, scores: ir.Value) -> ir.Value:
    return g.op("Max", scores, g.const(np.float32(LOWEST)))


STEPS: dict[str, Step] = {
    "minimum-then-given": lambda g, s, keep, m: g.add(_hidden(g, keep, s, LOWEST), m),
    "given-then-minimum": lambda g, s, keep, m: _hidden(g, keep, g.add(s, m), LOWEST),
    "minimum-in-given": lambda g, s, keep, m: g.add(s, _hidden(g, keep, m, LOWEST)),
    "bounded": lambda g, s, keep, m: _floor(g, g.add(_hidden(g, keep, s, LOWEST), m)),
    "bounded-infinite": lambda g, s, keep, m: _floor(g, g.add(_hidden(g, keep, s, -np.inf), m)),
    "infinite-then-given": lambda g, s, keep, m: g.add(_hidden(g, keep, s, -np.inf), m),
    "given-then-infinite": lambda g, s, keep, m: _hidden(g, keep, g.add(s, m), -np.inf),
    "clipped": lambda g, s, keep, m: g.op(
        "Clip", g.add(_hidden(g, keep, s, LOWEST), m), g.const(np.float32(LOWEST))
    ),
}


def attention(step: Step, *, given: str = "floats") -> ir.Model:
    g = Sketch()
    x = g.input("x", [BATCH, QUERIES, WIDTH])
    if given == "floats":
        mask = g.input("given", [BATCH, 1, QUERIES, QUERIES], FLOAT)
    else:
        flags = g.op("Cast", g.input("given", [BATCH, 1, QUERIES, QUERIES], INT64), to=1)
        mask = g.mul(g.op("Sub", 1.0, flags), LOWEST)
    query, key, value = (
        g.transpose(g.reshape(g.linear(x, WIDTH, WIDTH), 0, 0, HEADS, DIM), 0, 2, 1, 3)
        for _ in range(3)
    )
    scores = g.mul(g.matmul(query, g.transpose(key, 0, 1, 3, 2)), DIM**-0.5)
    length = g.squeeze(g.size(x, 1), 0)
    place = g.op("Range", np.int64(0), length, np.int64(1))
    keep = g.op("GreaterOrEqual", g.unsqueeze(place, 1), g.unsqueeze(place, 0))
    weights = g.op("Softmax", step(g, scores, keep, mask), axis=-1)
    merged = g.reshape(g.transpose(g.matmul(weights, value), 0, 2, 1, 3), 0, 0, WIDTH)
    g.output(g.linear(merged, WIDTH, WIDTH), "y")
    return g.model()


def feeds(low: float, length: int) -> dict[str, np.ndarray]:
    """Rows that lose all keys to the given mask, to both, and to neither."""
    random = np.random.default_rng(length)
    hidden = np.zeros((2, 1, length, length), np.bool_)
    hidden[0, ..., :2] = True  # left padding: the first queries have nothing but hidden keys
    hidden[1, :, 2] = True
    hidden[1, :, 3, :3] = True
    mask = np.where(hidden, low, 0.0).astype(np.float32)
    return {"x": random.standard_normal((2, length, WIDTH)).astype(np.float32), "given": mask}


@pytest.mark.parametrize("low", [LOWEST, -np.inf, -30.0], ids=["minimum", "infinite", "finite"])
@pytest.mark.parametrize("name", STEPS)
def test_doubly_hidden_keys(name: str, low: float, assert_sound: Sound) -> None:
    recognition = recognise(attention(STEPS[name]))
    (site,) = recognition.verdicts
    assert isinstance(site, Site)
    assert_sound(recognition, feeds(low, 6))
    assert_sound(recognition, feeds(low, 9))


@pytest.mark.parametrize("name", STEPS)
def test_doubly_hidden_by_flags(name: str, assert_sound: Sound) -> None:
    recognition = recognise(attention(STEPS[name], given="flags"))
    (site,) = recognition.verdicts
    assert isinstance(site, Site)
    sample = feeds(-1.0, 6)
    assert_sound(recognition, {**sample, "given": (sample["given"] == 0).astype(np.int64)})


def test_a_weak_fill_beside_a_given_mask_is_kept(assert_sound: Sound) -> None:
    """-1e4 does not hide beside a mask that may be lower; rows with a key are what is stated."""
    model = attention(lambda g, s, keep, m: _hidden(g, keep, g.add(s, m), -1e4))
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.spec.mask.causal is not None
    assert site.spec.mask.bias is not None
    assert site.cannot_replace is not None
    assert site.cannot_replace.code == "mask-added-to-fill"
    sample = feeds(-1e4, 6)
    sample["given"][..., 0] = 0.0
    assert_sound(recognition, sample)


def test_padding_added_to_a_weak_fill_is_kept(assert_sound: Sound) -> None:
    """The first GPT-2: ``where(causal, w, -1e4)``, then ``(1 - mask) * -1e4`` is added."""

    def old(g: Sketch, scores: ir.Value, keep: ir.Value, mask: ir.Value) -> ir.Value:
        flags = g.op("Cast", g.op("Equal", mask, 0.0), to=1)
        return g.add(_hidden(g, keep, scores, -1e4), g.mul(g.op("Sub", 1.0, flags), -1e4))

    recognition = recognise(attention(old))
    (site,) = recognition.sites
    assert site.spec.mask.causal is not None
    assert site.cannot_replace is not None
    assert site.cannot_replace.code == "mask-added-to-fill"
    sample = feeds(-1.0, 6)
    sample["given"][..., 0] = 0.0
    assert_sound(recognition, sample)


def test_a_bias_of_positions_is_named_apart_from_the_mask(assert_sound: Sound) -> None:
    """Numbers that positions make are no mask: causality keeps its name beside them."""

    def along(g: Sketch, scores: ir.Value, keep: ir.Value, mask: ir.Value) -> ir.Value:
        length = g.squeeze(g.size(scores, 3), 0)
        place = g.op("Range", np.int64(0), length, np.int64(1))
        scored = g.op("Cos", g.op("Cast", place, to=1))
        return _hidden(g, keep, g.add(scores, g.op("Mul", scored, 2.0)), LOWEST)

    model = attention(along)
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.spec.mask.causal is not None
    assert site.spec.mask.bias is not None
    assert_sound(recognition, feeds(0.0, 6))


def _two(g: Sketch, scores: ir.Value, keep: ir.Value, mask: ir.Value) -> ir.Value:
    """Flags of pairs and flags of keys become numbers, are added up, and laid out together."""
    length = g.size(scores, 2)
    given = g.op("Greater", mask, 0.5)
    pairs = g.op("Where", given, g.const(np.float32(-np.inf)), 0.0)
    keys = g.op("Where", g.slice(keep, 2, 3, 0), 0.0, g.const(np.float32(-np.inf)))
    whole = g.mul(g.add(pairs, g.op("Expand", keys, g.concat(length, length, axis=0))), 1.0)
    flat = g.op("Reshape", whole, g.concat(g.size(scores, 0), length, length, axis=0))
    return g.add(scores, g.unsqueeze(flat, 1))


def test_two_kinds_of_flags_added_up_are_flags(assert_sound: Sound) -> None:
    recognition = recognise(attention(_two))
    (site,) = recognition.sites
    assert (site.spec.mask.keep is not None, site.spec.mask.bias) == (True, None)
    assert_sound(recognition, feeds(1.0, 6))


def test_a_factor_of_masks_added_up_is_kept(assert_sound: Sound) -> None:
    """Half of a bias is not the bias, though half of -inf is -inf."""

    def halved(g: Sketch, scores: ir.Value, keep: ir.Value, mask: ir.Value) -> ir.Value:
        hidden = g.op("Where", keep, 0.0, g.const(np.float32(-np.inf)))
        return g.add(scores, g.mul(g.add(mask, hidden), 0.5))

    recognition = recognise(attention(halved))
    (site,) = recognition.sites
    assert site.spec.mask.bias is not None
    assert_sound(recognition, feeds(-1.0, 6))
