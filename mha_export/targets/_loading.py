"""Whether a target takes a whole model: loaded, never run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mha_export.targets._registry import target_named
from mha_export.targets._target import CannotRun, CompileOptions, Program


def refusal_of(target: str, precision: str | None, model: Path) -> str | None:
    """Why ``target`` does not load the file, in its own words; None where it does.

    The body of one worker request: a crash of the runtime is the caller's ``Outcome``.
    """
    chosen = target_named(target)
    with tempfile.TemporaryDirectory(prefix="mha_export-load-", ignore_cleanup_errors=True) as out:
        options = CompileOptions(precision=precision, threads=1, workdir=Path(out), keep=False)
        try:
            artifact = chosen.compile(Program(graphs={"main": model}), options)
            loaded = artifact.load() if artifact.files else None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return loaded.reason if isinstance(loaded, CannotRun) else None
