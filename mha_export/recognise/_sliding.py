"""Windows that slide along an axis: in how many places they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_export.recognise._shape_laws import Shape

SLIDING = frozenset({"AveragePool", "Conv", "MaxPool"})
"""Ops whose output is empty where the input is shorter than their window."""


def places_of_window(
    shapes: Sequence[Shape | None], attributes: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """(places, size of the input) along each axis that a window slides on, where both are known.

    ONNX's own inference says one place for a window that does not fit at all.
    """
    source, weight = shapes[0], shapes[1] if len(shapes) > 1 else None
    if source is None or attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return []
    wide = len(source) - 2
    windows = attributes.get("kernel_shape") or (weight or ())[2:]
    pads = attributes.get("pads") or (0,) * (2 * wide)
    spread = attributes.get("dilations") or (1,) * wide
    steps = attributes.get("strides") or (1,) * wide
    found: list[tuple[int, int]] = []
    for place, (size, window) in enumerate(zip(source[2:], windows, strict=False)):
        if size is None or window is None:
            continue
        room = size + pads[place] + pads[wide + place] - (window - 1) * spread[place] - 1
        found.append((room // steps[place] + 1 if room >= 0 else 0, size))
    return found
