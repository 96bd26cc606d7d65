"""One decoder as two graphs: one that reads prompts, one that reads single tokens.

Both read the same inputs, keep the same cache and share one weights file; they differ in the form
of their attentions, and so in how fast they are at many tokens or at one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mha_export.errors import InputError
from mha_export.report.records import CacheRecord

Graph = Literal["main", "prefill", "decode"]
SPLIT = "prefill-decode"

PREFERRED: Mapping[Graph, tuple[str, ...]] = {
    "main": (),
    "prefill": ("tiled",),
    "decode": ("grouped",),
}
"""The forms tried before a target's own: query tiles for prompts, query groups for tokens."""


def phases(split: str) -> tuple[Graph, ...]:
    """The graphs to make for each target."""
    return ("prefill", "decode") if split == SPLIT else ("main",)


def stem(target: str, graph: Graph) -> str:
    """Name of the file without its suffix."""
    return f"{target}.decode" if graph == "decode" else target


def forms_for(graph: Graph, forms: Sequence[str], *, only: str | None) -> tuple[str, ...]:
    """Which forms to try, best first."""
    if only is not None:
        return tuple(forms)
    return tuple(dict.fromkeys((*PREFERRED[graph], *forms)))


def check_split(split: str, cache: CacheRecord | None) -> None:
    """A decoder in two graphs hands a cache from one to the other.

    Errors:
        InputError: there is none whose inputs and outputs are known.
    """
    if split == SPLIT and (cache is None or cache.layout is None):
        raise InputError(
            "--split prefill-decode needs a cache to hand from one graph to the other",
            fix="add --cache static or --cache concat",
        )


def plan_names(target: str, graph: Graph) -> Iterator[str]:
    """Rows of a plan that speak of a graph: its own before the target's."""
    if graph != "main":
        yield plan_name(target, graph)
    yield target


def plan_name(target: str, graph: Graph) -> str:
    """The row of a plan for one graph of a target."""
    return target if graph == "main" else f"{target}.{graph}"
