"""The proof of a cache: stepped over a sequence, the cached decoder gives what the original gives.

For every case (padded on the left, with holes, all tokens) and every chunking (all tokens at once,
one by one, uneven chunks) each output of each step is compared with the original's on the whole
sequence in float64, row by row, within the bound of :mod:`mha_export.measure.reference_run`; and
so is the original itself on the prefixes that the steps end at. Tokens that the mask leaves out are
not compared: what is computed for them depends on how many keys are hidden from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.caches.grow import Cached
from mha_export.decode import CacheLayout
from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.measure.model_inputs import ModelCase, model_cases
from mha_export.measure.parity import compare_output
from mha_export.measure.reference_run import Expected, ModelReference, as_rows
from mha_export.report.records import CaseRecord

ROOM = 3
"""Tokens for which a static buffer has room after the last step."""
LONGEST = 64
CASES = ("ordinary", "left padded", "holes", "large values")

Arrays = Mapping[str, np.ndarray]
Step = tuple[int, int, Mapping[str, np.ndarray]]
"""First token, end, and outputs."""


@dataclass(frozen=True, kw_only=True)
class StepProof:
    """How the steps compared.

    Attributes:
        engine: what ran them. against: what is taken as right.
        steps: how many were run, over all cases and chunkings.
        max_err, bound: of the output whose error is the largest fraction of its bound.
        reason: the first output that is off, with its case and chunks.
    """

    engine: str
    against: str
    status: Literal["pass", "imprecise", "fail"]
    tokens: int
    cases: tuple[str, ...]
    steps: int
    max_err: float | None = None
    bound: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cases": list(self.cases)}


def chunkings(tokens: int) -> tuple[tuple[int, ...], ...]:
    """All at once, one by one, and uneven chunks, the last of one token."""
    uneven = (max(1, tokens // 2), 1, tokens - max(1, tokens // 2) - 2, 1)
    return ((tokens,), (1,) * tokens, uneven)


def prove_steps(
    original: ir.Model, cached: Cached, *, evaluator: Evaluator, seed: int = 0
) -> StepProof:
    """Step ``cached`` over sequences and compare with ``original`` on the whole of them.

    Args:
        original: the decoder as it was; with a concat cache it is run with pasts of 0 tokens.
        cached: what :func:`mha_export.caches.with_cache` made of it.
        evaluator: runs the steps.
        seed: of the inputs.
    """
    tokens = min(max(7, cached.reach + 4), LONGEST)
    reference = ModelReference(original)
    records: list[tuple[str, CaseRecord]] = []
    names: list[str] = []
    steps = 0
    problem: str | None = None
    for case in _cases(original, cached.layout, tokens, seed):
        expected = reference.expected(case)
        if expected.problem is not None:
            problem = problem or expected.problem
            continue
        names.append(case.name)
        for chunks in chunkings(tokens):
            where = f"'{case.name}' in steps of {', '.join(map(str, chunks[:4]))}"
            try:
                found = list(run_steps(cached, case.inputs, chunks, evaluator))
            except MhaExportError as error:
                record = CaseRecord(name=case.name, status="error", message=str(error)[:300])
                records.append((where, record))
                continue
            steps += len(found)
            records += [(where, r) for r in _judged(cached, expected, found, reference, case)]
        records += _prefixes(original, cached, expected, case, evaluator)
    return _summary(evaluator.name, reference.against, tokens, names, steps, records, problem)


def run_steps(
    cached: Cached, inputs: Arrays, chunks: Sequence[int], evaluator: Evaluator
) -> Iterator[Step]:
    """Feed the tokens chunk by chunk, each step's presents as the next one's pasts."""
    layout = cached.layout
    tokens = sum(chunks)
    cache = empty_cache(cached, tokens + ROOM, batch=inputs[layout.tokens[0]].shape[0])
    begin = 0
    for count in chunks:
        end = begin + count
        feeds = step_feeds(layout, inputs, begin, end, room=tokens + ROOM)
        outputs = evaluator.run(cached.model, {**feeds, **cache})
        cache = {tensor.past: outputs[tensor.present] for tensor in layout.tensors}
        yield begin, end, outputs
        begin = end


def empty_cache(cached: Cached, room: int, *, batch: int) -> dict[str, np.ndarray]:
    """The cache before the first token: no tokens, or buffers of ``room`` zeros."""
    length = 0 if cached.layout.growth == "concat" else room
    dtypes = {value.name: value.dtype for value in cached.model.graph.inputs}
    made = {}
    for tensor in cached.layout.tensors:
        dtype = dtypes[tensor.past] or ir.DataType.FLOAT
        shape = [batch, tensor.heads, tensor.heads, tensor.dim]
        shape[tensor.axis] = length
        made[tensor.past] = np.zeros(shape, dtype.numpy())
    return made


def step_feeds(
    layout: CacheLayout, inputs: Arrays, begin: int, end: int, *, room: int
) -> dict[str, np.ndarray]:
    """The inputs of the step that reads tokens ``begin`` to ``end``, the cache apart."""
    feeds: dict[str, np.ndarray] = {}
    pasts = {tensor.past for tensor in layout.tensors}
    for name, array in inputs.items():
        if name in pasts:
            continue
        if name in layout.tokens or name == layout.positions:
            feeds[name] = np.ascontiguousarray(array[:, begin:end])
        elif name == layout.mask:
            feeds[name] = np.ascontiguousarray(array[:, :end])
            if layout.growth == "static":
                rest = [(0, 0), (0, room - end), *[(0, 0)] * (array.ndim - 2)]
                feeds[name] = np.pad(feeds[name], rest)
        else:
            feeds[name] = array
    if layout.total_length is not None:
        feeds[layout.total_length] = np.array([end], np.int64)
    return feeds


def _cases(original: ir.Model, layout: CacheLayout, tokens: int, seed: int) -> Iterator[ModelCase]:
    """The battery's cases in which all tokens are new ones."""
    dims: dict[str, int] = {}
    along = {*layout.tokens, layout.positions, layout.mask}
    pasts = {tensor.past: tensor.axis for tensor in layout.tensors}
    for value in original.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, int) or dim.value is None:
                continue
            if value.name in along and axis == 1:
                dims[dim.value] = tokens
            elif pasts.get(value.name or "") == axis:
                dims[dim.value] = 0
    for case in model_cases(original, seed=seed, dims=dims):
        if case.name in CASES:
            yield case


