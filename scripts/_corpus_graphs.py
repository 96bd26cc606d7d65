"""What a rewritten graph may not hold, and copies of a graph that say the same another way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

ATTENTIONS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})
MOVES = frozenset(
    {
        *("Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Split"),
        *("Squeeze", "Transpose", "Unsqueeze"),
    }
)
REPEATS = frozenset({"Expand", "Tile"})


def repeats(recognition: Any, fused: set[str]) -> Iterator[str]:
    """Each Expand or Tile between the projections and the keys or values of a fused site."""
    for site in recognition.sites:
        if site.id not in fused or site.fused_as is None:
            continue
        if site.spec.kv_heads == site.spec.q_heads:
            continue
        for role in ("key", "value", "past_key", "past_value"):
            heads = getattr(site.operands, role)
            pending = [None if heads is None else heads.value.producer()]
            while pending:
                node = pending.pop()
                if node is None:
                    continue
                if node.op_type in REPEATS:
                    yield f"{site.id}: {node.op_type} {node.name} on {role}"
                elif node.op_type in MOVES:
                    pending += [value.producer() for value in node.inputs if value is not None]


def pasts_outside(recognition: Any, fused: set[str]) -> Iterator[str]:
    """Each node but the attention and Shape that reads the past of a fused site."""
    for site in recognition.sites:
        for role in ("past_key", "past_value"):
            heads = getattr(site.operands, role)
            if site.id not in fused or site.fused_as is None or heads is None:
                continue
            for node, _ in heads.value.uses():
                if node.op_type not in ATTENTIONS and node.op_type not in ("Shape", "Size"):
                    yield f"{site.id}: {node.op_type} {node.name} reads {heads.value.name}"


def untidy(model: Any) -> Iterator[str]:
    """Dead nodes, and layout ops beside emitted nodes that undo or repeat each other."""
    for node in model.graph.all_nodes():
        outputs = node.outputs
        if not any(value.uses() or value.is_graph_output() for value in outputs):
            yield f"nothing reads {node.op_type} {node.name}"
        above = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if above is None or not any("mha_export.site" in n.metadata_props for n in (node, above)):
            continue
        if node.op_type == "Identity" and not outputs[0].is_graph_output():
            yield f"Identity {node.name}"
        if "mha_export.reads" in node.metadata_props:
            continue  # what a statement says is an operand stays a value of its own
        if node.op_type == above.op_type == "Transpose":
            yield f"Transpose {node.name} of Transpose {above.name}"
        if node.op_type == above.op_type == "Reshape" and len(above.outputs[0].uses()) == 1:
            yield f"Reshape {node.name} of Reshape {above.name}"


def unread_weights(model: Any) -> Iterator[str]:
    for name, value in model.graph.initializers.items():
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            yield f"nothing reads the weight {name}"


def idle(model: Any, sizes: Any) -> Iterator[str]:
    """Emitted layout ops whose result has the shape of what they read, at every choice of sizes."""
    from mha_export.rewrite._tidy import Sizes

    shapes = Sizes(model, sizes)
    for node in model.graph:
        emitted = "mha_export.site" in node.metadata_props
        if not emitted or node.op_type not in ("Expand", "Reshape", "Tile", "Transpose"):
            continue
        if node.op_type == "Transpose":
            perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else [1, 0]
            if perm != sorted(perm):
                continue
        before, output = shapes.shapes(node.inputs[0]), node.outputs[0]
        if before is not None and before == shapes.shapes(output) and not output.is_graph_output():
            yield f"{node.op_type} {node.name} changes nothing"


def pasts_read(model: Any, pasts: set[str]) -> Iterator[str]:
    """Each node but attentions, writers of a buffer and Shape that reads a past."""
    writers = {"ScatterElements", "ScatterND", "TensorScatter"}
    for value in model.graph.inputs:
        for node, _ in value.uses() if value.name in pasts else ():
            if node.op_type not in {*ATTENTIONS, *writers, "Shape", "Size"}:
                yield f"{node.op_type} {node.name} reads {value.name}"


def interface(model: Any) -> list[tuple[Any, ...]]:
    """Names, types, shapes and metadata of inputs and outputs, in order; then the file's own."""
    values = [*model.graph.inputs, *model.graph.outputs]
    stated: list[tuple[Any, ...]] = [
        (v.name, v.dtype, str(v.shape), v.doc_string or "", sorted(v.metadata_props.items()))
        for v in values
    ]
    own = {k: v for k, v in model.metadata_props.items() if not k.startswith("mha_export.")}
    return [*stated, ("metadata", sorted(own.items()), model.doc_string or "")]


def copies(model: Any, scratch: Path) -> Iterator[tuple[str, Any]]:
    """The model as ONNX text, with external data, and as one function that the graph calls."""
    import onnx_ir as ir

    yield "text", ir.from_onnx_text(ir.to_onnx_text(model))
    ir.save(model.clone(), scratch / "external.onnx", external_data="weights.bin")
    yield "external data", ir.load(scratch / "external.onnx")
    yield "a function", in_a_function(model)


def in_a_function(model: Any) -> Any:
    """The whole main graph as the body of one function; weights become its inputs."""
    import onnx_ir as ir

    inner = model.clone().graph
    inputs, outputs, weights = list(inner.inputs), list(inner.outputs), inner.initializers.values()
    kept = [(value, value.const_value) for value in weights if value not in inputs]
    stated = [[(v.name, v.type, v.shape) for v in values] for values in (inputs, outputs)]
    for value, _ in kept:
        value.const_value = None
    nodes = list(inner)
    inner.initializers.clear()
    inner.remove(nodes)
    inner.inputs.clear()
    inner.outputs.clear()
    imports = dict(model.opset_imports)
    body = ir.Graph(
        [*inputs, *(value for value, _ in kept)],
        outputs,
        nodes=nodes,
        opset_imports=imports,
        name="body",
    )
    function = ir.Function("local", "Whole", graph=body, attributes=[])
    outer = [ir.Value(name=n, type=t, shape=s) for n, t, s in stated[0]]
    stored = [
        ir.Value(
            name=f"weight_{place}",
            const_value=tensor,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tuple(tensor.shape)),
        )
        for place, (_, tensor) in enumerate(kept)
        if tensor is not None
    ]
    results = [ir.Value(name=f"{n}_whole", type=t, shape=s) for n, t, s in stated[1]]
    call = ir.Node("local", "Whole", [*outer, *stored], outputs=results, name="call")
    graph = ir.Graph(
        outer,
        results,
        nodes=[call],
        initializers=stored,
        opset_imports={**imports, "local": 1},
        name="outer",
    )
    return ir.Model(graph, ir_version=model.ir_version, functions=[function])
