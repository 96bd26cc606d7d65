"""Parity: right models pass, planted faults fail, coarse ones are imprecise; failures shrink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.bounds import unit_roundoff
from mha_export.errors import InputError
from mha_export.measure import (
    ModelCase,
    ModelReference,
    check_parity,
    inputs_from_file,
    keep_failures,
    model_cases,
    reason_of,
    status_of,
)
from mha_export.measure._float64 import with_float64
from mha_export.measure._rounding import rounded
from mha_export.measure.reference_run import Expected
from mha_export.spec import DType
from mha_export.targets import evaluator_of

Arrays = Mapping[str, np.ndarray]
MakeModel = Callable[..., ir.Model]
pytest.importorskip("onnxruntime", reason="the candidates run on ONNX Runtime's CPU")


@pytest.fixture(scope="module")
def reference(plain_encoder: ir.Model) -> ModelReference:
    return ModelReference(plain_encoder)


@pytest.fixture(scope="module")
def expected(reference: ModelReference, plain_encoder: ir.Model) -> tuple[Expected, ...]:
    return reference.expected_battery(model_cases(plain_encoder))


def _run(model: ir.Model) -> Callable[[Arrays], Arrays]:
    return partial(evaluator_of("cpu").run, model)


def test_the_model_itself_passes_every_case(
    reference: ModelReference, expected: tuple[Expected, ...], plain_encoder: ir.Model
) -> None:
    parity = check_parity(reference, expected, _run(plain_encoder))
    assert status_of(parity) == "pass"
    assert reason_of(parity) is None
    assert len(parity.by_case) == 7
    assert parity.against == "original in float64 (reference)"
    assert len(parity.ensemble) == 3
    assert parity.factor is not None
    assert 0 < parity.factor <= 1
    assert parity.argmax_agreement == 1.0


FAULTS: dict[str, dict[str, object]] = {
    "scale doubled": {"scale1": 1.0},
    "scale dropped": {"scale0": 1.0},
    "scale off by 0.1%": {"scale1": 0.5005},
    "mask inverted": {"fill": 1e4},
    "mask dropped": {"fill": 0.0},
    "mask too weak": {"fill": -2.0},
    "heads of one axis": {"s_k1": np.array([0, 0, 2, 4]), "w_k1": np.eye(8)},
}


@pytest.mark.parametrize("edits", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_fails(
    reference: ModelReference,
    expected: tuple[Expected, ...],
    make_encoder: MakeModel,
    edits: dict[str, object],
) -> None:
    parity = check_parity(reference, expected, _run(make_encoder(**edits)))
    assert status_of(parity) == "fail"
    assert "times the bound" in (reason_of(parity) or "")


def test_a_mask_fault_shows_only_where_something_is_masked(
    reference: ModelReference, expected: tuple[Expected, ...], make_encoder: MakeModel
) -> None:
    parity = check_parity(reference, expected, _run(make_encoder(fill=-2.0)))
    statuses = {case.name: case.status for case in parity.by_case}
    assert statuses["ordinary"] == statuses["longer"] == "pass"
    assert statuses["holes"] == statuses["left padded"] == "fail"


def test_a_cosine_near_one_does_not_save_a_wrong_result(
    reference: ModelReference, expected: tuple[Expected, ...], make_encoder: MakeModel
) -> None:
    parity = check_parity(reference, expected, _run(make_encoder(scale1=0.5005)))
    assert parity.cosine is not None
    assert parity.cosine > 0.9999
    assert parity.argmax_agreement == 1.0
    assert status_of(parity) == "fail"


def _coarse(model: ir.Model, units: float) -> Callable[[Arrays], Arrays]:
    """The right answer, off by ``units`` roundoffs of each row's largest entry."""
    run = _run(model)

    def coarse(inputs: Arrays) -> Arrays:
        y = run(inputs)["y"]
        size = units * unit_roundoff(DType.FP32) * np.abs(y).max(axis=-1, keepdims=True)
        return {"y": y + size.astype(np.float32)}

    return coarse


@pytest.mark.parametrize(
    ("units", "status"), [(1.0, "pass"), (60.0, "imprecise"), (5000.0, "fail")]
)
def test_coarser_is_imprecise_until_it_is_no_longer_rounding(
    reference: ModelReference,
    expected: tuple[Expected, ...],
    plain_encoder: ir.Model,
    units: float,
    status: str,
) -> None:
    parity = check_parity(reference, expected, _coarse(plain_encoder, units))
    assert status_of(parity) == status, reason_of(parity)


def test_a_nan_fails_wherever_it_is(
    reference: ModelReference, expected: tuple[Expected, ...], plain_encoder: ir.Model
) -> None:
    def poisoned(inputs: Arrays) -> Arrays:
        y = _run(plain_encoder)(inputs)["y"].copy()
        y[0, 0, 0] = np.nan
        return {"y": y}

    parity = check_parity(reference, expected, poisoned)
    assert {case.status for case in parity.by_case} == {"fail"}
    assert parity.nan_mismatch == len(parity.by_case)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [({}, "output 'y' is missing"), ({"y": np.zeros((1, 1))}, "shape [1, 1]")],
    ids=["missing", "shape"],
)
def test_an_output_that_is_not_there_fails(
    reference: ModelReference, expected: tuple[Expected, ...], outputs: Arrays, words: str
) -> None:
    parity = check_parity(reference, expected, lambda inputs: outputs)
    assert words in (reason_of(parity) or "")


