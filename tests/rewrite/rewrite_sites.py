"""Sites made by hand: a graph of primitive ops around one attention whose operands are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.forms import Form, FormParams, Scope, form_named
from mha_export.forms._inputs import GraphInputs, bind
from mha_export.forms._layout import as_layout
from mha_export.operands import Layout, Operands
from mha_export.recognise import Recognition, Site
from mha_export.rewrite import Choice
from mha_export.spec import AttentionSpec

OPSET = 23


def recognition_of(
    spec: AttentionSpec, *, claimed: AttentionSpec | None = None, opset: int = OPSET
) -> Recognition:
    """A model that computes ``spec`` in primitive ops, recognised as ``claimed`` (the truth)."""
    scope = Scope("", opset=opset)
    inputs = GraphInputs(spec)
    operands = bind(scope, spec, inputs, {})
    before = len(scope.nodes)
    emitted = form_named("primitive").emit(scope, spec, FormParams(opset=opset), operands)
    output = emitted.output
    if spec.combine == "concat":
        output = as_layout(scope, output, Layout.BSM)
    outputs = {"output": output.value}
    for role in ("present_key", "present_value"):
        heads = getattr(emitted, role)
        if heads is not None:
            outputs[role] = heads.value
    if emitted.qk_output is not None:
        outputs["qk_output"] = emitted.qk_output
    for name, value in outputs.items():
        value.name = name
        value.shape = ir.Shape([f"{name}.{axis}" for axis in range(4 if name != "output" else 3)])
    graph = ir.Graph(
        inputs.values,
        list(outputs.values()),
        nodes=scope.nodes,
        initializers=scope.initializers,
        opset_imports={"": opset},
        name="by_hand",
    )
    anchor = next(node for node in graph if node.op_type == "Softmax")
    site = Site(
        id="attn.0",
        spec=claimed or spec,
        graph=graph,
        operands=operands,
        output=output,
        anchor=anchor,
        nodes=tuple(scope.nodes[before:]),
        qk_output=emitted.qk_output,
        present_key=emitted.present_key,
        present_value=emitted.present_value,
    )
    return Recognition(model=ir.Model(graph, ir_version=11), verdicts=(site,))


def always(form: Form | str, *, opset: int = OPSET, **options: object) -> Callable[[Site], Choice]:
    """A chooser that emits one form everywhere."""
    chosen = form_named(form) if isinstance(form, str) else form
    params = FormParams(opset=opset, options=options)  # type: ignore[arg-type]
    return lambda site: Choice(form=chosen, params=params)


@dataclass(frozen=True, kw_only=True)
class Altered:
    """The primitive form, given another spec or other operands than the site's: a planted bug."""

    name: str
    respec: Callable[[AttentionSpec], AttentionSpec] = lambda spec: spec
    rebind: Callable[[Scope, AttentionSpec, Operands], Operands] = lambda scope, spec, ops: ops
    min_opset: int = 13
    summary: str = "wrong on purpose"

    def supports(self, spec: AttentionSpec, params: FormParams) -> object:
        return form_named("primitive").supports(spec, params)

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> object:
        wrong = self.respec(spec)
        return form_named("primitive").emit(
            scope, wrong, params, self.rebind(scope, wrong, operands)
        )
