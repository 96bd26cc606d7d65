"""What a whole model should give, and how far from it a correct implementation may land.

The exact answer is the *original* graph with every number in float64, run by onnx's reference
evaluator; weights in few bits are the numbers they stand for. Where that is not possible (another
contrib op, weights too large to widen) it is the original in its own precision with every
optimisation off, and the record says so.

The ensemble of plain same-precision implementations:

* the same float64 graph with every result rounded at random to the precision (three seeds);
* the original on the reference evaluator, in its own precision;
* the original on ONNX Runtime's CPU with every optimisation off, where that is installed.

A row of an output passes when it is off by no more than twice the worst of them plus ``8 u`` of the
largest entry of the row (the last few roundings, in which an ensemble can be lucky).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mha_export.bounds import unit_roundoff
from mha_export.errors import InputError
from mha_export.measure._float64 import with_float64
from mha_export.measure._plain_ort import PlainOrt
from mha_export.measure._plain_weights import with_plain_weights
from mha_export.measure._rounding import RoundedModel, rounded
from mha_export.measure.model_inputs import ModelCase, cases_at_traced_sizes, inputs_from_file
from mha_export.operands import dtype_of
from mha_export.spec import DType
from mha_export.targets.reference import ReferenceSession

Arrays = Mapping[str, np.ndarray]
SEEDS = (0, 1, 2)
FLOOR_UNITS = 8.0
LARGEST_WIDE_BYTES = 4 << 30
"""Weights that would take more than this in float64 are not widened."""

_PRECISION = {"f32": DType.FP32, "f16": DType.FP16, "bf16": DType.BF16}


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputBounds:
    """One output of one case: the exact array, and per row (all axes but the last) its bounds."""

    exact: np.ndarray
    ensemble: np.ndarray
    floor: np.ndarray
    coarse: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What one case should give. ``problem``: the original itself does not run on it, and why."""

    case: ModelCase
    outputs: Mapping[str, OutputBounds] = field(default_factory=dict)
    problem: str | None = None


class ModelReference:
    """The exact answer of a model and the error of its plain implementations, case by case.

    Args:
        model: the original graph. It is not changed.
        precision: what the implementation under test computes in (``f32``, ``f16``, ``bf16``),
            where it was told to; None, or what is no number format (the provider of a browser):
            what the graph says.
        seeds: how many randomly rounded runs.
    """

    def __init__(
        self, model: ir.Model, *, precision: str | None = None, seeds: Sequence[int] = SEEDS
    ) -> None:
        self._model = plain = with_plain_weights(model)
        self._seeds = tuple(seeds)
        told = _PRECISION.get(precision or "")
        self._of = {} if told else _value_dtypes(model)
        self.dtype = told or model_dtype(model)
        self._wide, why = _widened(plain)
        self._ort = PlainOrt.of(model)
        self._sessions: dict[str, ReferenceSession] = {}
        self._rounded: RoundedModel | None = None
        self._known: dict[int, Expected] = {}
        if self._wide is not None:
            self.against = "original in float64 (reference)"
        else:
            self.against = f"original in {model_dtype(model).value}, unoptimised: {why}"
        self.members: tuple[str, ...] = ()

    def expected(self, case: ModelCase) -> Expected:
        """Run the original on ``case`` in every way there is.

        Never raises for what the model does: a case it cannot run says so in ``problem``. The same
        case is run once, however many candidates are judged on it.
        """
        known = self._known.get(id(case))
        if known is None or known.case is not case:
            known = self._known[id(case)] = self._expected(case)
        return known

    def _expected(self, case: ModelCase) -> Expected:
        try:
            exact = self._exact(case.inputs)
        except Exception as error:  # any runtime's own words
            return Expected(case=case, problem=f"the original does not run on it: {_words(error)}")
        runs = list(self._plain(case.inputs))
        self.members = tuple(dict.fromkeys([*self.members, *(name for name, _ in runs)]))
        outputs = {
            name: _bounds(array, [run[name] for _, run in runs], self._dtype_of(name))
            for name, array in exact.items()
        }
        return Expected(case=case, outputs=outputs)

    def own_case(self, path: Path) -> ModelCase:
        """The user's inputs, which the original takes: nothing else is judged in their place.

        Errors:
            InputError: as :func:`inputs_from_file`, or the original does not run on them.
        """
        case = inputs_from_file(path, self._model)
        problem = self.expected(case).problem
        if problem is not None:
            raise InputError(f"{path}: {problem}", fix="give inputs that the model itself takes")
        return case

    def runs(self, case: ModelCase) -> bool:
        """Whether the original runs on ``case`` at all, in its own precision."""
        try:
            self._fallback(case.inputs)
        except Exception:  # whatever a runtime raises: it does not run
            return False
        return True

    def expected_battery(
        self,
        cases: Sequence[ModelCase],
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Expected, ...]:
        """Every case; where the original runs on none, one at a size it may have been traced at.

        Args:
            cases: what to run the original on.
            progress: told before every case how many are done, and how many there are.
        """
        found: list[Expected] = []
        for case in cases:
            progress(len(found), len(cases))
            found.append(self.expected(case))
        if any(item.problem is None for item in found):
            return tuple(found)
        for case in cases_at_traced_sizes(self._model):
            item = self.expected(case)
            if item.problem is None:
                return (*found, item)
        return tuple(found)

    def _dtype_of(self, output: str) -> DType:
        """The coarser of the output's own precision and that of the computation."""
        own = self._of.get(output, self.dtype)
        return max(own, self.dtype, key=unit_roundoff)

    def _exact(self, inputs: Arrays) -> dict[str, np.ndarray]:
        if self._wide is None:
            return self._fallback(inputs)
        try:
            return self._session("float64", self._wide).run(_wide_inputs(inputs))
        except Exception as error:
            exact = self._fallback(inputs)  # the case itself may be at fault: then this raises
            self._wide = None
            self.against = (
                f"original in {self.dtype.value}, unoptimised: in float64 {_words(error)}"
            )
            return exact

    def _fallback(self, inputs: Arrays) -> dict[str, np.ndarray]:
        if self._ort is not None:
            return self._ort.run(inputs)
        return self._run_own(inputs)

    def _run_own(self, inputs: Arrays) -> dict[str, np.ndarray]:
        return self._session("own", self._model).run(inputs)

    def _session(self, key: str, model: ir.Model) -> ReferenceSession:
        if key not in self._sessions:
            self._sessions[key] = ReferenceSession(model)
        return self._sessions[key]

    def _plain(self, inputs: Arrays) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        if self._wide is not None:
            if self._rounded is None:
                self._rounded = RoundedModel(self._wide, dtype=self.dtype, of=self._of)
            name = f"original rounded at random to {self.dtype.value}"
            for seed in self._seeds:
                yield name, self._rounded.run(_wide_inputs(inputs), seed=seed)
        else:
            yield from self._perturbed(inputs)
        if self.dtype is not model_dtype(self._model):
            return  # the graph's own precision is finer than what was asked for
        plain: list[tuple[str, Callable[[Arrays], dict[str, np.ndarray]]]] = []
        if self._wide is not None:
            plain.append(("original on reference", self._run_own))
            if self._ort is not None:
                plain.append(("original on ONNX Runtime CPU, unoptimised", self._ort.run))
        for name, run in plain:
            try:
                yield name, run(inputs)
            except Exception:  # one plain implementation fewer
                continue

    def _perturbed(self, inputs: Arrays) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """The original on inputs one rounding apart: how an error at the start grows."""
        for seed in self._seeds:
            stream = np.random.default_rng([seed, 11])
            moved = {n: _moved(array, self.dtype, stream) for n, array in inputs.items()}
            yield "original on inputs one rounding apart", self._fallback(moved)


