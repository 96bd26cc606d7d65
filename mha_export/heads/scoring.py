"""What gates do to the loss, on a runtime: the ground under importance and pruning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mha_export.evaluator import Evaluator
from mha_export.heads.data import Batch
from mha_export.heads.gates import GatedModel, Head
from mha_export.heads.measures import Measure, measure_named

Floats = NDArray[np.float64]


class Scorer:
    """Runs one gated model on fixed samples.

    Args:
        gated: the model, its first output being the one that is measured.
        evaluator: what runs it.
        batches: the samples.
        measure: a measure, or the name of one (see :mod:`mha_export.heads.measures`).
    """

    def __init__(
        self,
        gated: GatedModel,
        evaluator: Evaluator,
        batches: Sequence[Batch],
        measure: Measure | str = "auto",
    ) -> None:
        self.gated = gated
        self.batches = tuple(batches)
        self.output = str(gated.model.graph.outputs[0].name)
        self.runs = 0
        self._evaluator = evaluator
        self.references = self.outputs()
        self.measure = (
            measure_named(measure, self.references, self.batches, output=self.output)
            if isinstance(measure, str)
            else measure
        )
        self._kept: dict[frozenset[Head], float] = {}

    def outputs(
        self, removed: Collection[Head] = (), *, at: Mapping[Head, float] | None = None
    ) -> list[Floats]:
        """The measured output of every batch, as float64."""
        gates = self.gated.gates(removed, at=at)
        self.runs += 1
        return [
            self._evaluator.run(self.gated.model, {**batch.inputs, **gates})[self.output].astype(
                np.float64
            )
            for batch in self.batches
        ]

    def losses(
        self, removed: Collection[Head] = (), *, at: Mapping[Head, float] | None = None
    ) -> Floats:
        """One loss a sample."""
        return self.losses_of(self.outputs(removed, at=at))

    def losses_of(self, outputs: Sequence[Floats]) -> Floats:
        """One loss a sample of outputs already there."""
        return np.concatenate(
            [
                np.asarray(self.measure.losses(np, mine, theirs, batch))
                for mine, theirs, batch in zip(outputs, self.references, self.batches, strict=True)
            ]
        )

    def loss(self, removed: Collection[Head] = ()) -> float:
        """The mean loss without some heads; kept."""
        key = frozenset(removed)
        if key not in self._kept:
            self._kept[key] = float(self.losses(key).mean())
        return self._kept[key]

    def quality(self, removed: Collection[Head] = ()) -> float:
        """The quality without some heads."""
        return self.quality_of(self.outputs(removed))

    def quality_of(self, outputs: Sequence[Floats]) -> float:
        return self.measure.quality(outputs, self.references, self.batches)
