"""A number for every head as a graph input: the head's context is multiplied by it before W_O.

    output = sum_i gate_i * context_i W_O,i + bias

Gates of one are the model itself, a gate of zero is the model without that head. The gate's
derivative is the importance of Michel et al. 2019, "Are Sixteen Heads Really Better than One?".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.forms import Scope
from mha_export.heads._layers import HeadModel, Layer
from mha_export.operands import Heads, Layout
from mha_export.rewrite._clone import ClonedModel
from mha_export.rewrite._splice import Names, remove_dead_nodes, restore_order
from mha_export.rewrite.opset import model_opset

Head = tuple[int, int]
"""Layer number and query head, both from 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedModel:
    """A model with one gate input [h] a layer, named ``head_gates.<layer>``.

    ``heads`` are all that have a gate, in order.
    """

    model: ir.Model
    names: Mapping[int, str]
    sizes: Mapping[int, int]

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple((layer, head) for layer, size in self.sizes.items() for head in range(size))

    def gates(
        self, removed: Collection[Head] = (), *, at: Mapping[Head, float] | None = None
    ) -> dict[str, np.ndarray]:
        """The gate inputs: one, but zero for ``removed`` and as ``at`` says."""
        found = {
            self.names[layer]: np.ones(size, self._dtype(layer))
            for layer, size in self.sizes.items()
        }
        for layer, head in removed:
            found[self.names[layer]][head] = 0.0
        for (layer, head), number in (at or {}).items():
            found[self.names[layer]][head] = number
        return found

    def _dtype(self, layer: int) -> np.dtype:
        (value,) = (v for v in self.model.graph.inputs if v.name == self.names[layer])
        assert value.dtype is not None
        return np.dtype(value.dtype.numpy())


def with_gates(heads: HeadModel, *, outputs: Sequence[str] = ()) -> GatedModel:
    """A copy of the model in which every layer that can have gates has them.

    Args:
        heads: the model.
        outputs: graph outputs to keep; none: all of them.

    Errors:
        InputError: no layer can have gates, or an output that is not one.
    """
    gated = [layer for layer in heads.layers if layer.has_gates]
    gated = [layer for layer in gated if layer.context.value.graph is heads.model.graph]
    if not gated:
        raise InputError(
            "no attention of this model has heads that can be gated",
            fix="see `mha-export inspect` for what each softmax is",
        )
    cloned = ClonedModel(heads.model)
    names = Names(cloned.model)
    inputs = {}
    for layer in gated:
        value = _gate(cloned, layer, names.prefix(f"head_gates.{layer.id}"))
        cloned.model.graph.inputs.append(value)
        inputs[layer.number] = str(value.name)
    _keep_outputs(cloned.model, outputs)
    remove_dead_nodes(cloned.model)
    restore_order(cloned.model)
    return GatedModel(
        model=cloned.model, names=inputs, sizes={layer.number: layer.heads for layer in gated}
    )


def _gate(cloned: ClonedModel, layer: Layer, prefix: str) -> ir.Value:
    """Multiply the context of one layer by a new input, which is returned."""
    context = cloned.site(layer.known_site).output
    kind = context.value.dtype or ir.DataType.FLOAT
    gates = ir.Value(
        name=f"head_gates.{layer.number}",
        type=ir.TensorType(kind),
        shape=ir.Shape([context.heads]),
    )
    scope = Scope(prefix, opset=model_opset(cloned.model))
    factor = _spread(scope, gates, context, kind)
    readers = list(context.value.uses())
    gated = scope.op("Mul", [context.value, factor], dtype=kind)
    gated.shape = context.value.shape
    producer = context.value.producer()
    assert producer is not None
    for node, index in readers:
        node.replace_input_with(index, gated)
    graph = cloned.model.graph
    for index, output in enumerate(graph.outputs):
        if output is context.value:
            graph.outputs[index] = gated
    for constant in scope.initializers:
        graph.register_initializer(constant)
    graph.insert_after(producer, scope.nodes)
    return gates


def _spread(scope: Scope, gates: ir.Value, context: Heads, kind: ir.DataType) -> ir.Value:
    """The gates as a factor that broadcasts over the context's own axis order."""

    def shaped(value: ir.Value, *shape: int) -> ir.Value:
        wanted = scope.constant(np.array(shape, np.int64), hint="shape")
        return scope.op("Reshape", [value, wanted], dtype=kind, shape=shape)

    if context.layout is Layout.BHSD:
        return shaped(gates, context.heads, 1, 1)
    column = shaped(gates, context.heads, 1)
    if context.layout is Layout.BSHD:
        return column
    wide = scope.constant(np.array([context.heads, context.dim], np.int64), hint="shape")
    spread = scope.op("Expand", [column, wide], dtype=kind, shape=[context.heads, context.dim])
    return shaped(spread, context.heads * context.dim)


def _keep_outputs(model: ir.Model, outputs: Sequence[str]) -> None:
    known = [str(value.name) for value in model.graph.outputs]
    for name in outputs:
        if name not in known:
            raise InputError(f"the model has no output {name!r}", fix=f"it has {', '.join(known)}")
    if outputs:
        kept = [value for value in model.graph.outputs if value.name in outputs]
        model.graph.outputs.clear()
        model.graph.outputs.extend(kept)
