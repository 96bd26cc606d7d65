"""The command line: one thin file per command. A file that defines ``command`` is found by itself.

Exit codes: 0 all well; 1 a check failed; 2 bad usage or bad input; 3 a target that was asked for
cannot run here.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from mha_export.errors import MhaExportError


def main() -> None:
    """Run the command line and leave with its exit code."""
    from mha_export.cli._group import cli

    # A name that the encoding of a console or a pipe lacks is shown escaped.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Ended from outside, a command still ends its workers and removes its temporary folders.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    try:
        cli.main(standalone_mode=True, prog_name="mha-export")
    except MhaExportError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except MemoryError:
        _complain("out of memory\n  fix: use a smaller workload (--dim), or a machine with more")
        sys.exit(1)
    except OSError as error:
        _complain(_os_words(error))
        sys.exit(2)
    except Exception as error:
        if os.environ.get("MHA_EXPORT_TRACEBACK"):
            raise
        _complain(
            f"internal error: {type(error).__name__}: {error}\n"
            "  fix: this is a bug; run again with MHA_EXPORT_TRACEBACK=1 and report it"
        )
        sys.exit(1)


def _os_words(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}\n  fix: check the path, its permissions and free space"
    )


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
