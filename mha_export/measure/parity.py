"""Parity: is what a target gives right, judged against what its precision can achieve.

Whole models: :class:`mha_export.measure.reference_run.ModelReference` says what is exact and how
far plain implementations land from it; :func:`check_parity` runs a candidate on the battery and
judges every output of every case. Single attentions: :func:`spec_parity` against the oracle.

``max_abs``, cosine and argmax agreement are reported and never decide: a cosine of 0.9999 was
seen with a window off by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from mha_export.bounds import Judgement, error_bounds, judge
from mha_export.cases import Battery, cases
from mha_export.errors import InputError
from mha_export.feeds import feeds, oracle_outputs
from mha_export.measure.reference_run import Expected, ModelReference, OutputBounds, as_rows
from mha_export.oracle import attention
from mha_export.report.records import CaseRecord, CaseStatus, ParityRecord
from mha_export.spec import AttentionSpec

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Mapping[str, np.ndarray]]
"""Outputs by name; raises when the runtime does."""

_ORDER: tuple[CaseStatus, ...] = ("pass", "imprecise", "error", "fail")


FEWEST_CASES = 3
"""Judged however little time there is."""


def check_parity(
    reference: ModelReference,
    expected: Iterable[Expected],
    run: Run,
    *,
    time_is_up: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ParityRecord:
    """Run a candidate on every case and judge it.

    A case that the original itself cannot run is left out, and named in ``message`` as not counted.

    Args:
        reference: what is exact.
        expected: the cases.
        run: the candidate.
        time_is_up: asked before every case but the first three; True: the others are left out.
        progress: told before every case how many are done, and how many there are.

    Errors:
        InputError: no case can be judged: the original runs on none of them.
    """
    listed = list(expected)
    records: list[CaseRecord] = []
    sound = [item for item in listed if item.problem is None]
    for item in sound:
        if len(records) >= FEWEST_CASES and time_is_up():
            break
        progress(len(records), len(sound))
        records.append(judge_case(item, run))
    if not records:
        problems = "; ".join(f"{e.case.name}: {e.problem}" for e in listed[:2]) or "no case"
        raise InputError(
            f"no input could be judged: {problems}",
            fix="give real inputs with --inputs FILE.npz, or sizes with --dim NAME=N",
        )
    return summarise(records, against=reference.against, ensemble=reference.members)


def judge_case(expected: Expected, run: Run) -> CaseRecord:
    """One case: the figures of its worst output."""
    name = expected.case.name
    try:
        outputs = run(expected.case.inputs)
    except Exception as error:  # whatever a runtime raises is a result
        words = " ".join(str(error).split())[:400]
        return CaseRecord(name=name, status="error", message=words or type(error).__name__)
    return worst_of(
        name,
        {
            output: compare_output(name, output, bounds, outputs.get(output))
            for output, bounds in expected.outputs.items()
        }.values(),
    )


def worst_of(name: str, records: Iterable[CaseRecord]) -> CaseRecord:
    """The record of the output that decides a case: the worst status, then the largest factor."""
    listed = list(records)
    worst = max(listed, key=lambda r: (_ORDER.index(r.status), r.factor or 0.0))
    cosines = [r.cosine for r in listed if r.cosine is not None]
    agreements = [r.argmax_agreement for r in listed if r.argmax_agreement is not None]
    return dataclasses.replace(
        worst,
        name=name,
        nan_mismatch=sum(r.nan_mismatch for r in listed),
        cosine=min(cosines, default=None),
        argmax_agreement=min(agreements, default=None),
    )


def compare_output(
    case: str, output: str, bounds: OutputBounds, actual: np.ndarray | None
) -> CaseRecord:
    """One output of one case against its bounds."""
    if actual is None:
        message = f"output '{output}' is missing"
        return CaseRecord(name=case, status="fail", output=output, message=message)
    rows = as_rows(actual)
    judgement = judge(rows, bounds.exact, bounds.ensemble, bounds.floor, coarse=bounds.coarse)
    return CaseRecord(
        name=case,
        status=judgement.status,
        max_abs=judgement.max_abs,
        max_rel=judgement.max_rel,
        rmse=judgement.rmse,
        bound=judgement.bound,
        factor=judgement.factor,
        err_over_ensemble=_over_ensemble(judgement, bounds),
        cosine=_cosine(rows, bounds.exact),
        nan_mismatch=judgement.nan_mismatch,
        argmax_agreement=_argmax_agreement(rows, bounds.exact),
        output=output,
        message=judgement.reason,
    )


def summarise(
    records: Iterable[CaseRecord], *, against: str, ensemble: Iterable[str] = ()
) -> ParityRecord:
    """All cases as one record: each figure is the worst case's."""
    listed = tuple(records)

    def worst(name: str) -> float | None:
        found = [v for r in listed if (v := getattr(r, name)) is not None]
        lowest = name in ("cosine", "argmax_agreement")
        return (min if lowest else max)(found, default=None)

    return ParityRecord(
        against=against,
        max_abs=worst("max_abs"),
        max_rel=worst("max_rel"),
        rmse=worst("rmse"),
        factor=worst("factor"),
        err_over_ensemble=worst("err_over_ensemble"),
        cosine=worst("cosine"),
        nan_mismatch=sum(r.nan_mismatch for r in listed),
        argmax_agreement=worst("argmax_agreement"),
        by_case=listed,
        ensemble=tuple(ensemble),
    )


