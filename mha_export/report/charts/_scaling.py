"""Scaling curves: how the median grows with one dimension, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mha_export.report._figures import milliseconds
from mha_export.report.charts._svg import INK, MUTED, SERIES, Chart, drawing, to_svg
from mha_export.report.records import LatencyRecord

WIDE, NARROW = (720, 300), (340, 260)
_MARKERS = ("o", "s", "^", "D", "v", "P")


def scaling_chart(
    title: str, dimension: str, series: Mapping[str, Sequence[tuple[int, LatencyRecord]]]
) -> Chart:
    """One line a series, with the p10 to p90 band; at most six series can be told apart."""
    shown = dict(list(series.items())[: len(SERIES)])
    spoken = "; ".join(
        f"{name}: " + ", ".join(f"{size} {milliseconds(latency.p50)}" for size, latency in points)
        for name, points in shown.items()
    )
    description = f"{title}: median latency by {dimension}. {spoken}."
    return Chart(
        title=title,
        description=description,
        wide=_draw(shown, dimension, WIDE, description),
        narrow=_draw(shown, dimension, NARROW, description),
    )


def _draw(
    series: Mapping[str, Sequence[tuple[int, LatencyRecord]]],
    dimension: str,
    size: tuple[int, int],
    label: str,
) -> str:
    width, height = size
    wide = width == WIDE[0]
    with drawing(width, height, salt=f"{label} {width}") as (figure, axes):
        right = 1 - 150 / width if wide else 0.97
        bottom = 40 / height if wide else (48 + 17 * len(series)) / height
        figure.subplots_adjust(left=48 / width, right=right, top=1 - 12 / height, bottom=bottom)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({size for points in series.values() for size, _ in points})
        for index, (name, points) in enumerate(series.items()):
            colour, marker = SERIES[index], _MARKERS[index]
            x = [size for size, _ in points]
            axes.fill_between(
                x,
                [p.p10 for _, p in points],
                [p.p90 for _, p in points],
                color=colour,
                alpha=0.16,
                lw=0,
            )
            axes.plot(
                x, [p.p50 for _, p in points], color=colour, marker=marker, ms=5, lw=1.8, label=name
            )
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(_none())
        axes.yaxis.set_major_formatter(lambda value, _: milliseconds(value))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_xlabel(dimension)
        place = (
            {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            if wide
            else {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.2)}
        )
        axes.legend(frameon=False, labelcolor=INK, handlelength=1.6, borderaxespad=0, **place)
        return to_svg(figure, label=label)


def _none() -> object:
    from matplotlib.ticker import NullLocator

    return NullLocator()
