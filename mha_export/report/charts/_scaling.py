"""Scaling curves: how the median grows with one dimension, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_export.report._figures import milliseconds
from mha_export.report.charts._svg import INK, MUTED, SERIES, Chart, drawing, to_svg
from mha_export.report.records import LatencyRecord

WIDTH, PLOT, LEGEND_ROW = 360, 210, 17
_MARKERS = ("o", "s", "^", "D", "v", "P")
Series = Mapping[str, Sequence[tuple[int, LatencyRecord]]]


def scaling_chart(title: str, dimension: str, series: Series) -> Chart:
    """One line a series, with the p10 to p90 band; at most six series can be told apart."""
    shown = dict(list(series.items())[: len(SERIES)])
    spoken = "; ".join(
        f"{name}: " + ", ".join(f"{size} {milliseconds(latency.p50)}" for size, latency in points)
        for name, points in shown.items()
    )
    description = f"{title}: median latency by {dimension}. {spoken}."
    return Chart(title=title, description=description, svg=_draw(shown, dimension, description))


def _draw(series: Series, dimension: str, label: str) -> str:
    height = PLOT + 34 + LEGEND_ROW * len(series)
    with drawing(WIDTH, height, salt=label) as (figure, axes):
        figure.subplots_adjust(
            left=46 / WIDTH, right=0.97, top=1 - 8 / height, bottom=1 - PLOT / height
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for index, points in enumerate(series.values()):
            _line(axes, points, SERIES[index], _MARKERS[index])
        _scales(axes, series, dimension)
        axes.legend(
            axes.lines,
            list(series),
            loc="upper left",
            bbox_to_anchor=(0, (height - PLOT - 34) / height),
            bbox_transform=figure.transFigure,
            frameon=False,
            labelcolor=INK,
            handlelength=1.8,
            labelspacing=0.35,
            borderaxespad=0,
            borderpad=0,
        )
        return to_svg(figure, label=label)


def _line(axes: Any, points: Sequence[tuple[int, LatencyRecord]], colour: str, marker: str) -> None:
    x = [size for size, _ in points]
    low, high = [p.p10 for _, p in points], [p.p90 for _, p in points]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(
        x, [p.p50 for _, p in points], color=colour, marker=marker, markersize=4.5, linewidth=1.7
    )


def _scales(axes: Any, series: Series, dimension: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    sizes = sorted({size for points in series.values() for size, _ in points})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: milliseconds(value))
    axes.tick_params(axis="y", labelcolor=MUTED, pad=6)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(dimension)
