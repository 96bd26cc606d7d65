"""What a person sees: tables on a terminal, plain lines when piped; progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import click

    from mha_export.jobs import JobResult, Progress

SILENT_SECONDS = 10.0
"""The longest that a log goes without a line while steps are told."""

STATUS_STYLE = {
    "pass": "green",
    "built": "green",
    "ok": "green",
    "available": "green",
    "attention": "green",
    "fused": "green",
    "imprecise": "yellow",
    "lowered": "yellow",
    "kept": "yellow",
    "not_attention": "dim",
    "unavailable": "dim",
    "not-probed": "dim",
    "fail": "bold red",
    "fallback": "red",
    "error": "red",
    "rejected": "red",
    "proof_failed": "bold red",
    "wrong": "bold red",
    "crash": "bold red",
}


def print_json(document: Any) -> None:
    """One JSON document on stdout: sorted by the document's own order, two-space indent."""
    _write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on a terminal; tab-separated lines, headed once, when stdout is piped."""
    if not sys.stdout.isatty():
        lines = [columns, *([_plain(cell) for cell in row] for row in rows)]
        _write("".join("\t".join(line) + "\n" for line in lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [_plain(cell) for cell in row]
        table.add_row(*(Text(cell, style=STATUS_STYLE.get(cell, "")) for cell in cells))
    Console().print(table)


def print_line(text: str) -> None:
    _write(text + "\n")


def print_notice(text: str) -> None:
    """Something a person should know that is not a result: stderr."""
    sys.stderr.write(text + "\n")


def finish(
    ctx: click.Context, result: JobResult, *, as_json: bool, show: Callable[[dict[str, Any]], None]
) -> NoReturn:
    """End a command: notices to stderr; the document, or ``show`` and the files written."""
    for notice in result.notices:
        print_notice(notice)
    if as_json:
        print_json(result.document)
    else:
        show(result.document)
        for file in result.files:
            print_line(f"written to {file}")
    ctx.exit(result.exit_code)


def _write(text: str) -> None:
    """Write to stdout. A reader who has gone (``| head``) changes nothing, the exit code least."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return str(cell).replace("\t", " ").replace("\n", " ")


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Yield the callable that jobs report their steps to."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        console = Console(stderr=True)
        with console.status("starting") as status:
            yield lambda step: status.update(escape(step))
    else:
        yield _PlainProgress()


class _PlainProgress:
    """One line a step; steps that differ only after ``": "`` (``parity on cpu: input 3 of 13``)
    share one, and get another after every ten seconds, so that a log shows how far long work is.

    Args:
        clock: seconds from any point on.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = ""
        self._said = 0.0

    def __call__(self, step: str) -> None:
        what = step.partition(": ")[0]
        now = self._clock()
        if what != self._last:
            print_notice(f"... {what}")
        elif now - self._said >= SILENT_SECONDS and step != what:
            print_notice(f"... {step}")
        else:
            return
        self._last, self._said = what, now
