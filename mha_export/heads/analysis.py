"""Everything there is to say about every head of a model, from its weights and real inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mha_export.evaluator import Evaluator
from mha_export.heads._layers import HeadModel
from mha_export.heads.data import Batch, Samples
from mha_export.heads.gates import Head
from mha_export.heads.patterns import Pattern, PatternSum, induction, token_counts
from mha_export.heads.probing import Probe
from mha_export.heads.spectra import (
    Contributions,
    Spectrum,
    query_key_spectra,
    value_output_spectra,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerAnalysis:
    """One layer. Tuples run over query heads; empty where something could not be told.

    ``similarity`` [h, h]: CKA of contributions; ``mean`` [m]: their sum's mean over tokens.
    """

    number: int
    id: str
    patterns: tuple[Pattern, ...]
    query_key: tuple[Spectrum, ...]
    value_output: tuple[Spectrum, ...]
    norms: tuple[float, ...]
    similarity: Floats | None
    mean: Floats | None
    note: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMap:
    """The weights of one head on one sample, [s, t], and the words along both axes."""

    head: Head
    words: tuple[str, ...]
    weights: Floats


def analyse(
    heads: HeadModel,
    evaluator: Evaluator,
    samples: Samples,
    *,
    repeated: Batch | None = None,
) -> tuple[LayerAnalysis, ...]:
    """Patterns, spectra and contributions of every layer.

    Args:
        heads: the model.
        evaluator: what gives out the values that attentions read.
        samples: real inputs.
        repeated: random tokens said twice, for the induction score; None: there is none.
    """
    probe = Probe(heads, evaluator)
    patterns: dict[int, PatternSum] = {}
    added: dict[int, Contributions] = {}
    counts = token_counts(samples.batches)
    for batch in samples.batches:
        for seen in probe.see(batch):
            number = seen.layer.number
            own = patterns.setdefault(number, PatternSum(heads=seen.layer.heads))
            own.add(seen, counts=counts, separator=samples.separator)
            if seen.layer.output is not None:
                added.setdefault(number, Contributions(layer=seen.layer)).add(seen)
    scores = {}
    if repeated is not None:
        scores = {seen.layer.number: induction(seen) for seen in probe.see(repeated)}
    return tuple(
        _layer(heads, layer.number, patterns, added, scores, probe.silent)
        for layer in heads.layers
        if layer.site is not None
    )


def _layer(
    heads: HeadModel,
    number: int,
    patterns: Mapping[int, PatternSum],
    added: Mapping[int, Contributions],
    scores: Mapping[int, Floats],
    silent: Mapping[int, str],
) -> LayerAnalysis:
    layer = heads.layers[number]
    found = patterns[number].patterns() if number in patterns else ()
    if number in scores:
        found = tuple(
            dataclasses.replace(pattern, induction=float(score))
            for pattern, score in zip(found, scores[number], strict=True)
        )
    own = added.get(number)
    refusal = layer.refusal
    return LayerAnalysis(
        number=number,
        id=layer.id,
        patterns=found,
        query_key=query_key_spectra(layer),
        value_output=value_output_spectra(layer),
        norms=() if own is None else tuple(float(x) for x in own.norms()),
        similarity=None if own is None else own.similarity(),
        mean=None if own is None else own.mean(),
        note=silent.get(number) or (None if refusal is None else refusal.message),
    )


def mean_contributions(
    heads: HeadModel, evaluator: Evaluator, batches: Sequence[Batch], numbers: Sequence[int]
) -> dict[int, Floats]:
    """By layer, the mean over tokens of what its heads add: what a bias can stand in for."""
    probe = Probe(heads, evaluator)
    added: dict[int, Contributions] = {}
    for batch in batches:
        for seen in probe.see(batch):
            if seen.layer.number in numbers and seen.layer.output is not None:
                added.setdefault(seen.layer.number, Contributions(layer=seen.layer)).add(seen)
    return {number: own.mean() for number, own in added.items()}


def attention_maps(
    heads: HeadModel,
    evaluator: Evaluator,
    batch: Batch,
    chosen: Sequence[Head],
    words: Sequence[str],
) -> tuple[AttentionMap, ...]:
    """Weights of ``chosen`` heads on the first sample of ``batch``, padding cut off."""
    probe = Probe(heads, evaluator)
    length = int(batch.keep[0].sum())
    found = {}
    for seen in probe.see(batch):
        for number, head in chosen:
            if number == seen.layer.number:
                found[number, head] = seen.weights[0, head, :length, :length]
    return tuple(
        AttentionMap(head=head, words=tuple(words[:length]), weights=found[head])
        for head in chosen
        if head in found
    )
