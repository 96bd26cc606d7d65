"""Latency bars: the median, its spread (p10 to p90), and what is not to be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_export.report._figures import milliseconds, ratio
from mha_export.report.charts._svg import INK, MUTED, STAND_IN, Chart, drawing, to_svg
from mha_export.report.records import LatencyRecord, RatioRecord

ROW = 34
WIDE, NARROW = 720, 340


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measurement. ``right`` is False where the answer was wrong: the bar is drawn hollow."""

    label: str
    latency: LatencyRecord
    vs: RatioRecord | None = None
    baseline: bool = False
    right: bool = True


def latency_chart(title: str, bars: Sequence[Bar]) -> Chart:
    """Horizontal bars from fast to slow, labelled with the median and the ratio to the baseline."""
    ordered = sorted(bars, key=lambda bar: bar.latency.p50)
    spoken = "; ".join(f"{bar.label} {milliseconds(bar.latency.p50)}" for bar in ordered)
    description = f"{title}: median latency from fast to slow. {spoken}."
    return Chart(
        title=title,
        description=description,
        wide=_draw(ordered, WIDE, description),
        narrow=_draw(ordered, NARROW, description),
    )


def _draw(bars: Sequence[Bar], width: int, label: str) -> str:
    height = ROW * len(bars) + 8
    top = max(bar.latency.p90 for bar in bars)
    with drawing(width, height, salt=f"{label} {width}") as (figure, axes):
        room = 150 if width == WIDE else 118
        figure.subplots_adjust(left=0.004, right=1 - room / width, top=1 - 2 / height, bottom=0)
        axes.set_xlim(0, top * 1.01)
        axes.set_ylim(len(bars) - 0.5, -0.62)
        axes.set_axis_off()
        for y, bar in enumerate(bars):
            _bar(axes, y, bar, top)
        return to_svg(figure, label=label)


def _bar(axes: object, y: float, bar: Bar, top: float) -> None:
    latency = bar.latency
    colour = STAND_IN["baseline" if bar.baseline else "accent" if bar.right else "bad"]
    draw = axes.barh  # type: ignore[attr-defined]
    if bar.right:
        draw(y + 0.13, latency.p50, height=0.34, color=colour, linewidth=0)
    else:
        draw(y + 0.13, latency.p50, height=0.34, fill=False, edgecolor=colour, linewidth=1.2)
    write = axes.text  # type: ignore[attr-defined]
    write(
        0, y - 0.19, bar.label + ("" if bar.right else "  (wrong result)"), va="center", color=INK
    )
    line = axes.plot  # type: ignore[attr-defined]
    line(
        [latency.p10, latency.p90], [y + 0.13] * 2, color=INK, linewidth=1.1, solid_capstyle="butt"
    )
    for end in (latency.p10, latency.p90):
        line([end, end], [y + 0.03, y + 0.23], color=INK, linewidth=1.1)
    text = milliseconds(latency.p50)
    write(top * 1.03, y + 0.13, text, va="center", ha="left", color=INK, fontweight="bold")
    if bar.vs is not None:
        write(
            top * 1.03,
            y - 0.19,
            f"{ratio(bar.vs.ratio)} of raw",
            va="center",
            ha="left",
            color=MUTED,
        )
