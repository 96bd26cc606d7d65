"""Run a built graph on a runtime and judge it against the oracle: what conformance tests share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.bounds import Judgement, copy_floor, error_bounds, judge, score_bounds
from mha_export.cases import Case, cases
from mha_export.evaluator import Evaluator
from mha_export.feeds import Arrays, feeds, oracle_outputs
from mha_export.forms import FormParams, build_model, form_named
from mha_export.oracle import OracleResult, attention
from mha_export.spec import AttentionSpec, DType

Runner = Callable[[ir.Model, Arrays], Arrays]


def on_ort_cpu(model: ir.Model, inputs: Arrays) -> Arrays:
    """One run on ONNX Runtime's CPU provider, one thread."""
    return OrtSession(model).run(inputs)


class OrtSession:
    """A loaded model on ONNX Runtime's CPU provider."""

    def __init__(self, model: ir.Model) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Arrays) -> Arrays:
        wanted = {name: array for name, array in inputs.items() if name in self._inputs}
        return dict(zip(self._outputs, self._session.run(None, wanted), strict=True))


class ReferenceSession:
    """A loaded model on ONNX's reference evaluator."""

    def __init__(self, model: ir.Model) -> None:
        from onnx.reference import ReferenceEvaluator

        self._evaluator = ReferenceEvaluator(ir.to_proto(model))

    def run(self, inputs: Arrays) -> Arrays:
        names = set(self._evaluator.input_names)
        wanted = {name: array for name, array in inputs.items() if name in names}
        with warnings.catch_warnings():
            # It computes softmax of -inf and casts of NaN with numpy, which warns.
            warnings.simplefilter("ignore", RuntimeWarning)
            outputs = self._evaluator.run(None, wanted)
        return dict(zip(self._evaluator.output_names, outputs, strict=True))


class EvaluatorSession:
    """A model on any target's evaluator."""

    def __init__(self, model: ir.Model, evaluator: Evaluator) -> None:
        self._model = model
        self._evaluator = evaluator

    def run(self, inputs: Arrays) -> Arrays:
        names = {value.name for value in self._model.graph.inputs}
        wanted = {name: array for name, array in inputs.items() if name in names}
        return self._evaluator.run(self._model, wanted)


SESSIONS = {"cpu": OrtSession, "reference": ReferenceSession}


def session_on(runtime: str | Evaluator, model: ir.Model) -> Any:
    """The model, loaded where it is to run."""
    if isinstance(runtime, str):
        return SESSIONS[runtime](model)
    return EvaluatorSession(model, runtime)


@dataclass(frozen=True)
class Finding:
    """One output of one case that is not as the oracle has it."""

    case: str
    output: str
    reason: str

    def __str__(self) -> str:
        return f"{self.case}/{self.output}: {self.reason}"


def findings(
    form: str,
    spec: AttentionSpec,
    params: FormParams,
    *,
    runtime: str | Evaluator,
    battery: str = "quick",
    seed: int = 0,
) -> Iterator[Finding]:
    """Everything wrong with a form's graph on a runtime, over a battery of cases."""
    session = session_on(runtime, build_model(form_named(form), spec, params))
    ran = False
    for case in cases(spec, battery=battery, seed=seed):
        ran = True
        outputs = oracle_outputs(spec, session.run(feeds(spec, case.inputs)))
        yield from compare(spec, case, outputs)
    if not ran:
        yield Finding("none", "none", "the battery has no case for this spec")


def compare(spec: AttentionSpec, case: Case, outputs: Arrays) -> Iterator[Finding]:
    """Judge every output of one case."""
    exact = attention(spec, case.inputs)
    bounds = error_bounds(spec, case.inputs, exact)
    judged = judge(
        outputs["output"], exact.output, bounds.ensemble, bounds.floor, coarse=bounds.coarse
    )
    yield from _found(spec, case, "output", judged)
    if spec.qk_output is not None:
        yield from _compare_scores(spec, case, exact, outputs["qk_output"])
    yield from _compare_cache(spec, case, exact, outputs)


def mistakes(
    spec: AttentionSpec, session: OrtSession | ReferenceSession, case: Case
) -> list[Finding]:
    """What a session of a canonical graph of ``spec`` gets wrong in one case."""
    outputs = session.run(feeds(spec, case.inputs))
    return list(compare(spec, case, oracle_outputs(spec, outputs)))


def _compare_scores(
    spec: AttentionSpec, case: Case, exact: OracleResult, actual: np.ndarray
) -> Iterator[Finding]:
    assert spec.qk_output is not None
    bounds = score_bounds(spec, case.inputs, exact, spec.qk_output)
    wanted = exact.scores(spec.qk_output)[..., None]
    judged = judge(actual[..., None], wanted, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
    yield from _found(spec, case, "qk_output", judged)


def _compare_cache(
    spec: AttentionSpec, case: Case, exact: OracleResult, outputs: Arrays
) -> Iterator[Finding]:
    """Rows of a static cache at and beyond ``kv_lengths`` are unspecified."""
    if spec.cache is None:
        return
    for name in ("present_key", "present_value"):
        wanted = getattr(exact, name)
        if wanted is None:
            continue
        actual = outputs[name].astype(np.float64)
        if actual.shape != wanted.shape:
            yield Finding(case.name, name, f"shape {actual.shape}; expected {wanted.shape}")
            continue
        if spec.cache.growth != "concat":
            valid = np.arange(wanted.shape[2]) < case.inputs.kv_lengths[:, None]
            actual = np.where(valid[:, None, :, None], actual, wanted)
        judged = judge(actual, wanted, np.zeros(wanted.shape[:-1]), copy_floor(spec, wanted))
        yield from _found(spec, case, name, judged)


def _found(spec: AttentionSpec, case: Case, output: str, judged: Judgement) -> Iterator[Finding]:
    """Half precision may be coarse (``imprecise``); fp32 has to be within its bound."""
    exact = spec.io_dtype is DType.FP32
    allowed = ("pass",) if exact else ("pass", "imprecise")
    if judged.status not in allowed:
        yield Finding(case.name, output, str(judged.reason))
