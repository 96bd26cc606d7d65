"""What a bench found, as JSON and as a Markdown table: fault by fault, who saw it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from mha_export.measure.faults._bench import FAULTS, Found, Planted, Right
from mha_export.measure.machine import machine_record

SCHEMA_VERSION = 1


def document(found: Iterable[Found], *, seed: int) -> dict[str, Any]:
    """Totals, a row a fault, what was missed, what was not counted, and every right graph."""
    listed = list(found)
    planted = [p for f in listed for p in f.planted]
    right = [r for f in listed for r in f.right]
    rows = [_row(name, [p for p in planted if p.fault == name]) for name in FAULTS]
    judged = [r for r in right if r.status in ("pass", "imprecise", "fail", "error")]
    machine = machine_record()
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": {"cpu": machine.cpu, "os": machine.os, "python": machine.python},
        "versions": dict(machine.packages) | _polygraphy(),
        "seed": seed,
        "total": _row("all", planted),
        "faults": [row for row in rows if row["planted"]],
        "missed": [dataclasses.asdict(p) for p in planted if not p.cpu or p.reference is False],
        "equivalent": [
            {"fault": fault, "detail": detail, "base": base}
            for f in listed
            for fault, detail, base in f.equivalent
        ],
        "right": {
            "judged": len(judged),
            "false_alarms": [dataclasses.asdict(r) for r in judged if r.status != "pass"],
            "polygraphy_false_alarms": sum(r.polygraphy_sized is True for r in judged),
            "polygraphy_judged": sum(r.polygraphy_sized is not None for r in judged),
            "vetoed": [_veto(r) for r in right if r.status == "vetoed"],
        },
        "forms": _counts(p.form for p in planted),
        "bases": _counts(p.base for p in planted),
        "caught_by_case": _counts(p.case.rpartition(" (")[0] for p in planted if p.case),
    }


def _row(name: str, planted: Sequence[Planted]) -> dict[str, Any]:
    return {
        "fault": name,
        "planted": len(planted),
        "cpu": sum(p.cpu is True for p in planted),
        "on_reference": sum(p.reference is not None for p in planted),
        "reference": sum(p.reference is True for p in planted),
        "polygraphy": sum(p.polygraphy is True for p in planted),
        "polygraphy_sized": sum(p.polygraphy_sized is True for p in planted),
    }


def _veto(right: Right) -> dict[str, Any]:
    return {
        "base": right.base,
        "form": right.form,
        "target": right.target,
        "reason": right.reason,
    }


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _polygraphy() -> dict[str, str]:
    from importlib import metadata

    try:
        return {"polygraphy": metadata.version("polygraphy")}
    except metadata.PackageNotFoundError:
        return {}


def markdown(found: dict[str, Any]) -> str:
    """The table and what it was measured with."""
    total, right = found["total"], found["right"]
    versions = found["versions"]
    named = [
        f"{name} {versions[name]}"
        for name in ("onnx", "onnxruntime", "numpy", "polygraphy")
        if name in versions
    ]
    lines = [
        "# How much the parity check sees",
        "",
        f"Measured with `scripts/bench_parity` on {found['machine']['cpu']}, "
        f"{found['machine']['os']}, Python {found['machine']['python']}; {', '.join(named)}; "
        f"seed {found['seed']}.",
        "",
        f"**{_share(total['cpu'], total['planted'])}** of the planted faults are caught on ONNX "
        f"Runtime's CPU, {_share(total['reference'], total['on_reference'])} of those that onnx's "
        "reference evaluator runs. Polygraphy's comparator with its defaults catches "
        f"{_share(total['polygraphy'], total['planted'])} on its default inputs, and "
        f"{_share(total['polygraphy_sized'], total['planted'])} when it is given shapes.",
        "",
        f"False alarms over {right['judged']} right graphs (layer, form, target): "
        f"**{len(right['false_alarms'])}**. Polygraphy, given shapes: "
        f"{right['polygraphy_false_alarms']} of {right['polygraphy_judged']}.",
        "",
        "| fault | planted | cpu | reference | Polygraphy | Polygraphy, given shapes |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in [*found["faults"], {**total, "fault": "**all**"}]:
        lines.append(
            f"| {row['fault']} | {row['planted']} | {row['cpu']} | "
            f"{row['reference']} of {row['on_reference']} | {row['polygraphy']} | "
            f"{row['polygraphy_sized']} |"
        )
    lines += [
        "",
        "`planted` counts graphs: a fault in every layer, form and place that it fits. Polygraphy "
        "without shapes takes 1 for every free dimension: one token.",
        "",
        f"Planted by form: {_listed(found['forms'])}.",
        "",
        f"First caught by case: {_listed(found['caught_by_case'])}.",
    ]
    lines += _left_out(found)
    return "\n".join(lines) + "\n"


def _left_out(found: dict[str, Any]) -> list[str]:
    lines = ["", "Not counted, for no float64 output differs:", ""]
    by_fault: dict[str, list[str]] = {}
    for row in found["equivalent"]:
        by_fault.setdefault(f"{row['fault']} ({row['detail']})", []).append(row["base"])
    lines += [f"* {what}: {'; '.join(where)}" for what, where in by_fault.items()]
    by_reason: dict[str, list[str]] = {}
    for row in found["right"]["vetoed"]:
        by_reason.setdefault(row["reason"], []).append(row["base"])
    if by_reason:
        lines += ["", "Not judged, for the target's capabilities rule the form out:", ""]
        lines += [f"* {why}: {'; '.join(where)}" for why, where in by_reason.items()]
    for title, rows in (
        ("Missed", found["missed"]),
        ("False alarms", found["right"]["false_alarms"]),
    ):
        if rows:
            lines += ["", f"{title}:", ""]
            lines += [f"* {', '.join(f'{k}: {v}' for k, v in row.items() if v)}" for row in rows]
    return lines


def _share(part: int, whole: int) -> str:
    if not whole:
        return "none"
    return f"{part} of {whole} ({100 * part / whole:.4g}%)"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
