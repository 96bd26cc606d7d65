"""From a matplotlib figure to SVG that belongs to a page.

Colours are drawn as stand-ins and replaced by CSS variables, so one chart serves light, dark and
print; text stays text, in the page's font; ids are hashed from the content, so bytes are stable.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from mha_export.errors import InputError

STAND_IN = {
    "paper": "#252627",
    "ink": "#010203",
    "muted": "#040506",
    "grid": "#070809",
    "accent": "#0a0b0c",
    "baseline": "#0d0e0f",
    "bad": "#101112",
    "s1": "#131415",
    "s2": "#161718",
    "s3": "#191a1b",
    "s4": "#1c1d1e",
    "s5": "#1f2021",
    "s6": "#222324",
}
"""Name of a CSS variable to the colour that stands for it while drawing."""
INK, MUTED, GRID = STAND_IN["ink"], STAND_IN["muted"], STAND_IN["grid"]
SERIES = tuple(STAND_IN[f"s{i}"] for i in range(1, 7))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One drawing; ``description`` says in words what it shows, and is the image's label."""

    title: str
    description: str
    svg: str


@contextmanager
def drawing(width: float, height: float, *, salt: str) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, ``width`` by ``height`` CSS pixels.

    Errors:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "an HTML report draws with matplotlib, which is not installed",
            fix="pip install 'mha-export[report]', or write a .md, .json or .xml report",
        ) from error
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": INK,
        "grid.color": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "path.simplify": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_facecolor("none")
        axes.tick_params(length=0)
        yield figure, axes


def to_svg(figure: Any, *, label: str) -> str:
    """The figure as an ``<svg>`` element that scales to its box."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', _opening(label), text, count=1)
    text = re.sub(r"font: ([^;\"]*?)([0-9.]+)px [^;\"]*", _font, text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for name, colour in STAND_IN.items():
        text = text.replace(colour, f"var(--{name})")
    return _with_own_ids(text.strip(), label)


def _with_own_ids(text: str, label: str) -> str:
    """Ids that no other chart of the page has; those nothing refers to are dropped."""
    prefix = f"c{hashlib.sha256(label.encode()).hexdigest()[:8]}-"
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))

    def own(match: re.Match[str]) -> str:
        return f' id="{prefix}{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', own, text)
    return re.sub(r"(url\(|href=\")#", rf"\1#{prefix}", text)


def _opening(label: str) -> str:
    label = escape(label).replace("\\", "\\\\")
    return rf'<svg role="img" aria-label="{label}" viewBox="\1" class="chart">'


def _font(match: re.Match[str]) -> str:
    weight = "font-weight: 600; " if "bold" in match[1] or "700" in match[1] else ""
    return f"{weight}font-size: {match[2]}px"
