"""Comparing two models: equal ones are, and a fault is named by site and stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.measure import Side, compare_models, model_cases
from mha_export.recognise import recognise
from mha_export.report.records import ComparisonRecord, validate
from mha_export.targets import evaluator_of

MakeModel = Callable[..., ir.Model]
pytest.importorskip("onnxruntime", reason="the candidates run on ONNX Runtime's CPU")
CPU = evaluator_of("cpu")


def _side(model: ir.Model, evaluator: object = CPU, name: str = "m") -> Side:
    return Side(
        name=name,
        sha256="0" * 64,
        model=model,
        recognition=recognise(model),
        evaluator=evaluator,  # type: ignore[arg-type]
    )


def _compared(a: ir.Model, b: ir.Model) -> ComparisonRecord:
    record = compare_models(_side(a), _side(b), model_cases(a, quick=True))
    validate("compare", record.to_json())
    return record


def test_a_model_equals_itself(plain_encoder: ir.Model) -> None:
    record = _compared(plain_encoder, plain_encoder.clone())
    assert record.equal
    assert record.status == "pass"
    assert record.first_difference is None


@pytest.mark.parametrize(
    ("edits", "site", "stage", "words"),
    [
        ({"scale0": 0.75}, 0, "scores", "scale is 0.75, not 0.5"),
        ({"scale1": 1.0}, 1, "scores", "scale is 1, not 0.5"),
        ({"w_q1": np.eye(8)}, 1, "projection", "query"),
        ({"w_v0": np.eye(8)}, 0, "projection", "value"),
        ({"fill": -3.0}, 0, "mask", ""),
    ],
    ids=["first scale", "second scale", "query weights", "value weights", "weak mask"],
)
def test_a_fault_is_named(
    plain_encoder: ir.Model,
    make_encoder: MakeModel,
    edits: Mapping[str, object],
    site: int,
    stage: str,
    words: str,
) -> None:
    record = _compared(plain_encoder, make_encoder(**edits))
    first = record.first_difference
    ids = [v.id for v in recognise(plain_encoder).verdicts]
    assert not record.equal
    assert first is not None
    assert (first.site, first.stage) == (ids[site], stage), first.message
    assert words in first.message
    assert [pair.status for pair in record.sites][:site] == ["equal"] * site


def test_a_fault_outside_every_attention_is_said_to_be_outside(
    plain_encoder: ir.Model, make_encoder: MakeModel
) -> None:
    record = _compared(plain_encoder, make_encoder(w_o1=np.eye(8)))
    assert record.first_difference is not None
    assert record.first_difference.stage == "outside"
    assert [pair.status for pair in record.sites] == ["equal", "equal"]


def test_another_interface_is_refused(plain_encoder: ir.Model, cached_inputs: ir.Model) -> None:
    with pytest.raises(InputError, match="different inputs"):
        _compared(plain_encoder, cached_inputs)


class _WrongSoftmax:
    """A runtime that doubles what a second softmax reads."""

    name = "wrong"

    def run(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        copy = model.clone()
        for node in list(copy.graph):
            if node.name == "softmax1" and node.inputs[0] is not None:
                doubled = ir.node("Add", [node.inputs[0], node.inputs[0]])
                doubled.outputs[0].name = "doubled"
                node.prepend(doubled)
                node.replace_input_with(0, doubled.outputs[0])
        return CPU.run(copy, inputs)


def test_a_runtime_that_gets_one_attention_wrong_is_caught_at_that_site(
    plain_encoder: ir.Model,
) -> None:
    side = _side(plain_encoder)
    wrong = Side(
        name="m",
        sha256=side.sha256,
        model=plain_encoder,
        recognition=side.recognition,
        evaluator=_WrongSoftmax(),
    )
    record = compare_models(side, wrong, model_cases(plain_encoder, quick=True))
    assert not record.equal
    assert record.first_difference is not None
    assert record.first_difference.site == side.recognition.verdicts[1].id
    assert "wrong gets this attention wrong by itself" in record.first_difference.message
