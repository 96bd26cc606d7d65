"""Quality against heads removed: one line an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mha_export.report.charts._svg import INK, MUTED, SERIES, Chart, drawing, to_svg

WIDTH, HEIGHT = 420, 270
Curves = Mapping[str, Sequence[tuple[int, float]]]


def quality_chart(title: str, quality: str, curves: Curves) -> Chart:
    """Lines of quality by the number of heads that are gone; at most six can be told apart."""
    shown = dict(list(curves.items())[: len(SERIES)])
    ends = "; ".join(
        f"{name}: {points[-1][1]:.3f} with {points[-1][0]} gone" for name, points in shown.items()
    )
    description = f"{title}: {quality} by heads removed. {ends}."
    with drawing(WIDTH, HEIGHT, salt=description) as (figure, axes):
        figure.subplots_adjust(left=0.11, right=0.97, top=0.97, bottom=0.17)
        for (name, points), colour in zip(shown.items(), SERIES, strict=False):
            axes.plot(
                [0, *(removed for removed, _ in points)],
                [1.0, *(value for _, value in points)]
                if max(value for _, value in points) <= 1
                else [points[0][1], *(value for _, value in points)],
                color=colour,
                linewidth=1.8,
                label=name,
            )
        axes.set_xlabel("heads removed")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="lower left", frameon=False, labelcolor=INK)
        svg = to_svg(figure, label=description)
    return Chart(title=f"{title}: {quality} by heads removed", description=description, svg=svg)
