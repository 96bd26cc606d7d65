"""The few kinds of error that reach a user.

Every message says what went wrong, where, what was expected and what was found, and how to fix it.
Unsupported features are *data* (:class:`mha_export.forms.Unsupported`), never exceptions.
"""

from __future__ import annotations


class MhaExportError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: what went wrong, and where (a file, a node, a field).
        fix: what the user can do about it; printed on its own line.
    """

    exit_code = 2

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return self.what if self.fix is None else f"{self.what}\n  fix: {self.fix}"


class InputError(MhaExportError):
    """A file, option or value from outside is missing, damaged or contradictory (exit 2)."""


class SpecError(InputError, ValueError):
    """An attention specification contradicts itself (exit 2)."""


class CheckFailedError(MhaExportError):
    """A proof, a parity check or a comparison did not hold (exit 1)."""

    exit_code = 1


class TargetUnavailableError(MhaExportError):
    """A target that was asked for cannot run on this machine (exit 3)."""

    exit_code = 3
