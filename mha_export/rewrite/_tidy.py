"""Layout ops that undo each other around freshly emitted nodes.

Only six laws, each true for every input:

1. ``Transpose(Transpose(x, p), q) = Transpose(x, p[q])``, and nothing where that is the identity.
2. ``Reshape(Reshape(x, a), c) = Reshape(x, c)`` where every dimension that c copies (a 0) is the
   same in x.
3. ``Reshape(x, c) = x`` where the result has x's own shape.
4. ``Expand(x, s) = x`` where the result has x's own shape.
5. ``Cast(x, type of x) = x``; ``Identity(x) = x``.
6. ``Concat(x) = x``: what an exporter leaves of a cache beside the emitted nodes that read it.

And one of sharing: two emitted nodes with the same operator, attributes and inputs are one node
(sites that share a mask expand it once), two small equal constants one constant. What a statement
says is an operand stays one: nothing is read past it.

That two dimensions are the same is read off constants and copies where it can be, else off the
shapes the graph itself computes at several choices of sizes that differ in every length
(:class:`Sizes`): what a reshape does depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from mha_export.recognise._evaluate import Context, SizedView
from mha_export.rewrite._emit import SITE
from mha_export.statement import is_stated, share_statements

_SMALL = 64


class Sizes:
    """Shapes in a graph at several choices of sizes; with fewer than two, nothing is known."""

    def __init__(self, model: ir.Model, numbers: Sequence[Mapping[str, int]]) -> None:
        self._model = model
        self._numbers = numbers
        self._views: list[SizedView] | None = None

    @property
    def _is_enough(self) -> bool:
        """Two choices, or the only one of a graph without symbols."""
        return len(self._numbers) > 1 or (len(self._numbers) == 1 and not self._numbers[0])

    def shapes(self, value: ir.Value | None) -> list[tuple[int, ...]] | None:
        """The value's shape at each choice, or None where one of them is unknown."""
        if value is None or not self._is_enough:
            return None
        if self._views is None:
            context = Context(self._model)
            self._views = [context.sized(numbers) for numbers in self._numbers]
        found = [view.shape(value) for view in self._views]
        known = [shape for shape in found if shape is not None]
        return known if len(known) == len(found) else None


def tidy_layouts(model: ir.Model, emitted: Iterable[ir.Node], sizes: Sizes) -> None:
    """Apply the laws to the emitted nodes and their neighbours until none applies."""
    emitted = list(emitted)
    _share_constants(model.graph, emitted)
    _share_nodes(emitted)
    pending = [*_with_readers(emitted), *_beside(emitted)]
    while pending:
        node = pending.pop(0)
        if node.graph is None or node.domain != "":
            continue
        changed = _LAWS.get(node.op_type, _no_law)(node, sizes)
        if changed:
            pending.extend(_with_readers([node]))


def _share_constants(graph: ir.Graph, emitted: list[ir.Node]) -> None:
    """Small initializers of the main graph that emitted nodes read: one for each content."""
    first: dict[tuple[object, ...], ir.Value] = {}
    for node in emitted:
        for value in node.inputs:
            tensor = None if value is None else value.const_value
            if value is None or tensor is None or tensor.size > _SMALL:
                continue
            if graph.initializers.get(value.name or "") is not value or value.is_graph_input():
                continue
            if not (value.name or "").startswith(node.metadata_props.get(SITE, "\0")):
                continue
            key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.numpy().tobytes())
            kept = first.setdefault(key, value)
            if kept is not value and not value.is_graph_output():
                value.replace_all_uses_with(kept)


def _share_nodes(emitted: list[ir.Node]) -> None:
    """One node for equal ones of one graph; the later ones are left unread."""
    first: dict[tuple[object, ...], ir.Node] = {}
    for node in emitted:
        if any(value.is_graph_output() for value in node.outputs):
            continue
        attributes = tuple(
            (name, repr(attribute.value)) for name, attribute in sorted(node.attributes.items())
        )
        key = (id(node.graph), node.op_identifier(), tuple(node.inputs), attributes)
        kept = first.setdefault(key, node)
        if kept is not node and len(kept.outputs) == len(node.outputs):
            for old, new in zip(node.outputs, kept.outputs, strict=True):
                old.replace_all_uses_with(new)
            share_statements(kept, node)


