"""What a rewrite does to the graph around the attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from rewrite_sites import Altered, always, recognition_of

from mha_export.errors import CheckFailedError, InputError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams
from mha_export.recognise import Reason, Recognition, Site, recognise
from mha_export.rewrite import Keep, RewriteSettings, choose_form, rewrite
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, EmptyRow, MaskSpec, QkOutput

PADDED = AttentionSpec(
    q_heads=4,
    kv_heads=4,
    head_dim=8,
    q_len="s",
    kv_len="s",
    mask=MaskSpec(padding=True, fill="-inf", empty_row=EmptyRow.ZERO),
)
CACHED = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT),
    cache=CacheSpec(),
)


def _ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def _bytes(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def encoder(*, layers: int = 2, opset: int = 18) -> ir.Model:
    """Attention layers as exporters write them: project, split, attend, merge, project."""
    rng = np.random.default_rng(7)
    x = ir.Value(
        name="x",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(["batch", "seq", 16]),
        metadata_props={"kind": "hidden"},
    )
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": opset}, name="encoder")

    def weight(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(array.shape),
            const_value=tensor,
        )
        graph.register_initializer(value)
        return value

    def add(op: str, name: str, *inputs: ir.Value, shape: list[int | str], **attributes: object):
        node = ir.node(op, list(inputs), attributes=attributes or None, name=name)  # type: ignore[arg-type]
        node.outputs[0].name = f"{name}_out"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape(shape)
        graph.append(node)
        return node.outputs[0]

    split = weight("split", np.array([0, 0, 4, 4], np.int64))
    merge = weight("merge", np.array([0, 0, 16], np.int64))
    scale = weight("scale", np.array(0.5, np.float32))
    hidden: list[int | str] = ["batch", "seq", 16]
    for i in range(layers):

        def linear(name: str, value: ir.Value, i: int = i) -> ir.Value:
            w = weight(f"{i}.{name}.weight", rng.standard_normal((16, 16)).astype(np.float32) / 4)
            return add("MatMul", f"{i}.{name}", value, w, shape=hidden)

        heads = {}
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            y = add(
                "Reshape", f"{i}.{name}.split", linear(name, x), split, shape=["batch", "seq", 4, 4]
            )
            dims: list[int | str] = ["batch", "seq", 4, 4]
            shape = [dims[axis] for axis in perm]
            heads[name] = add("Transpose", f"{i}.{name}.heads", y, shape=shape, perm=perm)
        square: list[int | str] = ["batch", 4, "seq", "seq"]
        scores = add("MatMul", f"{i}.scores", heads["q"], heads["k"], shape=square)
        scores = add("Mul", f"{i}.scaled", scores, scale, shape=square)
        weights = add("Softmax", f"{i}.softmax", scores, shape=square, axis=-1)
        mixed = add("MatMul", f"{i}.mixed", weights, heads["v"], shape=["batch", 4, "seq", 4])
        mixed = add(
            "Transpose", f"{i}.back", mixed, shape=["batch", "seq", 4, 4], perm=[0, 2, 1, 3]
        )
        mixed = add("Reshape", f"{i}.merge", mixed, merge, shape=hidden)
        x = linear("o", mixed)
    x.name = "y"
    x.metadata_props["kind"] = "result"
    graph.outputs.append(x)
    return ir.Model(graph, ir_version=10, producer_name="by hand", metadata_props={"a": "b"})


@pytest.mark.parametrize(
    ("form", "fused"), [("onnx", "Attention"), ("ort-mha", "MultiHeadAttention")]
)
def test_an_encoder_layer_becomes_one_node(form: str, fused: str, evaluator: Evaluator) -> None:
    """Projection, attention, projection: no Transpose or Reshape is left."""
    model = encoder()
    done = rewrite(recognise(model), always(form), evaluator=evaluator)
    assert [outcome.status for outcome in done.outcomes.values()] == ["fused", "fused"]
    assert _ops(done.model) == [*["MatMul"] * 3, fused, "MatMul"] * 2
    onnx.checker.check_model(ir.to_proto(done.model))


def test_the_interface_of_the_model_stays(evaluator: Evaluator) -> None:
    model = encoder()
    done = rewrite(recognise(model), always("onnx"), evaluator=evaluator).model
    for before, after in (
        (model.graph.inputs, done.graph.inputs),
        (model.graph.outputs, done.graph.outputs),
    ):
        assert [(v.name, v.dtype, v.shape, v.metadata_props) for v in before] == [
            (v.name, v.dtype, v.shape, v.metadata_props) for v in after
        ]
    assert done.metadata_props == {"a": "b"}
    assert done.producer_name == "by hand"
    assert done.graph.name == "encoder"
    assert done.graph.opset_imports[""] == 23


def test_the_input_model_stays(evaluator: Evaluator) -> None:
    model = encoder()
    before = _bytes(model)
    rewrite(recognise(model), always("onnx"), evaluator=evaluator)
    assert _bytes(model) == before


def test_equal_layers_are_proven_once(evaluator: Evaluator) -> None:
    found = recognise(encoder(layers=3))
    done = rewrite(found, always("onnx"), evaluator=evaluator)
    first, *others = done.outcomes.items()
    assert first[1].proof is not None
    assert (first[1].proof.representative, first[1].proof.weights) == (None, "full")
    for _, outcome in others:
        assert outcome.proof is not None
        assert (outcome.proof.representative, outcome.proof.weights) == (first[0], "structural")


def test_a_rewrite_of_a_rewrite_changes_nothing(evaluator: Evaluator) -> None:
    for form in ("onnx", "ort-mha", "primitive"):
        once = rewrite(recognise(encoder()), always(form), evaluator=evaluator).model
        again = rewrite(recognise(once), always(form), evaluator=evaluator)
        assert [outcome.status for outcome in again.outcomes.values()] == ["fused", "fused"], form
        assert _bytes(again.model) == _bytes(once), form


def test_the_same_model_gives_the_same_bytes(evaluator: Evaluator) -> None:
    one, two = (
        _bytes(rewrite(recognise(encoder()), always("onnx"), evaluator=evaluator).model)
        for _ in range(2)
    )
    assert one == two


def test_nodes_say_where_they_come_from(evaluator: Evaluator) -> None:
    done = rewrite(recognise(encoder()), always("onnx"), evaluator=evaluator)
    nodes = [node for node in done.model.graph if node.op_type == "Attention"]
    sites = list(done.outcomes)
    assert [node.metadata_props["mha_export.site"] for node in nodes] == sites
    assert [node.name for node in nodes] == [f"{site}.Attention_0" for site in sites]
    assert nodes[0].metadata_props["mha_export.origin"] == "Softmax 0.softmax"
    assert '"q_heads":4' in nodes[0].metadata_props["mha_export.spec"]
    assert '"form":"onnx"' in nodes[0].metadata_props["mha_export.form"]


def test_an_output_of_the_site_keeps_its_name(evaluator: Evaluator) -> None:
    """Context and present tensors are graph outputs here: names and order stay."""
    found = recognition_of(CACHED)
    done = rewrite(found, always("onnx"), evaluator=evaluator)
    assert done.outcomes["attn.0"].status == "fused", done.outcomes["attn.0"].reason
    assert [value.name for value in done.model.graph.outputs] == [
        "output",
        "present_key",
        "present_value",
    ]
    assert _ops(done.model).count("Attention") == 1
    onnx.checker.check_model(ir.to_proto(done.model))


@pytest.mark.parametrize("kind", list(QkOutput))
def test_scores_that_are_an_output_are_proven_too(kind: QkOutput, evaluator: Evaluator) -> None:
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=8, softcap=4.0, qk_output=kind)
    done = rewrite(recognition_of(spec), always("primitive"), evaluator=evaluator)
    assert done.outcomes["attn.0"].status == "fused", done.outcomes["attn.0"].reason
    other = QkOutput.RAW if kind is not QkOutput.RAW else QkOutput.CAPPED
    wrong = Altered(name="x", respec=lambda spec: spec.replace(qk_output=other))
    done = rewrite(recognition_of(spec), always(wrong), evaluator=evaluator)
    assert done.outcomes["attn.0"].status == "proof_failed"
    assert "qk_output" in (done.outcomes["attn.0"].reason or "")


def test_a_site_that_may_not_be_replaced_is_kept(evaluator: Evaluator) -> None:
    found = recognition_of(PADDED)
    reason = Reason(code="probabilities-used-elsewhere", message="they are a graph output")
    site = dataclasses.replace(found.sites[0], cannot_replace=reason)
    done = rewrite(
        Recognition(model=found.model, verdicts=(site,)), always("onnx"), evaluator=evaluator
    )
    assert done.outcomes["attn.0"].status == "kept"
    assert done.outcomes["attn.0"].reason == (
        "probabilities-used-elsewhere: they are a graph output"
    )


def test_keep_leaves_the_graph(evaluator: Evaluator) -> None:
    found = recognise(encoder())
    done = rewrite(found, lambda site: Keep(reason="not this one"), evaluator=evaluator)
    assert _bytes(done.model) == _bytes(found.model)
    assert {outcome.reason for outcome in done.outcomes.values()} == {"not this one"}


def test_only_the_failed_site_is_undone(evaluator: Evaluator) -> None:
    wrong = Altered(name="x", respec=lambda spec: spec.replace(scale=9.0))
    found = recognise(encoder())
    bad = found.sites[0].id

    def choose(site: Site) -> object:
        return always(wrong)(site) if site.id == bad else always("onnx")(site)

    done = rewrite(found, choose, evaluator=evaluator)  # type: ignore[arg-type]
    statuses = [outcome.status for outcome in done.outcomes.values()]
    assert statuses == ["proof_failed", "fused"]
    assert _ops(done.model).count("Softmax") == 1
    assert _ops(done.model).count("Attention") == 1


def test_strict_raises_after_all_sites_were_tried(evaluator: Evaluator) -> None:
    wrong = Altered(name="x", respec=lambda spec: spec.replace(scale=9.0))
    with pytest.raises(CheckFailedError, match="2 of 2 rewrites failed"):
        rewrite(
            recognise(encoder()),
            always(wrong),
            evaluator=evaluator,
            settings=RewriteSettings(strict=True),
        )


def test_a_form_that_the_engine_cannot_run_says_so(evaluator: Evaluator) -> None:
    """onnx's reference has no contrib operators: nothing is kept on faith."""
    from mha_export.targets import evaluator_of

    reference = evaluator_of("reference")
    done = rewrite(recognise(encoder(layers=1)), always("ort-mha"), evaluator=reference)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "proof_failed"
    assert "the replacement does not run: reference" in (outcome.reason or "")
    done = rewrite(recognise(encoder(layers=1)), always("onnx"), evaluator=reference)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "fused", outcome.reason
    assert outcome.proof is not None
    assert outcome.proof.engine.startswith("reference")


