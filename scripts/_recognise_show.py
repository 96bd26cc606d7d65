"""What ``bench_recognise`` measured, as a page of Markdown and as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOOLS = ("mha_export", "onnxruntime", "onnxscript")
CELL = ("family", "exporter", "layers", "tool")
Rows = dict[tuple[Any, ...], dict[str, Any]]


def page(document: dict[str, Any], *, chart: str | None = None) -> str:
    """The whole page; ``chart``: where the picture lies, seen from it."""
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    text = f"""\
# Time of recognising and rewriting, beside its peers

Written by `scripts/bench_recognise` from [bench_recognise.json](bench_recognise.json).

Machine: {machine["cores"]} cores, {machine["system"]}, Python {machine["python"]}; {packages}.

Random models (hidden 64, 4 heads; the Llama-shaped ones share 2 key heads), exported by torch's
two exporters. Each cell is a process of its own that loads the file, does the whole job and reports
the CPU seconds of all its threads, imports left out, its peak memory, and how many attentions it
fused. Ours raises the model to opset 23 and proves every rewrite. A cell that needs more than the
limit is ended and shown as `> N s`; a factor over it is then the least it can be. `-`: not
measured.

ONNX Runtime's optimizer is `optimize_model` for GPT-2 and BERT (it asks for a name, and has none
for Llama), onnxscript is `optimize_for_ort`. Ours pauses Python's cyclic garbage collector while it
looks at a graph: every node is in a cycle and alive, and each full collection walks all of them.
"""
    if chart is not None:
        text += f"\n![CPU seconds by layers]({chart})\n"
    return f"{text}\n{tables(document)}"


def tables(document: dict[str, Any]) -> str:
    """CPU seconds and peak memory by layers, growth per doubling, coverage."""
    lines: list[str] = []
    rows: Rows = {tuple(row[key] for key in CELL): row for row in document["rows"]}
    sizes = sorted({row["layers"] for row in document["rows"]})
    for family, exporter in dict.fromkeys(key[:2] for key in rows):
        lines += [
            "",
            f"**{family}, {exporter} export**",
            "",
            f"| tool | {' | '.join(f'{n} layers' for n in sizes)} |",
            "| --- " * (len(sizes) + 1) + "|",
        ]
        for tool in TOOLS:
            cells = [_shown(rows.get((family, exporter, n, tool))) for n in sizes]
            lines.append(f"| {tool} | {' | '.join(cells)} |")
        best = [ratio(rows, family, exporter, n) for n in sizes]
        lines.append(f"| faster than the faster peer | {' | '.join(best)} |")
        growth = [_grown(rows, family, exporter, n) for n in sizes]
        lines.append(f"| growth of ours per doubling | {' | '.join(growth)} |")
    if document.get("coverage"):
        lines += [
            "",
            "**The corpus of real exports**: *right* are the fused attentions of files whose "
            "outputs are still the framework's.",
            "",
            "| tool | attentions | fused | fused and right | files made wrong | crashes |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in document["coverage"]:
            figures = (row[key] for key in ("layers", "fused", "right", "wrong files", "crashes"))
            lines.append(f"| {row['tool']} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines).lstrip() + "\n"


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "over" in row:
        return f"> {row['over']} s"
    if "problem" in row:
        return "fails"
    return (
        f"{row['cpu_seconds']:.2f} s, {row['peak_rss_mb']:.0f} MB, {row['fused']}/{row['layers']}"
    )


def ratio(rows: Rows, family: str, exporter: str, layers: int) -> str:
    """How many times faster ours is than the faster peer; a bound where that one was ended."""
    own, *peers = (rows.get((family, exporter, layers, tool), {}) for tool in TOOLS)
    known = [row["cpu_seconds"] for row in peers if "cpu_seconds" in row]
    floors = [row["over"] for row in peers if "over" in row]
    if "cpu_seconds" not in own or not (known or floors):
        return "-"
    least = min([*known, *floors])
    return f"{'' if least in known else '> '}{least / own['cpu_seconds']:.1f}x"


def _grown(rows: Rows, family: str, exporter: str, layers: int) -> str:
    one, two = (rows.get((family, exporter, n, TOOLS[0]), {}) for n in (layers / 2, layers))
    if "cpu_seconds" not in one or "cpu_seconds" not in two:
        return "-"
    return f"{two['cpu_seconds'] / one['cpu_seconds']:.2f}x"


def write_chart(document: dict[str, Any], file: Path) -> None:
    """CPU seconds against layers, both logarithmic, a panel for each family and exporter."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows: Rows = {tuple(row[key] for key in CELL): row for row in document["rows"]}
    panels = list(dict.fromkeys(key[:2] for key in rows))
    colours = dict(zip(TOOLS, ("#1a9850", "#4292c6", "#ef8a62"), strict=True))
    figure = Figure(figsize=(3.4 * len(panels), 3.4))
    FigureCanvasSVG(figure)  # type: ignore[no-untyped-call]
    for place, (family, exporter) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        sizes = sorted({key[2] for key in rows if key[:2] == (family, exporter)})
        for tool in TOOLS:
            own = {n: rows.get((family, exporter, n, tool), {}) for n in sizes}
            timed = [n for n in sizes if "cpu_seconds" in own[n]]
            ended = [n for n in sizes if "over" in own[n]]
            seconds = [own[n]["cpu_seconds"] for n in timed]
            axes.plot(timed, seconds, marker="o", markersize=3, color=colours[tool], label=tool)
            axes.scatter(ended, [own[n]["over"] for n in ended], marker="^", color=colours[tool])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.set_title(f"{family}, {exporter}", fontsize=9)
        axes.set_xlabel("layers", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 0:
            axes.set_ylabel("CPU seconds (triangle: ended there)", fontsize=8)
            axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "recognise"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