def model_dtype(model: ir.Model) -> DType:
    """The coarsest floating-point type among inputs, outputs and weights."""
    values = [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    found = [dtype for v in values if (dtype := dtype_of(v.dtype)) is not None]
    return max(found, key=unit_roundoff, default=DType.FP32)


def _value_dtypes(model: ir.Model) -> dict[str, DType]:
    return {
        value.name: dtype
        for node in model.graph
        for value in node.outputs
        if value.name and (dtype := dtype_of(value.dtype)) is not None
    }


def _widened(model: ir.Model) -> tuple[ir.Model | None, str]:
    tensors = [v.const_value for v in model.graph.initializers.values()]
    size = sum(8 * t.size for t in tensors if t is not None)
    if size > LARGEST_WIDE_BYTES:
        return None, f"its weights would take {size >> 20} MB in float64"
    try:
        return with_float64(model), ""
    except ValueError as error:
        return None, str(error)


def _wide_inputs(inputs: Arrays) -> dict[str, np.ndarray]:
    return {name: _widen(array) for name, array in inputs.items()}


def _widen(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _moved(array: np.ndarray, dtype: DType, stream: np.random.Generator) -> np.ndarray:
    if array.dtype.kind in "biu":
        return array
    unit = unit_roundoff(dtype)
    noise = 1.0 + 4.0 * unit * (2.0 * stream.random(array.shape) - 1.0)
    moved = rounded(array.astype(np.float64) * noise, dtype, stream)
    return np.asarray(moved).astype(array.dtype)


def _bounds(exact: np.ndarray, runs: Sequence[np.ndarray], dtype: DType) -> OutputBounds:
    rows = as_rows(exact)
    finite = np.isfinite(rows)
    magnitude = np.max(np.abs(rows), axis=-1, initial=0.0, where=finite)
    ensemble = np.zeros(rows.shape[:-1])
    for run in runs:
        other = as_rows(run).astype(np.float64)
        if other.shape != rows.shape:
            continue
        both = finite & np.isfinite(other)
        error = np.zeros_like(rows)
        np.subtract(other, rows, out=error, where=both)
        ensemble = np.maximum(ensemble, np.max(np.abs(error), axis=-1, initial=0.0))
    unit = unit_roundoff(dtype)
    floor = FLOOR_UNITS * unit * magnitude + float(np.finfo(np.float32).tiny)
    coarse = np.sqrt(unit) * magnitude + 2.0 * ensemble + floor
    return OutputBounds(exact=rows, ensemble=ensemble, floor=floor, coarse=coarse)


def as_rows(array: np.ndarray) -> np.ndarray:
    """At least two axes, the last one the row; booleans and integers as float64."""
    array = np.asarray(array)
    if array.dtype.kind in "biu":
        array = array.astype(np.float64)
    return array.reshape(1, -1) if array.ndim < 2 else array


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
