"""Reading and writing record files: checked at the edge, written whole or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from mha_export.errors import InputError
from mha_export.report.records._codec import Record
from mha_export.report.records._compare import ComparisonRecord
from mha_export.report.records._doctor import DoctorRecord
from mha_export.report.records._export import ExportRecord
from mha_export.report.records._heads import HeadsRecord, SurgeryRecord
from mha_export.report.records._plan import PlanRecord
from mha_export.report.records._results import ResultsRecord
from mha_export.report.records._version import upgraded

R = TypeVar("R", bound=Record)

SCHEMA_OF: Mapping[type[Record], str] = {
    ExportRecord: "export",
    ResultsRecord: "results",
    DoctorRecord: "doctor",
    ComparisonRecord: "compare",
    HeadsRecord: "heads",
    SurgeryRecord: "surgery",
    PlanRecord: "plan",
}
"""Schema file of each record that is a file of its own. ``inspect`` prints an export record."""


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A file that was left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What :func:`read_results` found: the good files in the order given, and the rest by name."""

    results: tuple[tuple[Path, ResultsRecord], ...]
    damaged: tuple[Damaged, ...] = ()


def dumps(data: Any) -> str:
    """Strict JSON text, indented, same bytes for the same data."""
    plain = data.to_json() if isinstance(data, Record) else data
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path | str, data: Record | Mapping[str, Any]) -> Path:
    """Write ``data`` to ``path``: under another name first, renamed when whole.

    A record that has a schema is checked against it before anything is written.

    Errors:
        InputError: the folder does not exist or cannot be written, or the data breaks its schema.
    """
    if isinstance(data, Record) and type(data) in SCHEMA_OF:
        validate(SCHEMA_OF[type(data)], data.to_json(), where=str(path))
    return write_text(path, dumps(data))


def write_text(path: Path | str, text: str) -> Path:
    """Write ``text`` to ``path`` whole or not at all.

    Errors:
        InputError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror})", fix="name a folder that exists"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) called ``name``: one of the values of ``SCHEMA_OF``."""
    file = resources.files("mha_export.report") / "schemas" / f"{name}.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def validate(name: str, data: Any, *, where: str = "data") -> None:
    """Check ``data`` against the schema ``name``.

    Errors:
        InputError: the first place that breaks it, and how.
    """
    from jsonschema import Draft202012Validator  # only when a file is read or written
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema(name)).iter_errors(data))
    if error is not None:
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        raise InputError(
            f"{where}: not a valid {name} file at {place.lstrip('.') or 'the top'}: "
            f"{error.message:.200}",
            fix=f"write it again with this version of mha-export; {name}.schema.json states "
            "what it must hold",
        )


def read_record(path: Path | str, kind: type[R]) -> R:
    """Read one record file of a known kind, upgrading an older version.

    Errors:
        InputError: it is missing, not JSON, breaks its schema, or a later major version wrote it.
    """
    return _as_record(Path(path), _read_object(Path(path)), kind)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})", fix="it may have been cut short") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected an object, got {type(data).__name__}")
    return data


def _as_record(path: Path, data: dict[str, Any], kind: type[R]) -> R:
    name = SCHEMA_OF[kind]
    data = upgraded(data, name, where=str(path))
    validate(name, data, where=str(path))
    return kind.from_json(data)


def _runs(path: Path) -> list[ResultsRecord]:
    """The runs of a results file, of a merged report, or of a capability file (no results)."""
    data = _read_object(path)
    if isinstance(data.get("runs"), list):
        return [_as_record(path, run, ResultsRecord) for run in data["runs"] if run]
    if "measured" in data and "question" in data:
        plan = _as_record(path, data, PlanRecord)
        return [ResultsRecord(machine=plan.machine, plans=(plan,))]
    if "targets" in data and "results" not in data:
        doctor = _as_record(path, data, DoctorRecord)
        return [ResultsRecord(machine=doctor.machine, doctor=doctor)]
    if "maps" in data and "layers" in data:
        heads = _as_record(path, data, HeadsRecord)
        return [ResultsRecord(machine=heads.machine, heads=(heads,))]
    if "heads_before" in data:
        surgery = _as_record(path, data, SurgeryRecord)
        return [ResultsRecord(machine=surgery.machine, surgeries=(surgery,))]
    return [_as_record(path, data, ResultsRecord)]


def read_export(path: Path | str) -> ExportRecord:
    """Read an ``export.json``. See :func:`read_record` for the errors."""
    return read_record(path, ExportRecord)


def read_results(paths: Iterable[Path | str]) -> Loaded:
    """Read any number of ``results.json``; a damaged one is named and left out.

    An earlier report in JSON, a capability file of ``doctor`` and a plan of ``tune`` are read too.
    An ``export.json`` beside a results file that holds no export of its own is taken in.

    Errors:
        InputError: no path was given, or none of the files can be used.
    """
    good: list[tuple[Path, ResultsRecord]] = []
    damaged: list[Damaged] = []
    fixes: set[str | None] = set()
    for path in map(Path, paths):
        try:
            good += [(path, _with_neighbour(path, run)) for run in _runs(path)]
        except InputError as error:
            what = error.what if str(path) in error.what else f"{path}: {error.what}"
            damaged.append(Damaged(path=path, reason=what))
            fixes.add(error.fix)
    if not good:
        listed = "; ".join(f"{d.reason}" for d in damaged) or "no file was given"
        fix = fixes.pop() if len(fixes) == 1 else None
        raise InputError(
            f"no results file can be used: {listed}", fix=fix or "run `mha-export run` again"
        )
    return Loaded(results=tuple(good), damaged=tuple(damaged))


def _with_neighbour(path: Path, record: ResultsRecord) -> ResultsRecord:
    beside = path.parent / "export.json"
    if record.exports or not beside.is_file():
        return record
    try:
        export = read_export(beside)
    except InputError:
        return record  # the results stand on their own
    if not any(r.model_sha256 == export.model.sha256 for r in record.results):
        return record
    return dataclasses.replace(record, exports=(export,))
