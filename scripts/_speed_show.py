"""What ``bench_speed`` measured as a table in Markdown and as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _speed_work import WHOLE

from mha_export.report.records import write_text

Cell = dict[str, Any]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FAMILIES = ("raw", "peer", "fused", "ours", "torch")


def summary(cell: Cell) -> list[str]:
    """Our best on ONNX Runtime against the raw graph, the best fused op there, and torch."""
    best = best_of(cell, runtimes=("cpu", "torch", "torch:compile"))
    ours = best.get("ours")
    if ours is None:
        return []
    if cell["work"]["kind"] in WHOLE:
        return [f"tokens per second: {tokens_per_second(cell)}"]
    parts = [
        f"{_ratio(ours, other):.2f} of {other['name']}"
        for other in (best.get("raw"), best.get("fused"), best.get("torch"))
        if other is not None
    ]
    return [f"best of ours on ONNX Runtime: {ours['name']}: {', '.join(parts)}"]


def tokens_per_second(cell: Cell) -> str:
    """Of a whole model: everyone's."""
    tokens = (cell["work"].get("new") or cell["work"]["length"]) * cell["work"]["batch"]
    timed = [row for row in cell["candidates"] if row.get("latency_ms")]
    return ", ".join(f"{row['name']} {1e3 * tokens / _p50(row):.0f}" for row in timed)


def best_of(cell: Cell, *, runtimes: tuple[str, ...]) -> dict[str, Cell]:
    """The fastest candidate of each family among those on ``runtimes``."""
    best: dict[str, Cell] = {}
    for row in cell["candidates"]:
        if row.get("latency_ms") is None or row["runtime"] not in runtimes:
            continue
        held = best.get(row["family"])
        if held is None or _p50(row) < _p50(held):
            best[row["family"]] = row
    return best


def write_markdown(record: dict[str, Any], file: Path) -> None:
    """Put the tables between the two marks of ``file``; what a person wrote around them stays."""
    text = file.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n".join([_machine(record), "", *_overview(record), "", *_details(record)])
    write_text(file, f"{before}{BEGIN}\n{body}\n{END}{after}")


def _machine(record: dict[str, Any]) -> str:
    machine, floors = record["machine"], record["floors"]
    gemm, copy = floors["gemm_gflops"], floors["copy_gbytes_s"]
    return (
        f"{machine['cpu']}, {record['settings']['threads']} threads, "
        f"{machine['memory_gb']:.0f} GB, "
        f"{machine['os']}. Largest matrix product: {gemm:.0f} GFLOP/s; copy: {copy:.0f} GB/s."
    )


def _overview(record: dict[str, Any]) -> list[str]:
    lines = [
        "| work | ours | ms | of raw | of the best fused op | of torch | on OpenVINO | of its op |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in record["cells"]:
        best = best_of(cell, runtimes=("cpu", "torch", "torch:compile"))
        there = best_of(cell, runtimes=("openvino",))
        ours = best.get("ours")
        if ours is None:
            continue
        shares = [
            f"{_ratio(ours, best[name]):.2f} ({best[name]['name']})" if name in best else "-"
            for name in ("fused", "torch")
        ]
        raw = f"{_ratio(ours, best['raw']):.2f}" if "raw" in best else "not run"
        other = f"{there['ours']['name']}: {_p50(there['ours']):.1f}" if "ours" in there else "-"
        both = "ours" in there and "fused" in there
        of_own = f"{_ratio(there['ours'], there['fused']):.2f}" if both else "-"
        lines.append(
            f"| {cell['work']['name']} | {ours['name']} | {_p50(ours):.1f} | {raw} | "
            f"{' | '.join(shares)} | {other.removeprefix('openvino ')} | {of_own} |"
        )
    return lines


def _details(record: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for cell in record["cells"]:
        timings = [row["latency_ms"] for row in cell["candidates"] if row.get("latency_ms")]
        rounds = max((timing["rounds"] for timing in timings), default=0)
        lines += [f"### {cell['work']['name']}", "", f"{rounds} rounds.", ""]
        lines += ["| candidate | ms | p10 | p90 | of raw | interval | peak MB |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for row in cell["candidates"]:
            latency, ratio = row.get("latency_ms"), row.get("vs_raw")
            if latency is None:
                lines.append(f"| {row['name']} | {_cell(row['problem'])} | | | | | |")
                continue
            interval = "" if ratio is None else f"{ratio['low']:.2f} to {ratio['high']:.2f}"
            of_raw = "" if ratio is None else f"{ratio['ratio']:.2f}"
            lines.append(
                f"| {row['name']} | {latency['p50']:.2f} | {latency['p10']:.2f} | "
                f"{latency['p90']:.2f} | {of_raw} | {interval} | {row['peak_rss_mb'] or 0:.0f} |"
            )
        if cell["work"]["kind"] in WHOLE:
            lines += ["", f"Tokens per second: {tokens_per_second(cell)}."]
        lines.append("")
    return lines


def write_chart(record: dict[str, Any], file: Path) -> None:
    """Median of the fastest of each family as a share of the raw graph's, a group of bars a row."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cells = [cell for cell in record["cells"] if best_of(cell, runtimes=("cpu",)).get("raw")]
    colours = {"raw": "#b0b0b0", "peer": "#8c6bb1", "fused": "#4292c6", "torch": "#ef8a62"}
    colours["ours"] = "#1a9850"
    figure, axes = pyplot.subplots(figsize=(8, 0.62 * len(cells) + 1))
    for at, cell in enumerate(cells):
        best = best_of(cell, runtimes=("cpu", "torch", "torch:compile"))
        for step, family in enumerate(name for name in FAMILIES if name in best):
            y = at + 0.16 * (step - 2)
            share = _ratio(best[family], best["raw"])
            axes.barh(y, share, height=0.14, color=colours[family])
    axes.set_yticks(range(len(cells)), [cell["work"]["name"] for cell in cells], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("median time, as a share of the raw graph on ONNX Runtime")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in FAMILIES]
    axes.legend(handles, FAMILIES, fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "speed"
    figure.savefig(file, metadata={"Date": None})


def _ratio(row: Cell, other: Cell) -> float:
    return _p50(row) / _p50(other)


def _p50(row: Cell) -> float:
    return float(row["latency_ms"]["p50"])


def _cell(text: str | None) -> str:
    """One line that a table can hold."""
    words = " ".join((text or "").split()).replace("|", "/")
    return words if len(words) <= 90 else f"{words[:87]}..."