def _judged(
    cached: Cached,
    expected: Expected,
    found: Sequence[Step],
    reference: ModelReference,
    case: ModelCase,
) -> Iterator[CaseRecord]:
    caches = {tensor.present for tensor in cached.layout.tensors}
    for name, bounds in expected.outputs.items():
        if name in caches:
            continue
        axis = cached.rows.get(name)
        if axis is not None:
            joined = np.concatenate([outputs[name] for _, _, outputs in found], axis=axis)
            shown = _shown(cached.layout, case.inputs, joined, bounds.exact, axis)
            yield compare_output(case.name, name, bounds, shown)
            continue
        for _, end, outputs in found:
            prefix = _prefix(cached.layout, case, end)
            own = reference.expected(prefix)
            if own.problem is None:
                yield compare_output(prefix.name, name, own.outputs[name], outputs[name])


def _shown(
    layout: CacheLayout, inputs: Arrays, joined: np.ndarray, exact: np.ndarray, axis: int
) -> np.ndarray:
    """The outputs, those of tokens that the mask leaves out taken for right."""
    if layout.mask is None or axis != 1 or joined.ndim < 2 or joined.shape != exact.shape:
        return joined
    keep = inputs[layout.mask] != 0
    if keep.shape != joined.shape[:2]:
        return joined
    wide = joined.astype(np.float64) if joined.dtype == ml_dtypes.bfloat16 else joined
    kept: np.ndarray = np.where(keep.reshape(*keep.shape, *[1] * (joined.ndim - 2)), wide, exact)
    return kept


def _prefix(layout: CacheLayout, case: ModelCase, end: int) -> ModelCase:
    along = {*layout.tokens, layout.positions, layout.mask}
    inputs = {
        name: np.ascontiguousarray(array[:, :end]) if name in along else array
        for name, array in case.inputs.items()
    }
    return ModelCase(name=f"{case.name}, {end} tokens", inputs=inputs, dims=case.dims)


def _prefixes(
    original: ir.Model,
    cached: Cached,
    expected: Expected,
    case: ModelCase,
    evaluator: Evaluator,
) -> Iterator[tuple[str, CaseRecord]]:
    """The original on prefixes of the sequence: later tokens change nothing about earlier ones."""
    layout = cached.layout
    total = case.inputs[layout.tokens[0]].shape[1]
    for end in sorted({1, *(sum(chunkings(total)[2][:i]) for i in (1, 2, 3))}):
        prefix = _prefix(layout, case, end)
        try:
            outputs = evaluator.run(original, prefix.inputs)
        except MhaExportError:
            return  # an engine that cannot run the original; the reference could
        for name, axis in cached.rows.items():
            bounds = expected.outputs[name]
            rest = np.take(bounds.exact, range(end, total), axis=axis)
            joined = np.concatenate([as_rows(outputs[name]).astype(np.float64), rest], axis=axis)
            shown = _shown(layout, case.inputs, joined, bounds.exact, axis)
            record = compare_output(prefix.name, name, bounds, shown)
            yield f"the original itself on '{prefix.name}' against all {total}", record


def _summary(
    engine: str,
    against: str,
    tokens: int,
    names: Sequence[str],
    steps: int,
    records: Sequence[tuple[str, CaseRecord]],
    problem: str | None,
) -> StepProof:
    order = ("pass", "imprecise", "error", "fail")
    if not records:
        return StepProof(
            engine=engine,
            against=against,
            status="fail",
            tokens=tokens,
            cases=(),
            steps=0,
            reason=problem or "no input could be judged",
        )
    where, worst = max(records, key=lambda r: (order.index(r[1].status), r[1].factor or 0.0))
    status = worst.status
    reason = None
    if status != "pass":
        reason = f"{where}: {worst.output or 'run'}: {worst.message}"
    return StepProof(
        engine=engine,
        against=against,
        status="fail" if status == "error" else status,
        tokens=tokens,
        cases=tuple(names),
        steps=steps,
        max_err=worst.max_abs,
        bound=worst.bound,
        reason=reason,
    )