def status_of(parity: ParityRecord) -> Literal["pass", "imprecise", "fail", "error"]:
    """The worst of its cases."""
    return max((case.status for case in parity.by_case), key=_ORDER.index, default="pass")


def reason_of(parity: ParityRecord) -> str | None:
    """Why it is not a ``pass``, in one line; None where it is."""
    status = status_of(parity)
    if status == "pass":
        return None
    bad = [case for case in parity.by_case if case.status == status]
    worst = max(bad, key=lambda case: case.factor or 0.0)
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    output = f", output '{worst.output}'" if worst.output else ""
    return f"case '{worst.name}'{others}{output}: {worst.message or status}"


def spec_parity(
    spec: AttentionSpec, run: Run, *, seed: int = 0, battery: Battery = "full"
) -> ParityRecord:
    """A canonical graph of ``spec`` (of ``build``, without projections) against the oracle.

    Args:
        spec: what the graph states.
        run: its outputs by name; raises when the runtime does.
        seed: of the inputs.
        battery: which inputs.
    """
    records = []
    for case in cases(spec, seed=seed, battery=battery):
        exact = attention(spec, case.inputs)
        limits = error_bounds(spec, case.inputs, exact)
        bounds = OutputBounds(
            exact=exact.output,
            ensemble=limits.ensemble,
            floor=limits.floor,
            coarse=limits.coarse,
        )
        try:
            outputs = oracle_outputs(spec, run(feeds(spec, case.inputs)))
        except Exception as error:  # whatever a runtime raises is a result
            words = " ".join(str(error).split())[:400]
            records.append(CaseRecord(name=case.name, status="error", message=words))
            continue
        records.append(compare_output(case.name, "output", bounds, outputs.get("output")))
    return summarise(records, against="float64 oracle", ensemble=("plain attentions in numpy",))


def save_case(path: Path | str, inputs: Arrays) -> Path:
    """Keep the inputs of a case as an ``.npz`` that ``--inputs`` reads."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {n: a if a.dtype.kind in "biuf" else a.astype(np.float32) for n, a in inputs.items()}
    np.savez(path, **plain)  # type: ignore[arg-type]
    return path


def _over_ensemble(judgement: Judgement, bounds: OutputBounds) -> float | None:
    if not judgement.where or not bounds.ensemble.size:
        return None
    row = float(np.broadcast_to(bounds.ensemble, bounds.exact.shape[:-1])[judgement.where[:-1]])
    error = judgement.factor * judgement.bound
    if row > 0:
        return error / row
    return 0.0 if error == 0 else None


def _cosine(actual: np.ndarray, exact: np.ndarray) -> float | None:
    """The least cosine of any two rows, over rows that are finite and not zero."""
    if actual.shape != exact.shape or actual.shape[-1] < 2:
        return None
    a, b = actual.astype(np.float64), exact.astype(np.float64)
    with np.errstate(all="ignore"):
        size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        cosine = np.einsum("...e,...e->...", a, b) / size
    good = np.isfinite(cosine) & (size > 0)
    return float(np.min(cosine, where=good, initial=1.0)) if good.any() else None


def _argmax_agreement(actual: np.ndarray, exact: np.ndarray) -> float | None:
    if actual.shape != exact.shape or actual.shape[-1] < 2 or not actual.size:
        return None
    same = np.argmax(actual.astype(np.float64), axis=-1) == np.argmax(exact, axis=-1)
    return float(np.mean(same))