def test_fused_and_back_is_the_same_spec(evaluator: Evaluator) -> None:
    found = recognise(encoder())
    fused = rewrite(found, always("onnx"), evaluator=evaluator).model
    back = rewrite(recognise(fused), always("primitive"), evaluator=evaluator)
    assert [outcome.status for outcome in back.outcomes.values()] == ["fused", "fused"]
    assert "Attention" not in _ops(back.model)
    specs = [[site.spec.to_json() for site in recognise(m).sites] for m in (fused, back.model)]
    assert specs[0] == specs[1] == [site.spec.to_json() for site in found.sites]


@pytest.mark.parametrize(
    ("preferred", "only", "opset", "expected", "why"),
    [
        (("onnx", "primitive"), None, 23, "onnx", None),
        (("onnx", "primitive"), None, 18, "primitive", "onnx: opset: needs 23"),
        (("onnx",), None, 18, "primitive", "onnx: opset: needs 23"),
        (("primitive",), None, 18, "primitive", None),
        ((), None, 18, "primitive", None),
        (("primitive",), "onnx", 18, None, "onnx: opset: needs 23"),
        (("primitive",), "onnx", 23, "onnx", None),
    ],
)
def test_the_first_form_that_can_say_it_is_chosen(
    preferred: tuple[str, ...], only: str | None, opset: int, expected: str | None, why: str | None
) -> None:
    site = recognition_of(PADDED).sites[0]
    choice = choose_form(site, preferred=preferred, params=FormParams(opset=opset), only=only)
    if expected is None:
        assert isinstance(choice, Keep)
    else:
        assert not isinstance(choice, Keep)
        assert choice.form.name == expected
        assert choice.lowered is (expected == "primitive" and why is not None)
    assert (choice.reason or "").startswith(why or "")
    assert (choice.reason is None) is (why is None)


