"""The canonical stand-alone graph of one attention: a spec and a form in, an ``ir.Model`` out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_export.errors import InputError
from mha_export.forms._form import Emitted, Form, FormParams
from mha_export.forms._inputs import GraphInputs, bind, cached_length
from mha_export.forms._joint import leave_joint
from mha_export.forms._layout import as_layout
from mha_export.forms._project import Weights, expand_absorbed, linear
from mha_export.forms._scope import Scope
from mha_export.forms._weights import check_weights, random_weights, weight_shapes
from mha_export.operands import Heads, Layout, ir_dtype
from mha_export.spec import AttentionSpec, Dim
from mha_export.statement import SOFTMAXES, state

SITE = "attention"
"""The site id that the nodes of a canonical graph carry."""

_IR_VERSIONS = ((25, 13), (24, 12), (23, 11))
"""From which opset on a graph is of which IR version."""
_LEAST_IR = 10
"""The first IR version in which nodes carry metadata."""


def build_model(
    form: Form,
    spec: AttentionSpec,
    params: FormParams,
    *,
    weights: Mapping[str, np.ndarray] | Literal["none"] | None = None,
    seed: int = 0,
) -> ir.Model:
    """The canonical graph of ``spec`` in ``form``.

    Inputs are named as the operands: ``query``, ``key``, ``value`` [b, length, heads * dim], or
    ``hidden_states`` (and ``encoder_hidden_states``) where the spec states projections; then
    ``past_key``, ``keep``, ``bias``, ``key_padding``, ``kv_lengths`` and so on. Outputs:
    ``output`` [b, s, m] (and ``encoder_output`` of a second stream), ``present_key``,
    ``present_value``, ``qk_output``. Symbolic dimensions stay symbolic.

    Args:
        form: how to state it.
        spec: what to state.
        params: opset and the form's own settings.
        weights: numbers of the projections by name (:func:`weight_shapes`); ``none`` makes every
            weight a graph input of its name, so that the file holds no numbers; None draws them.
        seed: of drawn weights.

    Errors:
        InputError: the form does not support the spec, or the weights do not fit it.
    """
    verdict = form.supports(spec, params)
    if not verdict:
        raise InputError(
            f"form {form.name} cannot state this attention: {verdict}",
            fix="choose another form (primitive states every attention)",
        )
    scope = Scope("", opset=params.opset)
    inputs = GraphInputs(spec)
    bound = _weights(scope, spec, inputs, weights, seed)
    operands = bind(scope, spec, inputs, bound)
    before = len(scope.nodes)
    emitted = form.emit(scope, spec, params, operands)
    own = scope.nodes[before:]
    _mark(own, form, spec)
    state(own, spec, operands, emitted.heads, form=form.name, key=SITE)
    outputs = _outputs(scope, spec, bound, emitted, inputs)
    # Weights that became inputs come last: what a caller feeds at every run comes first.
    given = [value for value in inputs.values if value.name not in bound]
    given += [value for value in inputs.values if value.name in bound]
    return _model(scope, form, params, given, outputs)


def _weights(
    scope: Scope,
    spec: AttentionSpec,
    inputs: GraphInputs,
    weights: Mapping[str, np.ndarray] | Literal["none"] | None,
    seed: int,
) -> Weights:
    if weights == "none":
        return {name: inputs.add(name, shape) for name, shape in weight_shapes(spec).items()}
    if weights is None:
        weights = random_weights(spec, seed)
    check_weights(spec, weights)
    return {name: _initializer(scope, spec, name, weights[name]) for name in weight_shapes(spec)}


def _initializer(scope: Scope, spec: AttentionSpec, name: str, array: np.ndarray) -> ir.Value:
    dtype = ir_dtype(spec.io_dtype)
    tensor = ir.tensor(np.ascontiguousarray(array), dtype=None, name=name)
    if tensor.dtype != dtype:
        raise InputError(f"weight {name} is {tensor.dtype.name}; expected {dtype.name}")
    value = ir.Value(
        name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    scope.initializers.append(value)
    return value


def _mark(nodes: list[ir.Node], form: Form, spec: AttentionSpec) -> None:
    """Every node says which site and form it belongs to; the anchor carries the spec."""
    for node in nodes:
        node.metadata_props["mha_export.site"] = SITE
        node.metadata_props["mha_export.form"] = form.name
        if node.op_type in SOFTMAXES:
            text = json.dumps(spec.to_json(), sort_keys=True)
            node.metadata_props["mha_export.spec"] = text


def _outputs(
    scope: Scope, spec: AttentionSpec, weights: Weights, emitted: Emitted, inputs: GraphInputs
) -> list[ir.Value]:
    made = _context(scope, spec, weights, emitted.output, inputs)
    for name, heads in emitted.heads.items():
        if name != "output":
            made.append(_named(heads.value, name, _present_shape(spec, heads)))
    if emitted.qk_output is not None:
        kv_len: Dim = "kv_len" if spec.cache is not None else spec.kv_len
        shape: list[Dim] = [spec.batch, spec.q_heads, spec.q_len, kv_len]
        made.append(_named(emitted.qk_output, "qk_output", shape))
    return made


def _context(
    scope: Scope, spec: AttentionSpec, weights: Weights, output: Heads, inputs: GraphInputs
) -> list[ir.Value]:
    """``output`` [b, s, m], and ``encoder_output`` of a second stream."""
    projections = spec.projections
    if projections is not None and projections.joint is not None:
        joint = projections.joint
        parts = leave_joint(scope, spec, joint, weights, output, inputs.values[0])
        width = output.heads * output.dim
        widths = [projections.d_model, joint.d_model or projections.d_model]
        return [
            _named(part, name, [spec.batch, length, own if projections.output else width])
            for part, name, length, own in zip(
                parts, ("output", "encoder_output"), joint.lengths, widths, strict=False
            )
        ]
    if spec.latent is not None and spec.latent.absorbed and spec.projections is not None:
        output = expand_absorbed(scope, spec, spec.latent, weights, output)
    merged = as_layout(scope, output, Layout.BSM).value
    width = output.heads * output.dim
    if spec.projections is not None and spec.projections.output:
        merged = linear(scope, merged, weights, "o", dtype=ir_dtype(spec.io_dtype))
        width = spec.projections.d_model
    return [_named(merged, "output", [spec.batch, spec.q_len, width])]


def _present_shape(spec: AttentionSpec, heads: Heads) -> list[Dim]:
    assert spec.cache is not None
    length: Dim = spec.kv_len
    if spec.cache.growth != "concat":
        length = cached_length(spec.cache, spec)
    if heads.layout is Layout.BSHD:
        return [spec.batch, length, heads.heads, heads.dim]
    return [spec.batch, heads.heads, length, heads.dim]


def _named(value: ir.Value, name: str, shape: list[Dim]) -> ir.Value:
    value.name = name
    value.shape = ir.Shape(shape)
    return value


def _model(
    scope: Scope,
    form: Form,
    params: FormParams,
    inputs: list[ir.Value],
    outputs: list[ir.Value],
) -> ir.Model:
    imports = {"": params.opset}
    imports |= {node.domain: 1 for node in scope.nodes if node.domain}
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=scope.nodes,
        initializers=scope.initializers,
        opset_imports=imports,
        name=f"attention_{form.name.replace('-', '_')}",
    )
    versions = (version for opset, version in _IR_VERSIONS if params.opset >= opset)
    model = ir.Model(
        graph,
        ir_version=next(versions, _LEAST_IR),
        producer_name="mha_export",
        functions=list(scope.functions.values()),
    )
    RemoveUnusedNodesPass()(model)
    return model


__all__ = ["SITE", "build_model", "weight_shapes"]
