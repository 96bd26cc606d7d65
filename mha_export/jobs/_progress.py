"""How a job tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with one short line at every step of long work."""


def silent(step: str) -> None:
    """The progress of a caller that does not want any."""
