"""Reading an export folder: what ``run``, ``check`` and ``bundle`` start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends import SourceOptions, open_source
from mha_export.jobs._store import MANIFEST, ORIGINAL, PORTABLE
from mha_export.report.records import ExportRecord, VariantRecord, read_export


@dataclass(frozen=True, kw_only=True)
class ExportFolder:
    """An export in a folder that holds every file its record names."""

    path: Path
    record: ExportRecord

    @property
    def original_file(self) -> Path:
        return self.path / f"{ORIGINAL}.onnx"

    def original(self) -> ir.Model:
        """The unmodified model."""
        return open_source(self.original_file, SourceOptions()).model

    def model_of(self, variant: VariantRecord) -> ir.Model:
        return open_source(self.path / variant.file, SourceOptions()).model

    def by_target(self) -> dict[str, list[VariantRecord]]:
        """The graphs of each target, in the record's order."""
        found: dict[str, list[VariantRecord]] = {}
        for variant in self.record.variants:
            found.setdefault(variant.target, []).append(variant)
        return found

    def no_graph(self, target: str) -> InputError:
        """What to raise where a graph of ``target`` is asked for and there is none."""
        portable = "" if target == PORTABLE else f" (or -t {PORTABLE})"
        return InputError(
            f"{self.path} holds no graph for target {target}; "
            f"it has {', '.join(sorted(self.by_target()))}",
            fix=f"export again with -t {target}{portable}",
        )


def is_export(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_export(path: Path) -> ExportFolder:
    """The export in ``path``.

    Errors:
        InputError: no export folder, or one with a file missing or a damaged record.
    """
    if not is_export(path):
        raise InputError(
            f"{path} is not an export folder: it has no {MANIFEST}",
            fix="make one with mha-export export SOURCE -o DIR",
        )
    folder = ExportFolder(path=path, record=read_export(path / MANIFEST))
    for name in (folder.original_file.name, *(each.file for each in folder.record.variants)):
        if not (path / name).is_file():
            raise InputError(f"{path}: {name} is missing", fix="export again into this folder")
    return folder
