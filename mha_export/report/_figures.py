"""Numbers as people read them, the same in every format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mha_export.report.records import ResultRecord

NONE = "–"
"""What stands in a cell without a value."""


def figure(value: float | None) -> str:
    """Three significant digits: ``0.0123``, ``3.2e-07``, ``1.5e+04``."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        text = f"{value:.3g}"
        return f"{value:.0f}" if "e" in text else text
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def milliseconds(value: float | None) -> str:
    """``0.42 ms``, ``12.3 ms``, ``1.25 s``."""
    if value is None:
        return NONE
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    if value < 0.01:
        return f"{value * 1000:.3g} µs"
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def ratio(value: float | None) -> str:
    """``0.56×``."""
    if value is None:
        return NONE
    return f"{value:.2f}×" if value < 100 else f"{figure(value)}×"


def percent(value: float | None) -> str:
    """``0.123`` as ``12%``."""
    if value is None:
        return NONE
    return f"{100 * value:.0f}%" if value >= 0.1 else f"{100 * value:.1f}%"


def megabytes(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f} MB" if value < 1000 else f"{value / 1000:.1f} GB"


def workload(dims: Mapping[str, int]) -> str:
    """``batch 2 · seq 128``, batch first."""
    names = sorted(dims, key=lambda name: (not name.startswith("batch"), name))
    return " · ".join(f"{_short(name)} {dims[name]}" for name in names)


def _short(name: str) -> str:
    return name.replace("sequence_length", "seq").replace("sequence", "seq").replace("_", " ")


def plural(count: int, noun: str) -> str:
    """``1 result``, ``2 results``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def some(names: list[str] | tuple[str, ...], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def target_of(result: ResultRecord) -> str:
    """``openvino:bf16``, as ``-t`` takes it, and the variant it ran where that is another's."""
    name = result.target + (f":{result.precision}" if result.precision else "")
    return name if result.variant in (None, result.target) else f"{name} ({result.variant})"


def subject(result: ResultRecord) -> str:
    """``minilm decode on openvino:bf16, batch 2 · seq 128``."""
    graph = "" if result.graph == "main" else f" {result.graph}"
    size = workload(result.workload)
    return f"{result.model}{graph} on {target_of(result)}" + (f", {size}" if size else "")
