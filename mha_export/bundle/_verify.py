"""Is every byte of a bundle what it was when it was made?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mha_export.bundle._files import names_in, sha256_of
from mha_export.bundle._manifest import MANIFEST, Manifest, damage_of, parse_manifest
from mha_export.bundle._zip import first_difference, unpack
from mha_export.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A file that is not as it was, and how."""

    file: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class OpenedBundle:
    """A bundle's folder, with what was wrong with its archive where it came in one."""

    folder: Path
    problems: tuple[Problem, ...] = ()


def is_bundle(source: object) -> bool:
    """A folder with a manifest, or what looks like a zip."""
    if not isinstance(source, (str, Path)):
        return False
    path = Path(source)
    if path.is_dir():
        return (path / MANIFEST).is_file()
    return path.suffix == ".zip" and path.is_file()


@contextmanager
def open_bundle(path: Path) -> Iterator[OpenedBundle]:
    """The bundle in ``path``, a folder or a ``.zip`` (unpacked for as long as the block lasts).

    Errors:
        InputError: it is neither.
    """
    if path.is_dir():
        yield OpenedBundle(folder=path)
        return
    if not path.is_file():
        raise InputError(f"{path}: no such bundle", fix="give a bundle's folder or .zip")
    if not _is_zip(path):
        raise InputError(f"{path} is not a bundle: neither a folder nor a .zip")
    with tempfile.TemporaryDirectory(prefix="mha_export-bundle-") as name:
        folder = Path(name) / "bundle"
        folder.mkdir()
        problems = [Problem(file=file, reason=why) for file, why in unpack(path, folder).items()]
        at = None if problems else first_difference(path, folder, Path(name) / "again.zip")
        if at is not None:
            reason = f"byte {at} of the archive is not what its content packs to"
            problems.append(Problem(file=path.name, reason=reason))
        yield OpenedBundle(folder=folder, problems=tuple(problems))


def _is_zip(path: Path) -> bool:
    """By its first bytes or by its last, so that one damaged byte hides neither."""
    import zipfile

    with path.open("rb") as file:
        head = file.read(4)
    return head == b"PK\x03\x04" or path.suffix == ".zip" or zipfile.is_zipfile(path)


@dataclass(frozen=True, kw_only=True)
class CheckedFiles:
    """What :func:`check_files` found.

    Attributes:
        manifest: None where it is damaged itself.
        problems: files that are missing or changed.
        notes: files among the bundle's that the manifest does not know.
    """

    manifest: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def check_files(folder: Path) -> CheckedFiles:
    """Compare every file with the manifest.

    Errors:
        InputError: the folder holds no manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(names_in(folder)) and (folder / "model").is_dir():
            return _damaged("missing")
        raise InputError(
            f"{folder} is not a bundle: it holds no {MANIFEST}",
            fix="make one with mha-export bundle EXPORT_DIR -o BUNDLE",
        )
    data = path.read_bytes()
    if damage := damage_of(data):
        return _damaged(damage)
    try:
        manifest = parse_manifest(data, where=MANIFEST)
    except InputError as error:
        return _damaged(error.what)
    problems = tuple(
        problem
        for name, stated in manifest.files.items()
        if (problem := _changed(folder, name, stated.sha256, stated.bytes)) is not None
    )
    strangers = [
        name
        for name in names_in(folder)
        if name != MANIFEST
        and name not in manifest.files
        and name.startswith(("model/", "answers/"))
    ]
    return CheckedFiles(
        manifest=manifest,
        problems=problems,
        notes=tuple(f"{name} is not part of the bundle" for name in strangers),
    )


def _damaged(reason: str) -> CheckedFiles:
    return CheckedFiles(problems=(Problem(file=MANIFEST, reason=reason),))


def _changed(folder: Path, name: str, sha256: str, size: int) -> Problem | None:
    path = folder / name
    if not path.is_file():
        return Problem(file=name, reason="missing")
    if path.stat().st_size != size:
        return Problem(file=name, reason=f"{path.stat().st_size} bytes; expected {size}")
    found = sha256_of(path)
    if found != sha256:
        return Problem(file=name, reason=f"sha256 is {found}; expected {sha256}")
    return None
