"""The results of a run under way: written as they come, and where a run was ended, gone on from.

A results file that is not finished is a valid one: it holds what is done, and ``unfinished`` says
what is not, and of which run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import mha_export
from mha_export.errors import InputError
from mha_export.jobs._settings import RunSettings
from mha_export.jobs._store import file_sha256
from mha_export.jobs._subject import Subject
from mha_export.report.records import (
    ResultRecord,
    ResultsRecord,
    UnfinishedRecord,
    read_record,
    write_json,
)


class ResultsFile:
    """Collects the results of a run, target by target.

    Args:
        path: where they go; None keeps them here only.
        empty: the record without results: the machine, the export, what doctor knows.
        run: digest of what is measured and how (:func:`digest_of`).
        targets: the requests to be measured, in order.
    """

    def __init__(
        self, path: Path | None, *, empty: ResultsRecord, run: str, targets: Sequence[str]
    ) -> None:
        self._path = path
        self._empty = empty
        self._run = run
        known = None if path is None else _unfinished(path, run)
        self.results: list[ResultRecord] = [] if known is None else list(known.results)
        left = targets if known is None or known.unfinished is None else known.unfinished.targets
        self.unfinished = [name for name in targets if name in left]
        self.resumed = known is not None

    def add(self, target: str, results: Iterable[ResultRecord]) -> None:
        """Keep the results of one target, all of them."""
        self.results += results
        self.unfinished.remove(target)
        if self._path is not None:
            write_json(self._path, self.record())

    def record(self) -> ResultsRecord:
        """What there is so far."""
        left = UnfinishedRecord(run=self._run, targets=tuple(self.unfinished))
        return dataclasses.replace(
            self._empty,
            results=tuple(self.results),
            unfinished=left if self.unfinished else None,
        )


def digest_of(subject: Subject, settings: RunSettings, *, machine: str) -> str:
    """Of all that a result hangs on: models, runtimes, inputs, settings, machine, this package.

    Limits of time and memory are no part of it: a run may be gone on with under others.
    """
    candidates = [
        (one.name, one.sha256, one.request.target.availability()) for one in subject.candidates
    ]
    asked = dataclasses.replace(settings, inputs=None, time_limit=None, memory_limit=None)
    inputs = None if settings.inputs is None else file_sha256(settings.inputs)
    facts = (mha_export.__version__, machine, subject.sha256, candidates, asked, inputs)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _unfinished(path: Path, run: str) -> ResultsRecord | None:
    """What an earlier, ended try of the same run left in ``path``; None: nothing to go on from."""
    if not path.is_file():
        return None
    try:
        found = read_record(path, ResultsRecord)
    except InputError:
        return None
    return found if found.unfinished is not None and found.unfinished.run == run else None
