"""What ``run`` is given: an export folder, or one model; and what of it runs on which target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends import SourceOptions, open_source
from mha_export.jobs._store import ORIGINAL, PORTABLE, file_sha256
from mha_export.report.records import ExportRecord, VariantRecord, read_export
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
    manifest = path / "export.json"
    if not manifest.is_file():
        raise InputError(
            f"{path} is not an export folder: it has no export.json",
            fix="make one with mha-export export SOURCE -o DIR, or give an .onnx file",
        )
    record = read_export(manifest)
    original_file = path / f"{ORIGINAL}.onnx"
    for needed in (original_file, *(path / variant.file for variant in record.variants)):
        if not needed.is_file():
            raise InputError(
                f"{path}: {needed.name} is missing", fix="export again into this folder"
            )
    return Subject(
        name=record.model.name,
        sha256=record.model.sha256,
        original=open_source(original_file, SourceOptions()).model,
        original_file=original_file,
        candidates=tuple(_candidates(path, record, targets)),
        export=record,
    )


def _candidates(path: Path, record: ExportRecord, targets: Sequence[str]) -> list[Candidate]:
    variants: dict[str, list[VariantRecord]] = {}
    for variant in record.variants:
        variants.setdefault(variant.target, []).append(variant)
    portable = variants.get(PORTABLE, [])
    if PORTABLE in targets and not portable:
        raise _no_graph(path, PORTABLE, variants)
    named = [name for name in (targets or variants) if name != PORTABLE]
    # The portable graph alone: on every target found here, and beside it no graph of a target.
    requests = parse_targets(named or ["all"])
    wants_portable = not targets or PORTABLE in targets
    found: list[Candidate] = []
    for request in requests:
        own = variants.get(request.target.name, []) if named else []
        if not own and not portable and _can_run(request):
            raise _no_graph(path, request.target.name, variants)
        if own or not portable or not wants_portable:
            found += [_candidate(path, request, each) for each in own or portable]
            found += [] if own or portable else [_candidate(path, request, None)]
        if (wants_portable or not own) and _can_run(request):
            found += [_candidate(path, request, each) for each in portable]
    return _distinct(found)


def _no_graph(path: Path, name: str, variants: Iterable[str]) -> InputError:
    portable = "" if name == PORTABLE else " (or -t portable)"
    return InputError(
        f"{path} holds no graph for target {name}; it has {', '.join(sorted(variants))}",
        fix=f"export again with -t {name}{portable}",
    )


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
