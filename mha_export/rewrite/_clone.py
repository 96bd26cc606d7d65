"""A copy of a model, and where each node and value of the original went."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import onnx_ir as ir

from mha_export.operands import Heads
from mha_export.recognise import Site

_Part = TypeVar("_Part")


class ClonedModel:
    """``model`` is a copy; :meth:`site` gives a site of the original in terms of the copy."""

    def __init__(self, original: ir.Model) -> None:
        self.model = original.clone()
        self._values: dict[ir.Value, ir.Value] = {}
        self._nodes: dict[ir.Node, ir.Node] = {}
        self._graphs: dict[int, ir.Graph | ir.Function] = {}
        self._pair(original.graph, self.model.graph)
        for identifier, function in original.functions.items():
            self._pair(function, self.model.functions[identifier])

    def _pair(self, old: ir.Graph | ir.Function, new: ir.Graph | ir.Function) -> None:
        self._graphs[id(old)] = new
        if isinstance(old, ir.Function) and isinstance(new, ir.Function):
            self._graphs[id(old.graph)] = new
        self._values.update(zip(old.inputs, new.inputs, strict=True))
        if isinstance(old, ir.Graph) and isinstance(new, ir.Graph):
            for name, value in old.initializers.items():
                self._values[value] = new.initializers[name]
        for before, after in zip(old, new, strict=True):
            self._nodes[before] = after
            self._values.update(zip(before.outputs, after.outputs, strict=True))
            for one, other in zip(subgraphs_of(before), subgraphs_of(after), strict=True):
                self._pair(one, other)

    def value(self, value: ir.Value) -> ir.Value:
        return self._values[value]

    def site(self, site: Site) -> Site:
        """The same site, its values and nodes those of the copy."""
        return dataclasses.replace(
            site,
            graph=self._graphs[id(site.graph)],
            operands=with_values(site.operands, self._values),
            output=_mapped(site.output, self._values),
            anchor=self._nodes[site.anchor],
            nodes=tuple(self._nodes[node] for node in site.nodes),
            qk_output=None if site.qk_output is None else self._values[site.qk_output],
            present_key=_mapped_or_none(site.present_key, self._values),
            present_value=_mapped_or_none(site.present_value, self._values),
        )


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies a control-flow node holds, in attribute order."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def with_values(part: _Part, mapping: dict[ir.Value, ir.Value]) -> _Part:
    """Operands, heads, masks or tables with every value replaced by its image."""
    changes: dict[str, object] = {}
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        item = getattr(part, field.name)
        if isinstance(item, ir.Value):
            changes[field.name] = mapping[item]
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            changes[field.name] = with_values(item, mapping)
    return dataclasses.replace(part, **changes)  # type: ignore[type-var]


def _mapped(heads: Heads, mapping: dict[ir.Value, ir.Value]) -> Heads:
    return with_values(heads, mapping)


def _mapped_or_none(heads: Heads | None, mapping: dict[ir.Value, ir.Value]) -> Heads | None:
    return None if heads is None else _mapped(heads, mapping)
