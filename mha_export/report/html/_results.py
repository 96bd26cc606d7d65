"""One row a result, and the same result in detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mha_export.report._figures import (
    NONE,
    figure,
    megabytes,
    milliseconds,
    percent,
    ratio,
    workload,
)
from mha_export.report._merge import Entry
from mha_export.report.html._heat import Heat, heat_row


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure: as it reads, and what it sorts by. ``note`` is a second, quieter line."""

    text: str
    sort: float | str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Facet:
    """One thing the page can be filtered by."""

    name: str
    label: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ResultView:
    """A result, ready to print."""

    number: int
    status: str
    model: str
    graph: str
    target: str
    machine: str
    workload: str
    precision: str
    forms: tuple[str, ...]
    reason: str
    columns: dict[str, Cell]
    facts: tuple[tuple[str, str], ...]
    elsewhere: tuple[str, ...]
    heat: Heat | None
    difference: str
    replays: tuple[tuple[str, str], ...]


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("workload", "Workload", "Sizes of the symbolic dimensions"),
    ("forms", "Forms", "ONNX form of each attention, and how many"),
    ("placement", "On target", "Nodes computing in floating point that ran on the target itself"),
    ("error", "Error / bound", "Largest error in units of its bound: 1 or less passes"),
    ("latency", "Median", "Median of a run, with p10 and p90"),
    ("vs", "vs raw", "Time over the unmodified model's in the same rounds, with its 95% interval"),
    ("limit", "Of limit", "Achieved rate over what this machine reaches in a plain GEMM or copy"),
    ("memory", "Memory", "Largest resident size of the worker process"),
)
"""Key, heading and explanation of each column that may be empty and is then left out."""


def views(entries: Iterable[Entry]) -> tuple[ResultView, ...]:
    """Every result, in report order."""
    listed = list(entries)
    constant = constant_dims(listed)
    return tuple(_view(entry, constant) for entry in listed)


def constant_dims(entries: Iterable[Entry]) -> Mapping[str, int]:
    """Dimensions that had one size throughout: stated once, not in every row."""
    workloads = [entry.result.workload for entry in entries]
    if len(workloads) < 2:
        return {}
    first = workloads[0]
    same = {n: size for n, size in first.items() if all(w.get(n) == size for w in workloads)}
    return same if len(same) < len(first) else {}


def used_columns(rows: Iterable[ResultView]) -> tuple[tuple[str, str, str], ...]:
    """The columns in which at least one result has something to say."""
    listed = list(rows)
    return tuple(c for c in COLUMNS if any(row.columns[c[0]].text != NONE for row in listed))


def facets(rows: Iterable[ResultView]) -> tuple[Facet, ...]:
    """What the page can be filtered by: only where there is a choice."""
    listed = list(rows)
    found = (
        ("status", "Status", {row.status for row in listed}),
        ("model", "Model", {row.model for row in listed}),
        ("target", "Target", {row.target for row in listed}),
        ("form", "Form", {form for row in listed for form in row.forms}),
        ("dtype", "Precision", {row.precision for row in listed}),
        ("machine", "Machine", {row.machine for row in listed}),
    )
    return tuple(
        Facet(name=name, label=label, values=tuple(sorted(values)))
        for name, label, values in found
        if len(values) > 1
    )


def _view(entry: Entry, constant: Mapping[str, int]) -> ResultView:
    result = entry.result
    parity, placement = result.parity, result.placement
    first = parity.first_difference if parity else None
    replays = [(case.name, case.replay) for case in (parity.by_case if parity else ())]
    return ResultView(
        number=entry.number,
        status=result.status,
        model=result.model,
        graph=result.graph,
        target=entry.target,
        machine=entry.machine.id,
        workload=workload(result.workload),
        precision=result.precision or "as the graph",
        forms=tuple(sorted(result.forms)) or ("none",),
        reason=result.reason or "",
        columns=_columns(entry, constant),
        facts=tuple(_facts(entry)),
        elsewhere=placement.elsewhere if placement else (),
        heat=None
        if parity is None or not parity.by_case
        else Heat(
            columns=tuple(c.name for c in parity.by_case), rows=(heat_row("", parity.by_case),)
        ),
        difference=f"{first.site}, {first.stage}: {first.message}" if first else "",
        replays=tuple((name, command) for name, command in replays if command)
        + ((("this result", result.replay),) if result.replay else ()),
    )