@pytest.mark.parametrize(
    ("sinks", "preferred", "expected"),
    [
        (False, ("onnx", "ort-gqa"), "onnx"),
        (True, ("onnx", "ort-gqa", "primitive"), "ort-gqa"),
        (True, ("onnx", "primitive"), "onnx"),
    ],
)
def test_a_form_that_appends_to_the_cache_itself_comes_first(
    sinks: bool, preferred: tuple[str, ...], expected: str
) -> None:
    """Attention of ONNX has no word for sinks: with them it reads a past that was joined before."""
    mask = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
    spec = AttentionSpec(
        q_heads=4, kv_heads=2, head_dim=8, mask=mask, sinks=sinks, cache=CacheSpec(), kv_len="t"
    )
    site = recognition_of(spec).sites[0]
    choice = choose_form(site, preferred=preferred, params=FormParams(opset=23))
    assert not isinstance(choice, Keep)
    assert choice.form.name == expected


@pytest.mark.parametrize(
    ("told", "own", "expected"),
    [
        ({}, {}, {}),
        ({"ort-mha": {"bias": "whole"}}, {}, {"bias": "whole"}),
        ({"onnx": {"bias": "whole"}}, {}, {}),
        ({"ort-mha": {"bias": "whole"}}, {"bias": "least"}, {"bias": "least"}),
    ],
    ids=["nothing", "this form", "another form", "a plan comes first"],
)
def test_a_form_is_told_what_its_target_needs(told: Any, own: Any, expected: Any) -> None:
    params = FormParams(opset=18, options=own)
    choice = choose_form(
        recognition_of(PADDED).sites[0], preferred=("ort-mha",), params=params, told=told
    )
    assert not isinstance(choice, Keep)
    assert choice.params == FormParams(opset=18, options=expected)