def test_what_a_runtime_raises_is_a_result(
    reference: ModelReference, expected: tuple[Expected, ...]
) -> None:
    def dies(inputs: Arrays) -> Arrays:
        raise RuntimeError("no kernel for Foo")

    parity = check_parity(reference, expected, dies)
    assert status_of(parity) == "error"
    assert "no kernel for Foo" in (reason_of(parity) or "")


def test_a_model_that_runs_on_nothing_is_said_to(plain_encoder: ir.Model) -> None:
    bad = ModelCase(name="bad", inputs={}, dims={})
    reference = ModelReference(plain_encoder)
    with pytest.raises(InputError, match="no input could be judged"):
        check_parity(reference, [reference.expected(bad)], _run(plain_encoder))


def test_bf16_is_judged_as_bf16(plain_encoder: ir.Model) -> None:
    reference = ModelReference(plain_encoder, precision="bf16")
    case = next(c for c in model_cases(plain_encoder) if c.name == "ordinary")
    expected = [reference.expected(case)]
    run = _run(plain_encoder)

    def narrow(inputs: Arrays) -> Arrays:
        stream = np.random.default_rng(0)
        return {
            n: rounded(a.astype(np.float64), DType.BF16, stream) for n, a in run(inputs).items()
        }

    assert status_of(check_parity(reference, expected, narrow)) == "pass"
    fine = ModelReference(plain_encoder)
    assert status_of(check_parity(fine, [fine.expected(case)], narrow)) == "fail"


def test_the_smallest_failing_case_is_kept_and_replays(
    reference: ModelReference,
    expected: tuple[Expected, ...],
    plain_encoder: ir.Model,
    make_encoder: MakeModel,
    tmp_path: Path,
) -> None:
    run = _run(make_encoder(fill=0.0))
    parity = keep_failures(
        check_parity(reference, expected, run),
        model=plain_encoder,
        reference=reference,
        expected=expected,
        run=run,
        folder=tmp_path / "failing",
        stem="encoder",
        command=lambda path: f"again {path}",
    )
    (kept,) = [case for case in parity.by_case if case.inputs_file]
    case = inputs_from_file(kept.inputs_file or "", plain_encoder)
    assert case.dims["batch"] == 1
    assert case.dims["seq"] <= 3
    assert kept.replay == f"again {kept.inputs_file}"
    again = check_parity(reference, [reference.expected(case)], run)
    assert status_of(again) == "fail"


# Rounding at random.


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_numbers_the_precision_holds_are_left_alone(dtype: DType) -> None:
    exact = np.array([0.0, -0.0, 1.0, -3.0, 0.5, np.inf, -np.inf])
    got = rounded(exact, dtype, np.random.default_rng(0))
    assert np.array_equal(got, exact)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_others_go_to_either_neighbour(dtype: DType) -> None:
    got = rounded(np.full(400, 1.0 + 0.3 * unit_roundoff(dtype)), dtype, np.random.default_rng(0))
    assert set(got) == {1.0, 1.0 + 2 * unit_roundoff(dtype)}


def test_nothing_finite_is_rounded_to_infinity() -> None:
    lowest = float(np.finfo(np.float32).min)
    got = rounded(np.full(50, lowest - 5.0), DType.FP32, np.random.default_rng(0))
    assert set(got) == {lowest}


# Float64.


def test_float64_leaves_the_model_alone(plain_encoder: ir.Model) -> None:
    before = {n: v.dtype for n, v in plain_encoder.graph.initializers.items()}
    wide = with_float64(plain_encoder)
    assert {n: v.dtype for n, v in plain_encoder.graph.initializers.items()} == before
    assert wide.graph.initializers["table"].dtype is ir.DataType.DOUBLE
    assert wide.graph.inputs[0].dtype is ir.DataType.INT64


def test_what_becomes_an_integer_keeps_its_precision() -> None:
    """25 * fp32(1/25) is 1 in fp32 and below 1 in float64: the step is where fp32 has it."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
    part = ir.tensor(np.array(1 / 25, dtype=np.float32), name="part")
    weight = ir.Value(
        name="part", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]), const_value=part
    )
    wide_in = ir.node("Cast", [x], {"to": 1})
    scaled = ir.node("Mul", [wide_in.outputs[0], weight])
    bucket = ir.node("Cast", [scaled.outputs[0]], {"to": 7})
    back = ir.node("Cast", [bucket.outputs[0]], {"to": 1})
    for index, node in enumerate((wide_in, scaled, bucket, back)):
        node.outputs[0].name = f"v{index}"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64 if index == 2 else ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape(["n"])
    graph = ir.Graph(
        [x],
        [back.outputs[0]],
        nodes=[wide_in, scaled, bucket, back],
        initializers=[weight],
        opset_imports={"": 17},
        name="bucket",
    )
    model = ir.Model(graph, ir_version=9)
    numbers = np.arange(0, 3000, 25)
    case = ModelCase(name="n", inputs={"x": numbers}, dims={"n": numbers.size})
    exact = ModelReference(model).expected(case).outputs["v3"].exact
    fp32 = (numbers.astype(np.float32) * np.float32(1 / 25)).astype(np.int64)
    assert np.array_equal(exact.reshape(-1), fp32)
    in_float64 = (numbers * float(np.float32(1 / 25))).astype(np.int64)
    assert not np.array_equal(fp32, in_float64), "else this test shows nothing"
