"""Putting an emission in the place of a site's nodes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from mha_export.bounds import numpy_dtype
from mha_export.recognise import Site
from mha_export.rewrite._clone import subgraphs_of
from mha_export.rewrite._emit import Emission
from mha_export.rewrite._slice import reads_of
from mha_export.spec import AttentionSpec

MICROSOFT = "com.microsoft"


class Names:
    """The first dotted parts under which a model's nodes and values are named."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        self.add(all_nodes(model))
        for name in model.graph.initializers:
            self._take(name)

    def prefix(self, wanted: str) -> str:
        """``wanted``, or ``wanted~2`` and so on where something is named under it already."""
        prefix, count = wanted, 1
        while prefix in self._taken:
            count += 1
            prefix = f"{wanted}~{count}"
        return prefix

    def add(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            self._take(node.name)
            for value in node.outputs:
                self._take(value.name)

    def _take(self, name: str | None) -> None:
        """Note every dotted beginning of a name."""
        parts = (name or "").split(".")
        for end in range(1, len(parts)):
            self._taken.add(".".join(parts[:end]))


def all_nodes(model: ir.Model) -> Iterable[ir.Node]:
    """Every node of the model, subgraphs and functions included."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def splice(model: ir.Model, site: Site, emission: Emission) -> None:
    """Insert the emitted nodes and let everything that read the site read them instead.

    The old nodes stay, unread, for :func:`remove_dead_nodes`. Names, types and metadata of graph
    outputs pass to the new values.
    """
    owner = site.graph
    nodes = list(emission.nodes)
    if isinstance(owner, ir.Function):
        nodes = [*(_constant_node(value) for value in emission.initializers), *nodes]
    else:
        for value in emission.initializers:
            owner.register_initializer(value)
    last = site.output.value.producer()
    assert last is not None, f"site {site.id} has an output that no node computes"
    owner.insert_before(last, nodes)
    for old, new in emission.replacements:
        take_place(old, new)
    for domain in sorted({node.domain for node in nodes} - {""}):
        version = 1 if domain == MICROSOFT else _function_version(emission, domain)
        model.graph.opset_imports.setdefault(domain, version)
        if isinstance(owner, ir.Function):
            owner.opset_imports.setdefault(domain, version)
    for identifier, function in emission.functions.items():
        if identifier not in model.functions:
            model.functions[identifier] = function


def state_widths(spec: AttentionSpec, nodes: Iterable[ir.Node]) -> None:
    """Write down how wide the [b, length, heads * dim] inputs of Attention nodes are.

    ONNX's shape inference for Attention makes a width of 0 of one it cannot infer (a Slice to a
    computed end), and runtimes then refuse the file.
    """
    widths = (
        spec.q_heads * spec.head_dim,
        spec.kv_heads * spec.head_dim,
        spec.kv_heads * spec.value_dim,
    )
    for node in nodes:
        flat = node.op_type == "Attention" and "q_num_heads" in node.attributes
        if node.graph is None or node.domain != "" or not flat:
            continue
        for value, width in zip(node.inputs, widths, strict=False):
            if value is None or (value.shape is not None and isinstance(value.shape[-1], int)):
                continue
            known = (None, None) if value.shape is None else tuple(value.shape[:-1])
            value.shape = ir.Shape([*known, width])
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.from_numpy(numpy_dtype(spec.io_dtype)))


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` be what ``old`` was to everyone, name and annotations included."""
    if new.shape is None or old.is_graph_output():
        new.shape = old.shape
    if new.type is None or old.is_graph_output():
        new.type = old.type
    if old.is_graph_output():
        new.doc_string = old.doc_string
        new.metadata_props.update(old.metadata_props)
        name = old.name
        old.name = None if name is None else f"{name}.replaced"
        new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _constant_node(value: ir.Value) -> ir.Node:
    """A Constant node in place of an initializer (functions hold none); takes over its readers."""
    assert value.const_value is not None
    node = ir.Node(
        "",
        "Constant",
        [],
        [ir.AttrTensor("value", value.const_value)],
        outputs=[ir.Value(name=value.name, type=value.type, shape=value.shape)],
        name=value.name,
    )
    value.replace_all_uses_with(node.outputs[0])
    return node


def restore_order(model: ir.Model) -> None:
    """Sort each graph whose nodes no longer follow what they read (bodies included), stably."""
    for graph in _graphs(model):
        if not _is_ordered(graph):
            graph.sort()


def _is_ordered(graph: ir.Graph | ir.Function) -> bool:
    computed_here = {value for node in graph for value in node.outputs}
    seen: set[ir.Value] = set()
    for node in graph:
        if any(value in computed_here and value not in seen for value in reads_of(node)):
            return False
        seen.update(node.outputs)
    return True


def _function_version(emission: Emission, domain: str) -> int:
    for function in emission.functions.values():
        if domain in function.opset_imports:
            return int(function.opset_imports[domain])
    return 1


def remove_dead_nodes(model: ir.Model) -> bool:
    """Remove nodes that nothing reads, bodies and functions included, and unused initializers.

    Returns:
        Whether anything was removed.
    """
    removed = False
    for graph in _graphs(model):
        removed |= _sweep(graph)
    for graph in _graphs(model):
        if isinstance(graph, ir.Graph):
            removed |= _sweep_initializers(graph)
    return removed


def _graphs(model: ir.Model) -> list[ir.Graph | ir.Function]:
    """Outer graphs first: a dead control-flow node frees its whole body."""
    found: list[ir.Graph | ir.Function] = []

    def visit(graph: ir.Graph | ir.Function) -> None:
        found.append(graph)
        for node in graph:
            for body in subgraphs_of(node):
                visit(body)

    visit(model.graph)
    for function in model.functions.values():
        visit(function)
    return found


def _sweep(graph: ir.Graph | ir.Function) -> bool:
    removed = False
    for node in reversed(graph):
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        for body in subgraphs_of(node):
            _release(body)
        graph.remove(node, safe=True)
        removed = True
    return removed


def _release(body: ir.Graph) -> None:
    """Drop what a dead body reads, so that its outer producers can be seen to be dead."""
    for node in reversed(body):
        for inner in subgraphs_of(node):
            _release(inner)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _sweep_initializers(graph: ir.Graph) -> bool:
    inputs = set(graph.inputs)
    unused = [
        name
        for name, value in graph.initializers.items()
        if not value.uses() and not value.is_graph_output() and value not in inputs
    ]
    for name in unused:
        del graph.initializers[name]
    return bool(unused)