def _columns(entry: Entry, constant: Mapping[str, int]) -> dict[str, Cell]:
    result = entry.result
    latency, parity, placement, vs = result.latency_ms, result.parity, result.placement, result.vs
    whole = placement.on_target / max(placement.float_compute_nodes, 1) if placement else None
    varied = {n: size for n, size in result.workload.items() if n not in constant}
    volume = 1.0
    for size in result.workload.values():
        volume *= max(size, 1)
    return {
        "workload": Cell(text=workload(varied) or NONE, sort=volume),
        "forms": Cell(
            text=", ".join(f"{form} ×{n}" for form, n in sorted(result.forms.items())) or NONE
        ),
        "placement": Cell(text=percent(whole), sort=_low(whole)),
        "error": Cell(
            text=figure(parity.factor) if parity else NONE,
            sort=_low(parity.factor if parity else None),
            note=""
            if parity is None or parity.max_abs is None
            else f"abs {figure(parity.max_abs)}",
        ),
        "latency": Cell(
            text=milliseconds(latency.p50) if latency else NONE,
            sort=_low(latency.p50 if latency else None),
            note="" if latency is None else f"{figure(latency.p10)} to {figure(latency.p90)}",
        ),
        "vs": Cell(
            text=ratio(vs.ratio) if vs else NONE,
            sort=_low(vs.ratio if vs else None),
            note="" if vs is None else f"{vs.low:.2f} to {vs.high:.2f}",
        ),
        "limit": Cell(text=percent(result.roofline_fraction), sort=_low(result.roofline_fraction)),
        "memory": Cell(text=megabytes(result.peak_rss_mb), sort=_low(result.peak_rss_mb)),
    }


def _low(value: float | None) -> float:
    return -1.0 if value is None else float(value)


def _facts(entry: Entry) -> Iterable[tuple[str, str]]:
    result = entry.result
    parity, latency, placement = result.parity, result.latency_ms, result.placement
    yield "runtime", " ".join(filter(None, (result.runtime, result.runtime_version)))
    yield "device", result.device or ""
    yield "machine", f"{entry.machine.id}: {entry.machine.cpu}"
    if parity is not None:
        yield "exact answer", parity.against
        yield "judged against", ", ".join(parity.ensemble)
        yield (
            "largest error",
            f"{figure(parity.max_abs)} absolute, {figure(parity.max_rel)} relative",
        )
        yield "root mean square", figure(parity.rmse)
        yield "of the plain ones' error", ratio(parity.err_over_ensemble)
        yield "NaN or Inf mismatches", str(parity.nan_mismatch)
        yield "cosine", NONE if parity.cosine is None else f"{parity.cosine:.9f}"
        yield "same argmax", percent(parity.argmax_agreement)
    if placement is not None:
        where = f"{placement.on_target} of {placement.float_compute_nodes} nodes on the target"
        if placement.other_nodes:
            where += (
                f", and {placement.other_on_target} of {placement.other_nodes} "
                "for shapes and integers"
            )
        yield "placement", where + (f" ({placement.evidence})" if placement.evidence else "")
    if latency is not None:
        yield (
            "latency",
            f"p10 {milliseconds(latency.p10)}, p50 {milliseconds(latency.p50)}, "
            f"p90 {milliseconds(latency.p90)}, p99 {milliseconds(latency.p99)}",
        )
        rounds = f" in {latency.rounds} interleaved rounds" if latency.rounds else ""
        yield "runs", f"{latency.n}{rounds}, {latency.warmup} before that to warm up"
        yield "timer", latency.timer + (f", {latency.threads} threads" if latency.threads else "")
    once = (
        ("compile", result.compile_ms),
        ("load", result.load_ms),
        ("first run", result.first_run_ms),
    )
    yield (
        "once",
        ", ".join(f"{name} {milliseconds(value)}" for name, value in once if value is not None),
    )
    if result.gflops is not None:
        rate = f"{figure(result.gflops)} GFLOP/s"
        yield "rate", rate + (f", {figure(result.gbytes_s)} GB/s" if result.gbytes_s else "")
