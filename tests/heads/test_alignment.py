"""Aligned heads compute what they did, and equal heads in other bases are averaged without loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mha_export.evaluator import Evaluator
from mha_export.heads import HeadModel, regroup
from mha_export.heads._layers import Layer
from mha_export.heads._rebuild import rebuilt
from mha_export.heads.alignment import distances, keys_turn, stacked, turned
from mha_export.heads.data import read_samples
from mha_export.heads.regrouping import _rewired, contiguous_groups

Read = Callable[[str], HeadModel]
Floats = NDArray[np.float64]


def maps(layer: Layer) -> tuple[Floats, Floats]:
    """[h, m + 1, m + 1] of scores and [h, m + 1, m] of what is moved, biases included."""
    assert layer.query is not None
    assert layer.key is not None
    assert layer.value is not None
    assert layer.output is not None
    group = layer.spec.group
    keys, values = (stacked(part).repeat(group, 0) for part in (layer.key, layer.value))
    return stacked(layer.query) @ keys.swapaxes(1, 2), values @ layer.output.weight


@pytest.mark.parametrize("name", ["bert-eager", "llama_kv-sdpa", "qwen3-sdpa", "gpt2_kv-sdpa"])
def test_what_a_head_computes_is_kept(name: str, heads_of: Read) -> None:
    layer = heads_of(name).layers[0]
    after = turned(layer, [tuple(range(layer.spec.kv_heads))])
    for before, found in zip(maps(layer), maps(after), strict=True):
        assert np.abs(found - before).max() < 1e-12 * max(1.0, np.abs(before).max())
    assert after.key is not None
    assert layer.key is not None
    assert np.array_equal(after.key.weight, layer.key.weight) is not keys_turn(layer)


def test_keys_that_are_rotated_by_position_stay(heads_of: Read) -> None:
    assert keys_turn(heads_of("bert-eager").layers[0])
    assert not keys_turn(heads_of("llama_kv-sdpa").layers[0])


def in_pairs(layer: Layer) -> Layer:
    """Heads 0 and 2, and 1 and 3, compute the same in different bases."""
    assert layer.query is not None
    assert layer.key is not None
    assert layer.value is not None
    assert layer.output is not None
    draw = np.random.default_rng(0)
    parts: Mapping[str, Floats] = {
        "query": layer.query.weight.copy(),
        "key": layer.key.weight.copy(),
        "value": layer.value.weight.copy(),
    }
    key_bias, value_bias = layer.key.bias.copy(), layer.value.bias.copy()
    query_bias, output = layer.query.bias.copy(), layer.output.weight.copy()
    for new, old in ((2, 0), (3, 1)):
        for side in ("key", "value"):
            basis = np.linalg.qr(draw.standard_normal((8, 8)))[0]
            part = parts[side]
            part[:, new] = part[:, old] @ basis
            bias = key_bias if side == "key" else value_bias
            bias[new] = bias[old] @ basis
            if side == "key":
                parts["query"][:, new] = parts["query"][:, old] @ basis
                query_bias[new] = query_bias[old] @ basis
            else:
                output[new] = basis.T @ output[old]
    return dataclasses.replace(
        layer,
        query=dataclasses.replace(layer.query, weight=parts["query"], bias=query_bias),
        key=dataclasses.replace(layer.key, weight=parts["key"], bias=key_bias),
        value=dataclasses.replace(layer.value, weight=parts["value"], bias=value_bias),
        output=dataclasses.replace(layer.output, weight=output),
    )


def test_equal_heads_in_other_bases_are_found_and_averaged_without_loss(
    encoder: HeadModel,
) -> None:
    heads = dataclasses.replace(encoder, layers=tuple(in_pairs(x) for x in encoder.layers))
    (layer,) = heads.layers
    apart = distances(layer)
    assert apart[0, 2] < 1e-9
    assert apart[1, 3] < 1e-9
    assert apart[0, 1] > 0.1
    aligned, plain = regroup(heads, 2), regroup(heads, 2, align=False)
    assert aligned.groups[0] == ((0, 2), (1, 3))
    assert aligned.spread[0] < 1e-9
    assert plain.spread[0] > 0.1


def test_an_aligned_model_runs_as_its_weights_say(
    encoder: HeadModel, encoder_data: Path, evaluator: Evaluator
) -> None:
    """The written graph, averaged without loss, is the graph with those heads spelled out."""
    heads = dataclasses.replace(encoder, layers=tuple(in_pairs(x) for x in encoder.layers))
    exact = regroup(heads, 2).model
    (layer,) = heads.layers
    spelled = rebuilt(heads, [_rewired(layer, contiguous_groups(4, 4))])
    (batch,) = read_samples(encoder_data, encoder.model).batches
    (name,) = [str(value.name) for value in encoder.model.graph.outputs]
    found = evaluator.run(exact, batch.inputs)[name]
    expected = evaluator.run(spelled, batch.inputs)[name]
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(expected).max() > 0.1


def test_spread_is_what_averaging_loses(encoder: HeadModel) -> None:
    """For pairs the distance that groups are chosen by is the loss itself."""
    (layer,) = encoder.layers
    apart = distances(layer)
    found = regroup(encoder, 2)
    lost = sum(apart[a, b] / 2 for a, b in found.groups[0])
    # two parts, keys and values, each relative to its own square
    assert found.spread[0] == pytest.approx(lost / 2, rel=1e-6)
