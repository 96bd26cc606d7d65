"""What every attention saw and gave on real inputs: weights, context, and what a head adds.

The values an attention reads are given out by a copy of the model; its weights then come from the
float64 oracle, so they are there whatever the graph looks like, fused or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.heads._layers import HeadModel, Layer
from mha_export.heads.data import Batch
from mha_export.operands import Heads, RotaryTables, ScoreMask
from mha_export.oracle import OracleInputs, attention
from mha_export.oracle._inputs import RotaryInputs
from mha_export.rewrite._heads import to_bhsd
from mha_export.rewrite._splice import remove_dead_nodes

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One layer on one batch: ``weights`` [b, h, s, t], ``context`` [b, h, s, e], both float64.

    ``visible`` [b, h, s]: how many keys a query may see.
    """

    layer: Layer
    batch: Batch
    weights: Floats
    context: Floats
    visible: Floats


class Probe:
    """Runs a model and tells what its layers saw.

    ``silent``: layers whose operands can't be given out, with the reason.
    """

    def __init__(self, heads: HeadModel, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self.silent: dict[int, str] = {}
        self._layers = []
        main = heads.model.graph
        for layer in heads.layers:
            if layer.site is None:
                continue
            if layer.site.graph is not main or layer.spec.combine != "concat":
                self.silent[layer.number] = "its values can't be given out by the graph"
            else:
                self._layers.append(layer)
        self._model = self._watching(heads)

    def _watching(self, heads: HeadModel) -> ir.Model:
        model = heads.model.clone()
        named: dict[str, ir.Value] = {}
        for node in model.graph:
            named.update({str(value.name): value for value in node.outputs})
        wanted = {
            str(value.name)
            for layer in self._layers
            for _, value in layer.known_site.operands.values()
        }
        model.graph.outputs.clear()
        for name in sorted(wanted & named.keys()):
            model.graph.outputs.append(named[name])
        remove_dead_nodes(model)
        for value in list(model.graph.inputs):
            if not value.uses() and not value.is_graph_output():
                model.graph.inputs.remove(value)
        return model

    def see(self, batch: Batch) -> Iterator[Seen]:
        """What each layer saw in one batch."""
        names = {value.name for value in self._model.graph.inputs}
        inputs = {name: array for name, array in batch.inputs.items() if name in names}
        values = {**batch.inputs, **self._evaluator.run(self._model, inputs)}
        for layer in self._layers:
            try:
                result = attention(layer.spec, _oracle_inputs(layer, values))
            except (MhaExportError, LookupError) as error:
                self.silent[layer.number] = str(error)
                continue
            assert result.probabilities is not None
            assert result.hidden is not None
            yield Seen(
                layer=layer,
                batch=batch,
                weights=result.probabilities,
                context=result.output,
                visible=(~result.hidden).sum(-1).astype(np.float64),
            )


def _oracle_inputs(layer: Layer, values: Mapping[str, np.ndarray]) -> OracleInputs:
    site = layer.known_site
    found: dict[str, Any] = {}
    for field in fields(site.operands):
        part = getattr(site.operands, field.name)
        if isinstance(part, Heads):
            found[field.name] = to_bhsd(_array(part.value, values), part)
        elif isinstance(part, RotaryTables):
            tables = {
                f.name: _array(inner, values)
                for f in fields(part)
                if isinstance(inner := getattr(part, f.name), ir.Value)
            }
            found["rotary"] = RotaryInputs(**tables)
        elif isinstance(part, ir.Value):
            found[field.name] = _array(part, values)
        elif isinstance(part, ScoreMask):
            continue  # the spec states what it hides
    if site.spec.value_source != "own":
        found.pop("value")
        found.pop("past_value", None)
    return OracleInputs(**found)


def _array(value: ir.Value, values: Mapping[str, np.ndarray]) -> np.ndarray:
    if value.const_value is not None:
        return value.const_value.numpy()
    return values[str(value.name)]
