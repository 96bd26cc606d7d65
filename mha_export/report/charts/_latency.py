"""Latency bars: the median, its spread (p10 to p90), and what is not to be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mha_export.report._figures import milliseconds, ratio
from mha_export.report.charts._svg import INK, MUTED, STAND_IN, Chart, drawing, to_svg
from mha_export.report.records import LatencyRecord, RatioRecord

ROW = 36
WIDTH, ROOM = 360, 92
CUT = 6.0
"""A bar over this many times the middle one is cut, so that the others can be told apart."""
LONGEST_WHISKER = 1.6
"""A whisker is drawn to at least this many times the median before it may leave the chart."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measurement. ``doubt`` says why the figure does not count; the bar is drawn hollow."""

    label: str
    latency: LatencyRecord
    vs: RatioRecord | None = None
    baseline: bool = False
    doubt: str | None = None


def latency_chart(title: str, bars: Sequence[Bar]) -> Chart:
    """Horizontal bars from fast to slow, labelled with the median and the ratio to the baseline."""
    ordered = sorted(bars, key=lambda bar: bar.latency.p50)
    spoken = "; ".join(
        f"{bar.label} {milliseconds(bar.latency.p50)}" + (f" ({bar.doubt})" if bar.doubt else "")
        for bar in ordered
    )
    description = f"{title}: median latency from fast to slow. {spoken}."
    return Chart(title=title, description=description, svg=_draw(ordered, description))


def _draw(bars: Sequence[Bar], label: str) -> str:
    height = ROW * len(bars) + 6
    cut = CUT * median(bar.latency.p50 for bar in bars)
    top = max(
        min(bar.latency.p90, LONGEST_WHISKER * bar.latency.p50)
        for bar in bars
        if bar.latency.p50 <= cut
    )
    with drawing(WIDTH, height, salt=label) as (figure, axes):
        figure.subplots_adjust(left=0.003, right=1 - ROOM / WIDTH, top=1 - 2 / height, bottom=0)
        axes.set_xlim(0, top * 1.01)
        axes.set_ylim(len(bars) - 0.5, -0.62)
        axes.set_axis_off()
        for y, bar in enumerate(bars):
            _bar(axes, y, bar, top)
        return to_svg(figure, label=label)


def _bar(axes: Any, y: int, bar: Bar, top: float) -> None:
    latency, at = bar.latency, y + 0.14
    length = min(latency.p50, top)
    if bar.doubt:
        bad = STAND_IN["bad"]
        axes.barh(at, length, height=0.32, fill=False, edgecolor=bad, linewidth=1.2)
    else:
        colour = STAND_IN["baseline" if bar.baseline else "accent"]
        axes.barh(at, length, height=0.32, color=colour, linewidth=0)
    if latency.p50 > top:
        axes.text(
            top * 0.99, at, "cut", va="center", ha="right", color=STAND_IN["paper"], fontsize=9
        )
    else:
        _whisker(axes, latency, at, top)
    axes.text(0, y - 0.2, bar.label + (f" ({bar.doubt})" if bar.doubt else ""), va="center")
    text = milliseconds(latency.p50)
    axes.text(top * 1.04, at, text, va="center", color=INK, fontweight="bold")
    if bar.vs is not None:
        axes.text(top * 1.04, y - 0.2, f"{ratio(bar.vs.ratio)} of raw", va="center", color=MUTED)


def _whisker(axes: Any, latency: LatencyRecord, at: float, top: float) -> None:
    """From p10 to p90; one that leaves the chart has no cap at its end."""
    axes.plot([latency.p10, min(latency.p90, top)], [at, at], color=INK, linewidth=1.1)
    for end in (latency.p10, latency.p90):
        if end <= top:
            axes.plot([end, end], [at - 0.09, at + 0.09], color=INK, linewidth=1.1)
