"""ONNX's node tests judge the forms: attention in every form, rotary and TensorScatter in parts."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_cases import NodeCase, node_cases
from onnx_forms import KNOWN, Outcome, expressed_cases, outcome
from runtimes import OrtSession

from mha_export.forms import Scope, all_forms
from mha_export.forms._cache import append
from mha_export.forms._layout import Sizes
from mha_export.forms._rotary import rotate_query
from mha_export.operands import Heads, Layout, Operands, RotaryTables
from mha_export.spec import AttentionSpec, CacheSpec, DType, RotarySpec, RotaryStyle

READINGS = expressed_cases()


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.case.name)
def test_attention_case_in_every_form(reading) -> None:
    results = [outcome(reading, form) for form in all_forms()]
    for result in results:
        _as_listed(result)
    statuses = {result.form: result.status for result in results}
    assert statuses["primitive"] == "pass"


def _as_listed(result: Outcome) -> None:
    reason = KNOWN.get((result.form, result.case))
    if reason is None:
        assert result.status != "fail", f"{result.form}: {result.reason}"
    else:
        assert result.status == "fail", f"mended, so remove it from the list: {reason}"


def test_every_known_failure_names_a_case_and_a_form() -> None:
    names = {reading.case.name for reading in READINGS}
    assert all(form in all_forms() and case in names for form, case in KNOWN)


def _input(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.tensor(array)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))


def _run(scope: Scope, inputs: dict[str, ir.Value], output: ir.Value, arrays) -> np.ndarray:
    output.name = "found"
    output.type = ir.TensorType(next(iter(inputs.values())).dtype)
    graph = ir.Graph(
        list(inputs.values()),
        [output],
        nodes=scope.nodes,
        initializers=scope.initializers,
        opset_imports={"": scope.opset},
        name="part",
    )
    return OrtSession(ir.Model(graph, ir_version=11)).run(arrays)["found"]


ROTARY = [
    case
    for case in node_cases("test_rotary_embedding")
    if not case.expanded and next(iter(case.inputs.values())).dtype == np.float32
]


@pytest.mark.parametrize("op", [False, True], ids=["plain", "op"])
@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_rotary_case(case: NodeCase, op: bool) -> None:
    (node,) = case.model.graph.node
    attributes = {a.name: a.i for a in node.attribute}
    names = ("x", "cos", "sin", "position_ids")
    arrays = dict(zip(names, (case.inputs[name] for name in node.input), strict=False))
    x = arrays["x"]
    heads = attributes.get("num_heads") or x.shape[1]
    dim = x.shape[3] if x.ndim == 4 else x.shape[2] // heads
    layout = Layout.BHSD if x.ndim == 4 else Layout.BSM
    spec = AttentionSpec(
        q_heads=heads,
        kv_heads=heads,
        head_dim=dim,
        rotary=RotarySpec(
            dim=attributes.get("rotary_embedding_dim") or dim,
            style=RotaryStyle.INTERLEAVED if attributes.get("interleaved") else RotaryStyle.HALF,
            positions="input" if "position_ids" in arrays else "sequence",
        ),
    )
    inputs = {name: _input(name, array) for name, array in arrays.items()}
    query = Heads(value=inputs["x"], layout=layout, heads=heads, dim=dim)
    tables = RotaryTables(
        cos=inputs["cos"], sin=inputs["sin"], position_ids=inputs.get("position_ids")
    )
    scope = Scope("", opset=23)
    operands = Operands(query=query, key=query, value=query, rotary=tables)
    turned = rotate_query(scope, spec, Sizes(scope, spec, operands), query, tables, op=op)
    found = _run(scope, inputs, turned.value, arrays)
    (expected,) = case.outputs.values()
    if turned.layout is Layout.BSHD and expected.ndim == 3:
        found = found.reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=case.rtol, atol=1e-6)


SCATTER = [
    case
    for case in node_cases("test_tensorscatter")
    if case.inputs[case.model.graph.node[0].input[0]].ndim == 4
    and not any(a.name == "mode" and a.s == b"circular" for a in case.model.graph.node[0].attribute)
]


@pytest.mark.parametrize("op", [False, True], ids=["plain", "op"])
@pytest.mark.parametrize("case", SCATTER, ids=lambda case: case.name)
def test_tensor_scatter_case(case: NodeCase, op: bool) -> None:
    (node,) = case.model.graph.node
    past, update, *rest = (case.inputs[name] for name in node.input)
    b, heads, _, dim = past.shape
    start = rest[0] if rest else np.zeros(b, np.int64)
    arrays = {"past": past, "update": update, "kv_lengths": start + update.shape[2]}
    inputs = {name: _input(name, array) for name, array in arrays.items()}
    spec = AttentionSpec(
        q_heads=heads,
        kv_heads=heads,
        head_dim=dim,
        cache=CacheSpec(growth="static"),
        io_dtype=DType.FP32,
    )
    layout = {"layout": Layout.BHSD, "heads": heads, "dim": dim}
    old, new = (Heads(value=inputs[name], **layout) for name in ("past", "update"))
    scope = Scope("", opset=24)
    operands = Operands(query=new, key=new, value=new, past_key=old)
    sizes = Sizes(scope, spec, operands)
    present = append(scope, spec, old, new, inputs["kv_lengths"], sizes, op=op)
    found = _run(scope, inputs, present.value, arrays)
    (expected,) = case.outputs.values()
    np.testing.assert_array_equal(found, expected)


def test_there_are_parts_to_judge() -> None:
    assert len(ROTARY) >= 6
    assert SCATTER
