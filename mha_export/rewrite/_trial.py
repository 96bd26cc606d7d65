"""Case after case through a site and its replacement, and what they show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from mha_export.bounds import (
    ErrorBounds,
    Judgement,
    copy_floor,
    error_bounds,
    judge,
    score_bounds,
)
from mha_export.cases import Case
from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.forms._layout import lowest
from mha_export.oracle import OracleResult, attention
from mha_export.recognise import Site
from mha_export.rewrite._feeds import Feeds
from mha_export.rewrite._heads import to_bhsd
from mha_export.rewrite._outcome import Proof, ProofCase
from mha_export.spec import DType, EmptyRow


class Trial:
    """Case after case through both models, and the judgements so far.

    Args:
        evaluators: the engine, and those that stand in for it. One of them runs the original where
            the engine cannot; and the replacement too where the engine can run neither.
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], site: Site, original: ir.Model, replacement: ir.Model
    ) -> None:
        self._engine, *self._stand_ins = evaluators
        self._original_on: Evaluator | None = self._engine
        """What runs the original; None once nothing here can."""
        self._site = site
        self._original = original
        self._replacement = replacement
        self._cases: list[ProofCase] = []
        self._failure: str | None = None
        self._notes: dict[str, None] = {}
        self._against_original = 0

    @property
    def is_decided(self) -> bool:
        return self._failure is not None

    def runs(self, feeds: Feeds) -> bool:
        """Whether the original runs at all on these inputs, where it ran on others."""
        if self._original_on is None:
            return False
        with suppress(MhaExportError):
            self._outputs(self._original_on, self._original, feeds)
            return True
        return False

    def add(self, case: Case, feeds: Feeds, *, at: str = "") -> None:
        """Judge one case; ``at`` names its lengths."""
        exact = attention(feeds.spec, feeds.inputs)
        bounds = _bounds(self._site, feeds, exact)
        expected = self._original_outputs(feeds)
        if expected is not None and self._original_on is self._engine:
            expected = self._told_from_its_engine(expected, feeds, bounds, _keyless(feeds, exact))
        try:
            actual = self._replacement_outputs(feeds)
        except MhaExportError as error:
            self._failure = f"the replacement does not run: {error}"
            return
        name = case.name + at
        judgements = []
        for role, (want, rows) in bounds.items():
            for outputs in (actual, expected or {}):
                if role in outputs:
                    outputs[role] = _in_use(role, outputs[role], want, feeds)
            found = _judged(actual[role], want, rows)
            judgements.append((f"{role} against the oracle", found))
            if expected is not None:
                judgements += self._with_original(
                    name, role, actual[role], expected[role], want, rows, _keyless(feeds, exact)
                )
        if expected is not None:
            self._against_original += 1
        self.record(name, judgements)

    def _with_original(
        self,
        name: str,
        role: str,
        actual: np.ndarray,
        expected: np.ndarray,
        want: np.ndarray,
        rows: ErrorBounds,
        keyless: np.ndarray,
    ) -> list[tuple[str, Judgement]]:
        """Original against oracle, and replacement against original."""
        left_out = None
        own = _judged(expected, want, rows)
        note = self._why_empty_rows_may_differ() if role == "output" else None
        if own.status == "fail" and note is not None:
            left_out = keyless
            own = _judged(expected, want, rows, left_out=left_out)
            if own.status != "fail":
                self.note(note)
        if own.status == "fail":
            self._failure = (
                f"case {name}: the original graph does not compute this spec: {role}: {own.reason}"
            )
        twice = _judged(actual, expected, rows, times=2.0, left_out=left_out)
        return [(f"{role} against the original", twice)]

    def _why_empty_rows_may_differ(self) -> str | None:
        """Why the original may give a row without keys another value than its operators define."""
        if self._site.fused_as is not None:
            # ORT CPU gives zeros for an additive minimum.
            return "the original's kernel gives rows without keys another value here"
        spec = self._site.spec
        half = spec.io_dtype in (DType.FP16, DType.BF16)
        if half and spec.mask.fill == "min" and spec.mask.empty_row is EmptyRow.UNIFORM:
            # Steps are 32 at fp16's minimum, and runtimes add in fp32: scores are not absorbed.
            return "the original's added minimum does not absorb the scores of rows without keys"
        return None

    def note(self, text: str) -> None:
        """What to know about the proof beside its judgements."""
        self._notes.setdefault(text)

    def record(self, name: str, judgements: Sequence[tuple[str, Judgement]]) -> None:
        what, worst = max(judgements, key=lambda pair: _severity(pair[1]))
        self._cases.append(
            ProofCase(
                name=name,
                status=worst.status,
                max_err=worst.factor * worst.bound if worst.bound else worst.max_abs,
                bound=worst.bound,
                reason=worst.reason,
            )
        )
        if worst.status == "fail" and self._failure is None:
            self._failure = f"case {name}: {what}: {worst.reason}"

    def _outputs(
        self, evaluator: Evaluator, model: ir.Model, feeds: Feeds
    ) -> dict[str, np.ndarray]:
        arrays = {value.name or "": array for value, array in feeds.arrays.items()}
        needed = {value.name for value in model.graph.inputs}
        found = evaluator.run(
            model, {name: array for name, array in arrays.items() if name in needed}
        )
        return {
            role: self._canonical(role, found[f"proof.{role}"])
            for role in (name.removeprefix("proof.") for name in found)
        }

    def _canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        heads = getattr(self._site, role, None)
        if role == "qk_output":
            return array[..., None]  # every score is a row of its own
        if role == "output" and self._site.spec.combine == "mean":
            return array
        assert heads is not None
        return to_bhsd(array, heads)

    def _replacement_outputs(self, feeds: Feeds) -> dict[str, np.ndarray]:
        try:
            return self._outputs(self._engine, self._replacement, feeds)
        except MhaExportError as error:
            if self._cases or self._original_on is self._engine:
                raise
            for stand_in in self._stand_ins:
                with suppress(MhaExportError):
                    found = self._outputs(stand_in, self._replacement, feeds)
                    self.note(f"neither it nor the original runs here: {error}")
                    self._engine = stand_in
                    return found
            raise

    def _original_outputs(self, feeds: Feeds) -> dict[str, np.ndarray] | None:
        """What the original gives, on the first that runs it; None where nothing here does."""
        if self._original_on is None:
            return None
        try:
            return self._outputs(self._original_on, self._original, feeds)
        except MhaExportError as error:
            refusal = f"the original does not run here: {error}"
        self._original_on = None
        for stand_in in self._stand_ins:
            with suppress(MhaExportError):
                found = self._outputs(stand_in, self._original, feeds)
                self._original_on = stand_in
                self.note(f"the original was run on {stand_in.name}: {refusal}")
                return found
        self.note(refusal)
        return None

    def _told_from_its_engine(
        self,
        expected: dict[str, np.ndarray],
        feeds: Feeds,
        bounds: Mapping[str, tuple[np.ndarray, ErrorBounds]],
        keyless: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """The original's outputs, from a stand-in where the engine's own kernels spoil them.

        What the original computes is a question about the graph. An engine may compute its nodes
        coarsely (a sine on Vulkan may be off by 2^-11) and the replacement, which it judges, well.
        """

        def spoilt(outputs: Mapping[str, np.ndarray]) -> str | None:
            for role, (want, rows) in bounds.items():
                array = _in_use(role, outputs[role], want, feeds)
                found = _judged(array, want, rows, left_out=keyless if role == "output" else None)
                if found.status == "fail":
                    return f"{role}: {found.reason}"
            return None

        reason = spoilt(expected)
        if reason is None:
            return expected
        for stand_in in self._stand_ins:
            with suppress(MhaExportError):
                found = self._outputs(stand_in, self._original, feeds)
                if spoilt(found) is None:
                    self._original_on = stand_in
                    self.note(f"the original was run on {stand_in.name}: here {reason}")
                    return found
        return expected

    def verdict(self) -> Proof:
        against = ("oracle", "original") if self._against_original else ("oracle",)
        worst = max(self._cases, key=_case_severity, default=None)
        if self._cases and not self._against_original and self._failure is None:
            words = "; ".join(self._notes)
            self._failure = f"nothing shows that the original computes this attention: {words}"
        status = "fail" if self._failure or worst is None else worst.status
        if any(case.status == "imprecise" for case in self._cases) and status != "fail":
            status = "imprecise"
        reason = self._failure or "; ".join(self._notes) or None
        if worst is None and reason is None:
            reason = "the battery has no case at any length that fits"
        return Proof(
            engine=self._engine.name,
            against=against if self._cases else (),
            status=status,
            cases=len(self._cases),
            max_err=None if worst is None else worst.max_err,
            bound=None if worst is None else worst.bound,
            by_case=tuple(self._cases),
            reason=reason,
        )


def _severity(found: Judgement) -> tuple[int, float]:
    return ("pass", "imprecise", "fail").index(found.status), found.factor


def _case_severity(case: ProofCase) -> tuple[int, float]:
    share = case.max_err / case.bound if case.bound else case.max_err
    return ("pass", "imprecise", "fail").index(case.status), share


def _in_use(role: str, array: np.ndarray, want: np.ndarray, feeds: Feeds) -> np.ndarray:
    """A buffer, what lies beyond the tokens in it taken for right: nothing ever reads that."""
    cache, lengths = feeds.spec.cache, feeds.inputs.kv_lengths
    buffer = role.startswith("present") and cache is not None and cache.growth != "concat"
    if not buffer or lengths is None or array.shape != want.shape:
        return array
    used = np.arange(want.shape[2]) < np.asarray(lengths).reshape(-1, 1)
    kept: np.ndarray = np.where(used[:, None, :, None], array, want)
    return kept


def _keyless(feeds: Feeds, exact: OracleResult) -> np.ndarray:
    """Rows of the output whose keys are all hidden, be it by a bias at the dtype's minimum.

    [b, h, s]; [b, s] where heads are averaged: a row of any head without keys spoils the mean.
    """
    spec, bias = feeds.spec, feeds.inputs.bias
    found: np.ndarray = exact.empty_rows
    if bias is not None and spec.mask.bias is not None:
        hidden = np.all(bias <= lowest(spec.io_dtype) / 2, axis=-1)
        found = np.logical_or(found, np.broadcast_to(hidden, found.shape))
    return np.asarray(found.any(axis=1)) if spec.combine == "mean" else found


def _bounds(
    site: Site, feeds: Feeds, exact: OracleResult
) -> dict[str, tuple[np.ndarray, ErrorBounds]]:
    """By role: the exact array, and the bounds of its rows."""
    spec = feeds.spec
    found = {"output": (exact.output, error_bounds(spec, feeds.inputs, exact))}
    if site.qk_output is not None and spec.qk_output is not None:
        scores = exact.scores(spec.qk_output)
        rows = score_bounds(spec, feeds.inputs, exact, spec.qk_output)
        found["qk_output"] = (scores[..., None], rows)
    for role in ("present_key", "present_value"):
        array = getattr(exact, role)
        if getattr(site, role) is not None and array is not None:
            floor = copy_floor(spec, array)
            found[role] = (
                array,
                ErrorBounds(
                    ensemble=np.zeros_like(floor),
                    floor=floor,
                    coarse=np.zeros_like(floor),
                    overflow=np.zeros(floor.shape, dtype=bool),
                ),
            )
    return found


def _judged(
    actual: np.ndarray,
    want: np.ndarray,
    rows: ErrorBounds,
    *,
    times: float = 1.0,
    left_out: np.ndarray | None = None,
) -> Judgement:
    """The judgement, at ``times`` the bound; without some rows where the whole fails.

    Those are the rows no plain implementation of this precision can do, and ``left_out``.
    """
    found = judge(
        actual, want, times * rows.ensemble, times * rows.floor, coarse=times * rows.coarse
    )
    skipped = rows.overflow if left_out is None else rows.overflow | left_out
    if found.status != "fail" or not np.any(skipped) or actual.shape != want.shape:
        return found
    usable = ~np.broadcast_to(skipped, want.shape[:-1])
    if not np.any(usable):
        return dataclasses.replace(found, status="pass", reason=None, factor=0.0, nan_mismatch=0)
    ensemble, floor, coarse = (
        times * np.broadcast_to(part, usable.shape)[usable]
        for part in (rows.ensemble, rows.floor, rows.coarse)
    )
    return judge(actual[usable], want[usable], ensemble, floor, coarse=coarse)
