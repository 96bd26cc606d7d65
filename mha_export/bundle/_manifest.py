"""``manifest.json``: what a bundle holds, and what each part of it means.

The manifest states the hash of every other file and, in ``sha256``, its own: of its bytes with
those 64 digits replaced by zeros. So nothing in a bundle can change unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_export.errors import InputError
from mha_export.report.records import ModelRecord, Record, validate

MANIFEST = "manifest.json"
KIND = "mha-export bundle"
VERSION = "1.0"
_BLANK = "0" * 64


@dataclass(frozen=True, kw_only=True)
class FileRecord(Record):
    """Hash and size of one file of the bundle."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ValueRecord(Record):
    """One input or output of every graph of the bundle.

    Attributes:
        shape: sizes, and names of symbols; one name is one size wherever it stands.
        role: ``ids``, ``positions``, ``mask``, ``bias``, ``past``, ``present``, ``lengths``,
            ``logits`` or what else it is.
        meaning: the same for a person.
        below: integers are below this; None: no limit is known.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: str
    meaning: str
    below: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunsOnRecord(Record):
    """One place a variant runs: a runtime, what it calls the device, and its oldest version."""

    runtime: str
    provider: str
    minimum: str


@dataclass(frozen=True, kw_only=True)
class VariantEntry(Record):
    """One graph, and where it is for.

    Attributes:
        opsets: domain (``""`` is ai.onnx) to version.
        forms: form of attention to number of sites.
        attention_nodes: names of the nodes that compute attention; where they ran is what
            placement means.
        runs_on: in order of preference.
        options: what a session needs to be told: by runtime, option to value.
        evidence: how the variant was shown to be right: proofs of its sites, a run of the export's
            own check, and what the target was probed to do.
    """

    target: str
    file: str
    single_file: str | None = None
    dtype: str
    opsets: Mapping[str, int]
    ir_version: int
    nodes: int
    forms: Mapping[str, int] = field(default_factory=dict)
    attention_nodes: tuple[str, ...] = ()
    runs_on: tuple[RunsOnRecord, ...] = ()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TensorRecord(Record):
    """A tensor in a case's file: little-endian, C order, at ``offset``.

    Attributes:
        bound, coarse: offsets of one float32 a row (all axes but the last): an error up to
            ``bound`` passes, one up to ``coarse`` is imprecise. Outputs only, which are kept as
            float32 or in their own integer type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    bound: int | None = None
    coarse: int | None = None
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerCase(Record):
    """A known answer: inputs, the exact outputs, and how far from them is still right."""

    name: str
    file: str
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationRecord(Record):
    """Tokens that a decoder continues ``prompt`` with, greedily."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MobileRecord(Record):
    """ORT format for mobile builds; ``operators``: the configuration of a reduced build."""

    file: str
    operators: str
    runtime_version: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """``manifest.json``. ``variants`` are in order of preference; ``portable`` comes last."""

    sha256: str = _BLANK
    kind: str = KIND
    schema_version: str = VERSION
    generator: str
    model: ModelRecord
    licenses: tuple[str, ...] = ()
    inputs: tuple[ValueRecord, ...]
    outputs: tuple[ValueRecord, ...]
    cache: Mapping[str, Any] | None = None
    weights: str | None = None
    variants: tuple[VariantEntry, ...]
    answers: tuple[AnswerCase, ...] = ()
    answers_against: str = ""
    generation: GenerationRecord | None = None
    mobile: MobileRecord | None = None
    genai: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's bytes, its own hash filled in."""
    blank = _dumps(replace(manifest, sha256=_BLANK).to_json())
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_BLANK.encode(), digest.encode(), 1)


def _dumps(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Check against the schema ``bundle``, and write."""
    document = json.loads(manifest_bytes(manifest))
    validate("bundle", document, where=MANIFEST)
    path = folder / MANIFEST
    path.write_bytes(manifest_bytes(manifest))
    return path


def damage_of(data: bytes) -> str | None:
    """What is wrong with a manifest's bytes; None where it is as it was written."""
    try:
        document = json.loads(data.decode())
    except ValueError as error:
        return f"not JSON ({error})"
    stated = document.get("sha256") if isinstance(document, dict) else None
    if not isinstance(stated, str) or len(stated) != len(_BLANK):
        return "it states no sha256 of its own"
    found = hashlib.sha256(data.replace(stated.encode(), _BLANK.encode(), 1)).hexdigest()
    if found != stated:
        return f"its sha256 is {found}; it states {stated}"
    return None


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """A manifest that :func:`damage_of` found whole.

    Errors:
        InputError: another kind of file, a later version, or not valid under the schema.
    """
    document = json.loads(data)
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != KIND:
        raise InputError(f"{where}: kind is {kind!r}; expected {KIND!r}")
    version = str(document.get("schema_version"))
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise InputError(
            f"{where}: schema_version {version}; this package reads {VERSION}",
            fix="update mha-export, or bundle the export again",
        )
    validate("bundle", document, where=where)
    return Manifest.from_json(document)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Errors:
        InputError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{folder} is not a bundle: {MANIFEST} {error.strerror}",
            fix="make one with mha-export bundle EXPORT_DIR -o BUNDLE",
        ) from None
    if damage := damage_of(data):
        raise InputError(f"{path}: damaged: {damage}", fix="bundle the export again")
    return parse_manifest(data, where=str(path))
