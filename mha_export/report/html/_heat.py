"""Error by case as a table whose cells are shaded: a heat map a screen reader can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha_export.report._figures import figure
from mha_export.report.records import CaseRecord, ProofCaseRecord

DECADES = 3.0
"""Shading runs from a thousandth of the bound to the bound, evenly in decades."""


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """``shade`` runs from 0 to 1 within ``status``."""

    text: str
    status: str
    shade: float
    title: str


@dataclass(frozen=True, kw_only=True)
class HeatRow:
    label: str
    cells: tuple[HeatCell, ...]


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Rows of cells, one column a case."""

    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]


def heat_row(label: str, cases: Iterable[CaseRecord]) -> HeatRow:
    """A row from the cases of a result."""
    return HeatRow(
        label=label,
        cells=tuple(
            _cell(case.name, case.status, case.factor, case.max_abs, case.bound) for case in cases
        ),
    )


def proof_heat(rows: Iterable[tuple[str, Sequence[ProofCaseRecord]]]) -> Heat | None:
    """Proofs side by side: one row a target, one column a case that any of them ran."""
    listed = [(label, {case.name: case for case in cases}) for label, cases in rows if cases]
    if not listed:
        return None
    columns = tuple(dict.fromkeys(name for _, cases in listed for name in cases))
    return Heat(
        columns=columns,
        rows=tuple(
            HeatRow(
                label=label, cells=tuple(_proof_cell(cases.get(name), name) for name in columns)
            )
            for label, cases in listed
        ),
    )


def _proof_cell(case: ProofCaseRecord | None, name: str) -> HeatCell:
    if case is None:
        return HeatCell(text="", status="none", shade=0.0, title=f"{name}: not run")
    factor = case.max_err / case.bound if case.bound else (math.inf if case.max_err else 0.0)
    return _cell(name, case.status, factor, case.max_err, case.bound)


def _cell(
    name: str, status: str, factor: float | None, error: float | None, bound: float | None
) -> HeatCell:
    title = f"{name}: {status}, error {figure(error)}, bound {figure(bound)}"
    if factor is None or math.isnan(factor):
        return HeatCell(
            text="NaN" if factor is not None else "", status=status, shade=1.0, title=title
        )
    exponent = math.log10(factor) if factor > 0 else -DECADES
    shade = (exponent + DECADES) / DECADES if status == "pass" else exponent / DECADES
    return HeatCell(
        text=figure(factor), status=status, shade=round(min(max(shade, 0.06), 1.0), 3), title=title
    )
