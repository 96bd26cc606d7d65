"""What ``run`` is given: an export folder, or one model; and what of it runs on which target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from mha_export.frontends import SourceOptions, open_source
from mha_export.jobs._export_folder import ExportFolder, open_export
from mha_export.jobs._store import ORIGINAL, PORTABLE, file_sha256
from mha_export.report.records import ExportRecord, VariantRecord
from mha_export.targets import Available, TargetRequest, parse_targets


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One graph on one target.

    Attributes:
        variant: name of the file that runs (a target, ``portable``, ``original``); ``file`` is None
            where the folder holds none for a target that cannot run here anyway.
        forms: how many sites are in which form.
    """

    request: TargetRequest
    variant: str | None
    file: Path | None
    sha256: str | None = None
    graph: Literal["main", "prefill", "decode"] = "main"
    forms: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        own = self.variant in (None, self.request.target.name)
        more = [] if own else [str(self.variant)]
        more += ["decode"] if self.graph == "decode" else []
        return f"{self.request.name} ({', '.join(more)})" if more else self.request.name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its candidates. ``original`` is what they must agree with."""

    name: str
    sha256: str
    original: ir.Model
    original_file: Path
    candidates: tuple[Candidate, ...]
    export: ExportRecord | None = None


def open_subject(path: Path, targets: Sequence[str]) -> Subject:
    """Read an export folder, or one ``.onnx`` file, and pair its graphs with ``targets``.

    Errors:
        InputError: neither; an unknown target; a target the folder holds no graph for.
    """
    if path.is_dir():
        return _folder(path, targets)
    loaded = open_source(path, SourceOptions())
    candidates = tuple(
        Candidate(request=request, variant=ORIGINAL, file=path, sha256=file_sha256(path))
        for request in parse_targets(targets or ["all"])
        if targets or isinstance(request.target.availability().run, Available)
    )
    return Subject(
        name=loaded.name,
        sha256=loaded.sha256,
        original=loaded.model,
        original_file=path,
        candidates=candidates,
    )


def _folder(path: Path, targets: Sequence[str]) -> Subject:
    folder = open_export(path)
    return Subject(
        name=folder.record.model.name,
        sha256=folder.record.model.sha256,
        original=folder.original(),
        original_file=folder.original_file,
        candidates=tuple(_candidates(folder, targets)),
        export=folder.record,
    )


def _candidates(folder: ExportFolder, targets: Sequence[str]) -> list[Candidate]:
    variants = folder.by_target()
    portable = variants.get(PORTABLE, [])
    if PORTABLE in targets and not portable:
        raise folder.no_graph(PORTABLE)
    named = [name for name in (targets or variants) if name != PORTABLE]
    # The portable graph alone: on every target found here, and beside it no graph of a target.
    requests = parse_targets(named or ["all"])
    wants_portable = not targets or PORTABLE in targets
    found: list[Candidate] = []
    for request in requests:
        own = variants.get(request.target.name, []) if named else []
        if not own and not portable and _can_run(request):
            raise folder.no_graph(request.target.name)
        if own or not portable or not wants_portable:
            found += [_candidate(folder.path, request, each) for each in own or portable]
            found += [] if own or portable else [_candidate(folder.path, request, None)]
        if (wants_portable or not own) and _can_run(request):
            found += [_candidate(folder.path, request, each) for each in portable]
    return _distinct(found)


def _candidate(path: Path, request: TargetRequest, variant: VariantRecord | None) -> Candidate:
    if variant is None:
        return Candidate(request=request, variant=None, file=None)
    return Candidate(
        request=request,
        variant=variant.target,
        file=path / variant.file,
        sha256=variant.sha256,
        graph=variant.graph,
        forms=Counter(site.form for site in variant.sites.values() if site.form is not None),
    )


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    return list({candidate.name: candidate for candidate in candidates}.values())


def _can_run(request: TargetRequest) -> bool:
    return isinstance(request.target.availability().run, Available)
