"""What two sites must share for the proof of one to be the proof of the other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from mha_export.recognise import Site
from mha_export.rewrite._clone import subgraphs_of
from mha_export.rewrite._outcome import Choice
from mha_export.rewrite._slice import Slice

_LARGE = 4096
"""Constants above this many elements are weights: their shape counts, their content does not."""


def structure_key(
    site: Site, choice: Choice, original: Slice, operands: Slice, cuts: Mapping[ir.Value, str]
) -> str:
    """A hash of all but names and weights: spec, form, covered nodes, bindings, constants."""
    digest = hashlib.sha256()
    writer = _Writer(digest.update, cuts)
    kv_source = "own" if site.spec.kv_source == "own" else "shared"
    writer.text(repr(site.spec.replace(kv_source=kv_source)))
    writer.text(choice.form.name, repr(choice.params.to_json()))
    for name, value in site.operands.values():
        writer.text(name, writer.reference(value), repr(value.shape), repr(value.dtype))
    for field in ("query", "key", "value", "past_key", "past_value"):
        heads = getattr(site.operands, field)
        if heads is not None:
            writer.text(field, repr((heads.layout, heads.heads, heads.dim)))
    for heads in (site.output, site.present_key, site.present_value):
        if heads is not None:
            writer.text(repr((heads.layout, heads.heads, heads.dim)), writer.reference(heads.value))
    for part in (original, operands):
        writer.text("slice", *(writer.reference(value) for value in part.targets))
        for stop in part.stops:
            shape_only = stop in part.shape_only
            writer.text(
                writer.reference(stop), repr(stop.shape), repr(stop.dtype), repr(shape_only)
            )
        for node in part.nodes:
            writer.node(node)
    return digest.hexdigest()


class _Writer:
    """Writes a graph into a hash, values numbered in order of appearance."""

    def __init__(self, update: object, cuts: Mapping[ir.Value, str]) -> None:
        self._update = update
        self._numbers: dict[ir.Value, str] = {value: f"@{name}" for value, name in cuts.items()}

    def text(self, *parts: str) -> None:
        self._update("\0".join((*parts, "\n")).encode())  # type: ignore[operator]

    def reference(self, value: ir.Value | None) -> str:
        if value is None:
            return "-"
        if value not in self._numbers:
            self._numbers[value] = f"#{len(self._numbers)}"
            if value.const_value is not None:
                self.text(self._numbers[value], _content(value.const_value))
        return self._numbers[value]

    def node(self, node: ir.Node) -> None:
        inputs = [self.reference(value) for value in node.inputs]
        outputs = [self.reference(value) for value in node.outputs]
        self.text(node.domain, node.op_type, ",".join(inputs), ",".join(outputs))
        for name, attribute in sorted(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                # Not as_tensor(): it asks a runtime protocol, a large share of all the time.
                self.text(name, _content(attribute.value))
            elif attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                self.text(name, repr(attribute.value))
        for body in subgraphs_of(node):
            self.text("body", *(self.reference(value) for value in body.inputs))
            for inner in body:
                self.node(inner)
            self.text("end", *(self.reference(value) for value in body.outputs))


def _content(tensor: ir.TensorProtocol) -> str:
    head = f"{tensor.dtype} {tuple(tensor.shape.numpy())}"
    if tensor.size > _LARGE:
        return head
    data = np.ascontiguousarray(tensor.numpy()).tobytes()
    return f"{head} {hashlib.sha256(data).hexdigest()}"
