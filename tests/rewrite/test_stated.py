"""An attention in many softmaxes is read back as the one its nodes state, where they show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams, build_model, form_named
from mha_export.jobs import inspect_model
from mha_export.recognise import Site, recognise
from mha_export.rewrite import Rewritten, choose_form, rewrite
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
)
from mha_export.statement import READS, STATES

TILED = form_named("tiled")
OPSET = 23
CAUSAL = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    scale=0.3,
    projections=ProjectionSpec(d_model=32),
    q_len="s",
    kv_len="s",
    mask=MaskSpec(
        causal=CausalAlignment.TOP_LEFT, left_window=3, padding=True, empty_row=EmptyRow.ZERO
    ),
)
DECODER = CAUSAL.replace(
    mask=MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT), cache=CacheSpec(), kv_len="t"
)


def _built(spec: AttentionSpec = CAUSAL) -> ir.Model:
    return build_model(TILED, spec, FormParams(opset=OPSET))


def _rewritten(model: ir.Model, form: str, evaluator: Evaluator) -> Rewritten:
    params = FormParams(opset=OPSET)
    return rewrite(
        recognise(model, evaluator=evaluator),
        lambda site: choose_form(site, preferred=(), params=params, only=form),
        evaluator=evaluator,
    )


def _renamed(model: ir.Model) -> None:
    for place, node in enumerate(model.graph):
        node.name = f"n{place}"
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"v{place}_{value.index()}"


@pytest.mark.parametrize("spec", [CAUSAL, DECODER], ids=["window-and-padding", "cache"])
@pytest.mark.parametrize("change", [lambda model: None, _renamed], ids=["as-it-is", "renamed"])
def test_it_is_one_site(spec: AttentionSpec, change: Callable[[ir.Model], None]) -> None:
    model = _built(spec)
    change(model)
    (site,) = recognise(model).verdicts
    assert isinstance(site, Site)
    assert (site.stated_as, site.fused_as, site.replaceable) == ("tiled", None, True)
    wanted, found = spec.resolved().to_json(), site.spec.to_json()
    assert {**found, "dims": None} == {**wanted, "dims": None}


def test_it_can_be_written_in_another_form(evaluator: Evaluator) -> None:
    done = _rewritten(_built(), "onnx", evaluator)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "fused"
    assert outcome.proof is not None
    assert outcome.proof.against == ("oracle", "original")
    assert sum(node.op_type == "Attention" for node in done.model.graph) == 1
    assert not any(node.op_type == "Softmax" for node in done.model.graph)


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tiled.onnx"
    ir.save(_built(), path)
    (site,) = inspect_model(path).document["sites"]
    assert (site["verdict"], site["fused_as"]) == ("attention", "tiled")


def _restated(old: str, new: str) -> Callable[[ir.Model], None]:
    """The statement with other words in it."""

    def change(model: ir.Model) -> None:
        for node in model.graph:
            if STATES in node.metadata_props:
                text = node.metadata_props[STATES]
                node.metadata_props[STATES] = text.replace(old, new)
                assert node.metadata_props[STATES] != text

    return change


def _scaled(model: ir.Model) -> None:
    """The values of one tile, twice as large."""
    node = next(node for node in model.graph if node.op_type == "Softmax")
    two = ir.node("Add", [node.outputs[0], node.outputs[0]], name="twice")
    node.outputs[0].replace_all_uses_with(two.outputs[0])
    two.replace_input_with(0, node.outputs[0])
    two.replace_input_with(1, node.outputs[0])
    model.graph.insert_after(node, two)


FALSE = {
    "another window": _restated('"left_window":3', '"left_window":2'),
    "a tile twice as large": _scaled,
}


@pytest.mark.parametrize("form", ["onnx", "tiled"])
@pytest.mark.parametrize("edit", FALSE)
def test_a_claim_that_is_false_fails_its_proof(edit: str, form: str, evaluator: Evaluator) -> None:
    model = _rewritten(_built(), "tiled", evaluator).model
    FALSE[edit](model)
    done = _rewritten(model, form, evaluator)
    (outcome,) = done.outcomes.values()
    assert outcome.status == "proof_failed"
    assert "the original graph does not compute this spec" in (outcome.reason or "")


def _reads_more(model: ir.Model) -> None:
    """The scores of one tile depend on another input."""
    other = ir.Value(
        name="other", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 1, 1, 1])
    )
    model.graph.inputs.append(other)
    node = next(node for node in model.graph if node.op_type == "Softmax")
    source = node.inputs[0]
    assert source is not None
    added = ir.node("Add", [source, other], name="more")
    model.graph.insert_before(node, added)
    node.replace_input_with(0, added.outputs[0])


def _scores_leave(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "Softmax")
    node.outputs[0].name = "weights"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(node.outputs[0])


def _forgets(key: str) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        for node in model.graph:
            node.metadata_props.pop(key, None)

    return change


UNBELIEVED = {
    "reads another input": _reads_more,
    "a tile's weights are an output": _scores_leave,
    "no operands": _forgets(READS),
    "no statement": _forgets(STATES),
    "garbled": _restated("kv_heads", "heads"),
    "heads of another width": _restated('"dim":8,"heads":4', '"dim":16,"heads":4'),
}


@pytest.mark.parametrize("edit", UNBELIEVED)
def test_a_statement_that_does_not_fit_is_not_believed(edit: str) -> None:
    model = _built()
    UNBELIEVED[edit](model)
    found = recognise(model)
    assert len(found.verdicts) > 1
    assert not any(site.stated_as for site in found.sites)


def test_layers_that_share_a_mask_are_told_apart(evaluator: Evaluator) -> None:
    """Equal emitted nodes are shared: what they say of one layer stays beside the other's."""
    path = Path(__file__).parents[2] / "graphs/corpus"
    file = next(iter(sorted(path.glob("mistral_sw*.onnx"))))
    once = _rewritten(ir.load(file), "tiled", evaluator)
    assert {outcome.status for outcome in once.outcomes.values()} == {"fused"}
    found = recognise(once.model)
    assert [site.stated_as for site in found.sites] == ["tiled"] * len(once.outcomes)
    twice = _rewritten(once.model, "tiled", evaluator)
    one, two = (
        bytes(ir.to_proto(done.model).SerializeToString(deterministic=True))
        for done in (once, twice)
    )
    assert one == two
