"""What tests of forms share: a small real evaluator, and emission into a bare graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_export.forms import FormParams, Scope, form_named
from mha_export.operands import Heads, Operands
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
