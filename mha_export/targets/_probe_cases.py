"""Known-answer graphs: a model, the inputs to run it on, and what must come out.

Two kinds. A *form* probe is what the exporter would emit for a feature. An *operator* probe is one
node that states the feature by its own attribute or input, whether or not a form does so: it finds
the attributes that a runtime ignores in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from mha_export.bounds import ErrorBounds, copy_floor, error_bounds, judge, score_bounds
from mha_export.cases import Case, cases
from mha_export.feeds import Arrays, feeds, oracle_outputs
from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.oracle import OracleResult, attention
from mha_export.spec import AttentionSpec, DType
from mha_export.targets._features import FEATURES, features_of

SCENARIOS = (
    *("ordinary", "decode", "poison", "no_past", "short_query", "many_queries", "empty_row"),
    *("softcap_saturating", "window_edge", "left_padding", "holes"),
)
"""The cases of the battery that tell a dropped feature from a kept one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """One known-answer graph.

    Attributes:
        form: a form's name, or an operator's (``com.microsoft.GroupQueryAttention``).
        dtype: of the graph's inputs and outputs.
        computed_in: what the runtime was told to compute in, where that differs.
        scenarios: names of the cases to run it on.
    """

    form: str
    feature: str
    dtype: DType
    spec: AttentionSpec
    model: ir.Model
    computed_in: DType
    scenarios: tuple[str, ...] = SCENARIOS

    def runs(self) -> Iterator[Run]:
        """The inputs to run it on, with the exact answers."""
        for answer in answers(self.spec.replace(io_dtype=self.computed_in)):
            if answer.case.name in self.scenarios:
                yield Run(probe=self, answer=answer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """A case, and for each output its error bounds and exact value in the oracle's layout."""

    case: Case
    outputs: tuple[tuple[str, ErrorBounds, np.ndarray], ...]


@lru_cache(maxsize=256)
def answers(spec: AttentionSpec) -> tuple[Answer, ...]:
    """The cases of a spec with their answers; kept, for every form and target asks the same."""
    found = []
    for case in cases(spec, battery="full"):
        if case.name in SCENARIOS:
            exact = attention(spec, case.inputs)
            found.append(Answer(case=case, outputs=tuple(_expected(spec, case, exact))))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One set of inputs of one probe."""

    probe: Probe
    answer: Answer

    @property
    def case(self) -> Case:
        return self.answer.case

    def feeds(self) -> Arrays:
        made = feeds(self.probe.spec, self.case.inputs)
        if "." in self.probe.form:
            from mha_export.targets._operator_probes import operator_feeds

            return operator_feeds(self.probe.model, self.case, made)
        return made

    def judge(self, outputs: Mapping[str, np.ndarray]) -> tuple[str, float, str | None]:
        """(``ok``, ``imprecise`` or ``wrong``; largest error; what is wrong)."""
        spec = self.probe.spec.replace(io_dtype=self.probe.computed_in)
        worst, error, reason = "ok", 0.0, None
        outputs = oracle_outputs(spec, outputs)
        for name, bounds, wanted in self.answer.outputs:
            if name not in outputs:
                return "wrong", float("inf"), f"no output '{name}'"
            found = judge(
                outputs[name], wanted, bounds.ensemble, bounds.floor, coarse=bounds.coarse
            )
            error = max(error, found.max_abs)
            if found.status == "fail":
                return "wrong", found.max_abs, f"{self.case.name}: {name}: {found.reason}"
            if found.status == "imprecise":
                worst = "imprecise"
                reason = f"{self.case.name}: {name}: {found.factor:.1f} times the bound"
        return worst, error, reason


def form_probes(
    dtype: DType,
    *,
    max_opset: int,
    computed_in: DType | None = None,
    features: Collection[str] = FEATURES.keys(),
    forms: Sequence[str] | None = None,
    told: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Iterator[Probe]:
    """Every (form, feature) that the form can state in ``dtype`` at an opset the target reads.

    ``forms``: those to take, in that order; None: all. ``told``: a target's ``form_options``.
    """
    for name in all_forms() if forms is None else forms:
        form = form_named(name)
        options = told.get(name, {})
        params = FormParams(opset=max(form.min_opset, min(max_opset, 24)), options=options)
        if params.opset > max_opset:
            continue
        for feature, plain in FEATURES.items():
            spec = plain.replace(io_dtype=dtype)
            if feature not in features or feature not in features_of(spec):
                continue  # not asked for, or nothing in this dtype: a softmax wider than fp32
            if not form.supports(spec, params):
                continue
            yield _form_probe(
                name, feature, dtype, params.opset, tuple(options.items()), computed_in or dtype
            )


@cache
def _form_probe(
    name: str,
    feature: str,
    dtype: DType,
    opset: int,
    options: tuple[tuple[str, str], ...],
    computed_in: DType,
) -> Probe:
    """Built once a process: ``doctor`` asks every target the same."""
    spec = FEATURES[feature].replace(io_dtype=dtype)
    params = FormParams(opset=opset, options=dict(options))
    return Probe(
        form=name,
        feature=feature,
        dtype=dtype,
        spec=spec,
        model=build_model(form_named(name), spec, params),
        computed_in=computed_in,
    )


def _expected(
    spec: AttentionSpec, case: Case, exact: OracleResult
) -> Iterator[tuple[str, ErrorBounds, np.ndarray]]:
    yield "output", error_bounds(spec, case.inputs, exact), exact.output
    if spec.qk_output is not None:
        bounds = score_bounds(spec, case.inputs, exact, spec.qk_output)
        last = {
            field.name: np.max(getattr(bounds, field.name), axis=-1)
            for field in dataclasses.fields(bounds)
        }
        yield "qk_output", ErrorBounds(**last), exact.scores(spec.qk_output)
    if spec.cache is None or spec.cache.growth != "concat":
        return  # rows of a static buffer beyond the lengths are unspecified
    for name, array in (("key", exact.present_key), ("value", exact.present_value)):
        if array is not None:
            yield f"present_{name}", _copied(spec, array), array


def _copied(spec: AttentionSpec, exact: np.ndarray) -> ErrorBounds:
    floor = copy_floor(spec, exact)
    none = np.zeros_like(floor)
    return ErrorBounds(ensemble=none, floor=floor, coarse=none, overflow=none.astype(bool))
