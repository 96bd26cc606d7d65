"""Known answers: a few inputs, what the model gives for them exactly, and how far off is right.

Exact means the original graph in float64; the bounds are those of ``run``: see docs/parity.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.bundle._manifest import AnswerCase, TensorRecord
from mha_export.errors import InputError
from mha_export.measure.model_inputs import model_cases
from mha_export.measure.reference_run import Expected, ModelReference, OutputBounds

FOLDER = "answers"
LONGER = "longer"
"""Of 37 tokens: from 32 on some runtimes take another kernel, and on some devices a wrong one."""
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What :func:`make_answers` wrote. ``against``: what the outputs are exact with respect to."""

    cases: tuple[AnswerCase, ...]
    against: str


def make_answers(model: ir.Model, folder: Path, *, seed: int = 0) -> Answers:
    """Write the known answers of ``model`` into ``folder / "answers"``.

    Errors:
        InputError: the model runs on none of the inputs.
    """
    reference = ModelReference(model)
    quick = {case.name for case in model_cases(model, seed=seed, quick=True)}
    chosen = (case for case in model_cases(model, seed=seed) if case.name in quick | {LONGER})
    expected = reference.expected_battery(tuple(chosen))
    good = [item for item in expected if item.problem is None]
    if not good:
        raise InputError(
            f"the model runs on none of the inputs made for it: {expected[0].problem}",
            fix="run mha-export inspect on it; a bundle needs known answers",
        )
    shapes = {value.name: value.shape for value in model.graph.outputs}
    ranks = {name: None if shape is None else len(shape) for name, shape in shapes.items()}
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    cases = tuple(_write_case(item, folder, ranks) for item in good)
    return Answers(cases=cases, against=reference.against)


def _write_case(item: Expected, folder: Path, ranks: Mapping[str | None, int | None]) -> AnswerCase:
    name = item.case.name
    file = f"{FOLDER}/{name.replace(',', '').replace(' ', '-')}.bin"
    writer = _Writer()
    inputs = tuple(writer.add(key, array) for key, array in item.case.inputs.items())
    outputs = tuple(
        writer.add_output(key, bounds, ranks.get(key)) for key, bounds in item.outputs.items()
    )
    (folder / file).write_bytes(bytes(writer.data))
    return AnswerCase(name=name, file=file, inputs=inputs, outputs=outputs)


class _Writer:
    """Tensors one after another, each aligned."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, name: str, array: np.ndarray) -> TensorRecord:
        array = np.asarray(array, order="C")
        offset = self._put(array)
        return TensorRecord(
            name=name,
            dtype=array.dtype.name,
            shape=tuple(array.shape),
            offset=offset,
            bytes=array.nbytes,
        )

    def add_output(self, name: str, bounds: OutputBounds, rank: int | None) -> TensorRecord:
        exact = bounds.exact.astype(np.float32)
        shape = exact.shape[1:] if rank is not None and rank < exact.ndim else exact.shape
        stored = self.add(name, exact.reshape(shape))
        passes = (2.0 * bounds.ensemble + bounds.floor).astype(np.float32)
        return TensorRecord(
            name=stored.name,
            dtype=stored.dtype,
            shape=stored.shape,
            offset=stored.offset,
            bytes=stored.bytes,
            bound=self._put(passes),
            coarse=self._put(np.maximum(bounds.coarse.astype(np.float32), passes)),
            rows=int(passes.size),
        )

    def _put(self, array: np.ndarray) -> int:
        self.data.extend(b"\0" * (-len(self.data) % _ALIGNMENT))
        offset = len(self.data)
        self.data.extend(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return offset


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownAnswer:
    """One case read back: inputs by name, and the expected outputs with their bounds."""

    name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    bound: Mapping[str, np.ndarray]
    coarse: Mapping[str, np.ndarray]

    def judge(self, actual: Mapping[str, np.ndarray]) -> tuple[str, str | None]:
        """``pass``, ``imprecise`` or ``fail``, and a sentence on the worst output."""
        worst: tuple[str, str | None, float] = ("pass", None, 0.0)
        for name, exact in self.outputs.items():
            status, message, factor = self._judge(name, exact, actual.get(name))
            if (_ORDER[status], factor) > (_ORDER[worst[0]], worst[2]):
                worst = (status, message, factor)
        return worst[0], worst[1]

    def _judge(
        self, name: str, exact: np.ndarray, actual: np.ndarray | None
    ) -> tuple[str, str | None, float]:
        if actual is None or tuple(actual.shape) != tuple(exact.shape):
            got = "nothing" if actual is None else f"shape {tuple(actual.shape)}"
            return "fail", f"{name}: got {got}; expected shape {exact.shape}", np.inf
        rows = exact.reshape(len(self.bound[name]), -1).astype(np.float64)
        found = np.asarray(actual, dtype=np.float64).reshape(rows.shape)
        with np.errstate(invalid="ignore"):
            error = np.where(
                np.isnan(rows) & np.isnan(found) | (rows == found), 0, abs(found - rows)
            )
        error = np.where(np.isnan(error), np.inf, error).max(axis=1, initial=0.0)
        factor = float((error / self.bound[name]).max(initial=0.0))
        message = f"{name}: error {error.max(initial=0.0):.3g}, {factor:.3g} of its bound"
        if factor <= 1:
            return "pass", None, factor
        return ("imprecise" if (error <= self.coarse[name]).all() else "fail"), message, factor


_ORDER = {"pass": 0, "imprecise": 1, "fail": 2}


def read_answers(folder: Path, cases: Iterable[AnswerCase]) -> tuple[KnownAnswer, ...]:
    """The known answers of a bundle's folder."""
    return tuple(_read_case(folder, case) for case in cases)


def _read_case(folder: Path, case: AnswerCase) -> KnownAnswer:
    data = (folder / case.file).read_bytes()

    def row_bounds(offset: int | None, rows: int | None) -> np.ndarray:
        return np.frombuffer(data, "<f4", rows or 0, offset or 0).astype(np.float64)

    return KnownAnswer(
        name=case.name,
        inputs={t.name: _tensor(data, t) for t in case.inputs},
        outputs={t.name: _tensor(data, t) for t in case.outputs},
        bound={t.name: row_bounds(t.bound, t.rows) for t in case.outputs},
        coarse={t.name: row_bounds(t.coarse, t.rows) for t in case.outputs},
    )


def _tensor(data: bytes, record: TensorRecord) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, record.dtype, record.dtype))
    piece = data[record.offset : record.offset + record.bytes]
    return np.frombuffer(piece, dtype).reshape(record.shape).copy()
