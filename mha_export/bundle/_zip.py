"""A bundle as one ``.zip``: stored, in a fixed order, with no times, so that equal folders give
equal bytes, and a byte changed anywhere in an archive shows when its content is packed again."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from mha_export.bundle._files import BLOCK, names_in

_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_zip(folder: Path, out: Path) -> Path:
    """Write every file of ``folder`` to ``out``."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in names_in(folder):
            with (folder / name).open("rb") as file, _entry(archive, name) as entry:
                while block := file.read(BLOCK):
                    entry.write(block)
    return out


def _entry(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system = 3
    info.external_attr = 0o644 << 16
    return archive.open(info, "w", force_zip64=True)


def unpack(archive: Path, folder: Path) -> dict[str, str]:
    """Write the files of ``archive`` into ``folder``; what could not be read, and why, by name.

    Names that would leave the folder are not written.
    """
    bad: dict[str, str] = {}
    try:
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                inside = PurePosixPath(info.filename)
                if inside.is_absolute() or ".." in inside.parts or "\\" in info.filename:
                    bad[info.filename] = "a name that leads out of the bundle"
                    continue
                try:
                    _extract(packed, info, folder / inside)
                except _UNREADABLE as error:
                    bad[info.filename] = f"cannot be read from the archive ({error})"
    except _UNREADABLE as error:
        bad[archive.name] = f"not a readable zip ({error})"
    return bad


_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)
"""What ``zipfile`` raises for damaged archives: other methods, flags, offsets, cut data."""


def _extract(packed: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with packed.open(info) as source, path.open("wb") as target:
        while block := source.read(BLOCK):
            target.write(block)


def first_difference(archive: Path, folder: Path, scratch: Path) -> int | None:
    """Where ``archive`` differs from what packing ``folder`` gives; None where it does not."""
    again = write_zip(folder, scratch)
    with archive.open("rb") as one, again.open("rb") as other:
        at = 0
        while True:
            a, b = one.read(BLOCK), other.read(BLOCK)
            if a != b:
                pairs = enumerate(zip(a, b, strict=False))
                return at + next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
            if not a:
                return None
            at += len(a)
