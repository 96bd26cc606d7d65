"""What tests of forms share: a small real evaluator, and emission into a bare graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from mha_export.forms import FormParams, Scope, form_named
from mha_export.operands import Heads, Layout, Operands
from mha_export.spec import AttentionSpec

Arrays = dict[str, np.ndarray]


def graph_input(name: str, array: np.ndarray, *, shaped: bool = True) -> ir.Value:
    """A graph input for an array; without a shape it is one that a form knows nothing about."""
    shape = [f"{name}_{axis}" for axis in range(array.ndim)] if shaped else None
    return ir.Value(
        name=name,
        type=ir.TensorType(ir.tensor(array).dtype),
        shape=None if shape is None else ir.Shape(shape),
    )


def run_model(model: ir.Model, arrays: Arrays) -> Arrays:
    """One run on ONNX Runtime's CPU provider, without its own rewriting of the graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {value.name: arrays[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, wanted), strict=True))


def emitted_model(
    form: str, spec: AttentionSpec, operands: Operands, *, opset: int = 23
) -> tuple[ir.Model, Heads]:
    """The graph of one emission as the rewriter would have it, and its output."""
    scope = Scope("layer.0.self", opset=opset)
    emitted = form_named(form).emit(scope, spec, FormParams(opset=opset), operands)
    emitted.output.value.name = "output"
    outputs = [emitted.output.value]
    for name in ("present_key", "present_value"):
        heads = getattr(emitted, name)
        if heads is not None:
            heads.value.name = name
            outputs.append(heads.value)
    seen: dict[str, ir.Value] = {}
    for _, value in operands.values():
        seen[str(value.name)] = value
    graph = ir.Graph(
        list(seen.values()),
        outputs,
        nodes=scope.nodes,
        initializers=scope.initializers,
        opset_imports={"": opset, "com.microsoft": 1},
        name="emitted",
    )
    model = ir.Model(graph, ir_version=11, functions=list(scope.functions.values()))
    return model, emitted.output


class Bench:
    """A scope to emit into, the graph inputs it reads, and what the emitted values turn out to be.

    ``run`` can be called again as the emission goes on.
    """

    def __init__(self, *, opset: int = 18) -> None:
        self.scope = Scope("", opset=opset)
        self.inputs: list[ir.Value] = []
        self.arrays: Arrays = {}

    def value(
        self, name: str, array: np.ndarray, *, shape: Sequence[int | str] | None = None
    ) -> ir.Value:
        """A graph input that holds ``array``; its axes are named unless ``shape`` says more."""
        value = graph_input(name, array)
        if shape is not None:
            value.shape = ir.Shape(shape)
        self.inputs.append(value)
        self.arrays[name] = array
        return value

    def heads(self, name: str, x_bhsd: np.ndarray, layout: Layout = Layout.BHSD) -> Heads:
        """A graph input that holds heads, in that order of axes."""
        b, h, s, d = x_bhsd.shape
        laid_out = x_bhsd if layout is Layout.BHSD else x_bhsd.swapaxes(1, 2)
        array = laid_out.reshape(b, s, h * d) if layout is Layout.BSM else laid_out
        value = self.value(name, np.ascontiguousarray(array))
        return Heads(value=value, layout=layout, heads=h, dim=d)

    @property
    def types(self) -> list[str]:
        """The op types emitted so far."""
        return [node.op_type for node in self.scope.nodes]

    def run(self, *values: ir.Value) -> list[np.ndarray]:
        """Numbers of the values, on ONNX Runtime's CPU provider."""
        outputs = []
        nodes = list(self.scope.nodes)
        for index, value in enumerate(values):
            output = ir.Value(name=f"result {index}", type=value.type)
            nodes.append(ir.Node("", "Identity", [value], outputs=[output]))
            outputs.append(output)
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=nodes,
            initializers=self.scope.initializers,
            opset_imports={"": self.scope.opset},
            name="bench",
        )
        made = run_model(ir.Model(graph, ir_version=10), self.arrays)
        graph.remove(nodes)
        for owned in (graph.inputs, graph.outputs, graph.initializers):
            owned.clear()
        return [made[str(output.name)] for output in outputs]


def heads_of(array: np.ndarray, heads: Heads) -> np.ndarray:
    """A run's numbers as [b, h, s, d], from the order of axes that ``heads`` has."""
    if heads.layout is Layout.BSM:
        array = array.reshape(*array.shape[:2], heads.heads, heads.dim)
    return array if heads.layout is Layout.BHSD else array.swapaxes(1, 2)