def test_an_unknown_form_is_bad_input() -> None:
    site = recognition_of(PADDED).sites[0]
    with pytest.raises(InputError, match="unknown form 'fancy'"):
        choose_form(site, preferred=("fancy",), params=FormParams())


def in_a_branch() -> ir.Model:
    """The encoder's first layer inside ``If``, reading the outer graph's values and weights."""
    model = encoder(layers=1)
    outer = model.graph
    nodes = list(outer)
    y = outer.outputs[0]
    outer.outputs.clear()
    outer.remove(nodes)
    y.name = "inner_y"
    body = ir.Graph([], [y], nodes=nodes, name="then")
    same = ir.node("Identity", [outer.inputs[0]], name="same")
    same.outputs[0].name = "same_x"
    same.outputs[0].type, same.outputs[0].shape = y.type, y.shape
    other = ir.Graph([], [same.outputs[0]], nodes=[same], name="else")
    flag = ir.Value(name="flag", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    outer.inputs.append(flag)
    branch = ir.node(
        "If", [flag], attributes={"then_branch": body, "else_branch": other}, name="branch"
    )
    branch.outputs[0].name = "y"
    branch.outputs[0].type, branch.outputs[0].shape = y.type, y.shape
    outer.append(branch)
    outer.outputs.append(branch.outputs[0])
    return model


def test_a_site_inside_a_branch_is_rewritten_there(evaluator: Evaluator) -> None:
    model = in_a_branch()
    found = recognise(model)
    assert len(found.sites) == 1
    done = rewrite(found, always("onnx"), evaluator=evaluator)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "fused", outcome.reason
    (branch,) = done.model.graph
    body = branch.attributes["then_branch"].as_graph()
    assert [node.op_type for node in body] == ["MatMul", "MatMul", "MatMul", "Attention", "MatMul"]
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto)
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    for flag in (True, False):
        feeds = {"x": x, "flag": np.array(flag)}
        new, old = evaluator.run(done.model, feeds)["y"], evaluator.run(model, feeds)["y"]
        np.testing.assert_allclose(new, old, atol=2e-6, rtol=0)


def test_a_site_that_no_case_fits_is_kept_and_said(evaluator: Evaluator) -> None:
    """A mask of one column is all keys to one reader of the operator, and the first to another."""
    shape = ("batch", 4, "length", 8)
    inputs = [ir.val(name, dtype=ir.DataType.FLOAT, shape=shape) for name in "qkv"]
    inputs.append(ir.val("mask", dtype=ir.DataType.BOOL, shape=("length", 1)))
    node = ir.node("Attention", inputs)
    (output,) = node.outputs
    output.name, output.dtype, output.shape = "y", ir.DataType.FLOAT, ir.Shape(shape)
    graph = ir.Graph(inputs, [output], nodes=[node], opset_imports={"": 23}, name="one_column")
    done = rewrite(
        recognise(ir.Model(graph, ir_version=11)), always("primitive"), evaluator=evaluator
    )
    (outcome,) = done.outcomes.values()
    assert outcome.status == "proof_failed"
    assert "no inputs can be made for it" in (outcome.reason or "")
    assert [node.op_type for node in done.model.graph] == ["Attention"]