def _with_readers(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    found: dict[ir.Node, None] = {}
    for node in nodes:
        found.setdefault(node)
        for value in node.outputs:
            for reader, _ in value.uses():
                found.setdefault(reader)
    return list(found)


def _beside(emitted: list[ir.Node]) -> list[ir.Node]:
    """Other readers of the graph inputs that emitted nodes read."""
    read = dict.fromkeys(value for node in emitted for value in node.inputs if value is not None)
    own = set(emitted)
    return [
        reader
        for value in read
        if value.is_graph_input()
        for reader, _ in value.uses()
        if reader not in own
    ]


def _no_law(node: ir.Node, sizes: Sizes) -> bool:
    return False


def _transpose(node: ir.Node, sizes: Sizes) -> bool:
    inner = _producer(node, 0, "Transpose")
    outer_perm = _permutation(node)
    if inner is None or outer_perm is None or is_stated(node):
        return False
    inner_perm = _permutation(inner)
    if inner_perm is None or len(inner_perm) != len(outer_perm):
        return False
    source = inner.inputs[0]
    perm = [inner_perm[axis] for axis in outer_perm]
    if perm == sorted(perm):
        return _bypass(node, source)
    node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    node.replace_input_with(0, source)
    return True


def _reshape(node: ir.Node, sizes: Sizes) -> bool:
    target = _target_shape(node)
    source = node.inputs[0]
    if target is None or source is None:
        return False
    own = sizes.shapes(source)
    if _is_own_shape(source, target) or (own is not None and own == sizes.shapes(node.outputs[0])):
        return _bypass(node, source)
    inner = _producer(node, 0, "Reshape")
    if inner is None or inner.inputs[0] is None or is_stated(node):
        return False
    zeros = [axis for axis, size in enumerate(target) if size == 0]
    if zeros and not _copies_the_same(inner, zeros, sizes):
        return False
    node.replace_input_with(0, inner.inputs[0])
    return True


def _expand(node: ir.Node, sizes: Sizes) -> bool:
    source = node.inputs[0]
    own = sizes.shapes(source)
    if own is None or own != sizes.shapes(node.outputs[0]):
        return False
    return _bypass(node, source)


def _copies_the_same(inner: ir.Node, axes: list[int], sizes: Sizes) -> bool:
    """Whether these dimensions of an inner Reshape's result are those of its input."""
    target = _target_shape(inner)
    if target is not None and len(target) > max(axes) and not any(target[axis] for axis in axes):
        return True
    before, after = sizes.shapes(inner.inputs[0]), sizes.shapes(inner.outputs[0])
    if before is None or after is None:
        return False
    return all(
        len(one) > max(axes) and [one[axis] for axis in axes] == [other[axis] for axis in axes]
        for one, other in zip(before, after, strict=True)
    )


def _cast(node: ir.Node, sizes: Sizes) -> bool:
    source = node.inputs[0]
    if source is None or source.dtype is None:
        return False
    if source.dtype != ir.DataType(node.attributes["to"].as_int()):
        return False
    return _bypass(node, source)


def _identity(node: ir.Node, sizes: Sizes) -> bool:
    return _bypass(node, node.inputs[0])


def _concat(node: ir.Node, sizes: Sizes) -> bool:
    return len(node.inputs) == 1 and _bypass(node, node.inputs[0])


_LAWS = {
    "Concat": _concat,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Cast": _cast,
    "Identity": _identity,
}


def _bypass(node: ir.Node, source: ir.Value | None) -> bool:
    """Let readers of the node read its source; a graph output keeps its own node."""
    output = node.outputs[0]
    if source is None or output.is_graph_output() or not output.uses():
        return False
    output.replace_all_uses_with(source)
    return True


def _producer(node: ir.Node, index: int, op_type: str) -> ir.Node | None:
    value = node.inputs[index]
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != op_type or producer.domain != "":
        return None
    return producer if producer.graph is node.graph else None


def _permutation(node: ir.Node) -> list[int] | None:
    perm = node.attributes.get("perm")
    return None if perm is None else list(perm.as_ints())


def _target_shape(node: ir.Node) -> list[int] | None:
    """The constant shape of a Reshape in which 0 means copy, or None."""
    shape = node.inputs[1] if len(node.inputs) > 1 else None
    allow_zero = node.attributes.get("allowzero")
    if shape is None or shape.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(shape)
    if tensor is None:
        return None
    numbers = [int(x) for x in tensor.numpy().reshape(-1)]
    if allow_zero is not None and allow_zero.as_int() and 0 in numbers:
        return None
    return numbers


def _is_own_shape(source: ir.Value, target: list[int]) -> bool:
    if source.shape is None or len(source.shape) != len(target):
        return False
    dims = [dim if isinstance(dim, int) else None for dim in source.shape]
    unknown = 0
    for size, dim in zip(target, dims, strict=True):
        if size == 0 or (dim is not None and size == dim):
            continue
        if size != -1:
            return False
        unknown += 1
    # One -1 is the dimension's own size when all others are copied or equal.
    return unknown <= 1
