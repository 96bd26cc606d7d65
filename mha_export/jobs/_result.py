"""What a job returns to its caller, be that Python code or the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, FAILED, BAD_INPUT, CANNOT_RUN = 0, 1, 2, 3
_PRECEDENCE = (BAD_INPUT, FAILED, CANNOT_RUN)


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A finished job.

    Attributes:
        document: the JSON document of the job, valid under its schema.
        exit_code: 0 all well, 1 a check failed, 3 a target that was asked for cannot run here.
        notices: lines a person should read: what was refused, undone or missing, and why.
        files: what was written.
    """

    document: dict[str, Any]
    exit_code: int = OK
    notices: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def ok(self) -> bool:
        return self.exit_code == OK


def worst(codes: Iterable[int]) -> int:
    """The exit code of several findings: bad input before a failure before an absent target."""
    found = set(codes)
    return next((code for code in _PRECEDENCE if code in found), OK)
