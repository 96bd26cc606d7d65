"""Hashes of what lies in a bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from mha_export.bundle._manifest import MANIFEST, FileRecord

BLOCK = 1 << 20


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def names_in(folder: Path) -> Iterator[str]:
    """Every file below ``folder``, as a path with forward slashes, in a fixed order."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    yield from sorted(path.relative_to(folder).as_posix() for path in paths)


def hash_files(folder: Path) -> dict[str, FileRecord]:
    """Hash and size of every file but the manifest."""
    return {
        name: FileRecord(sha256=sha256_of(folder / name), bytes=(folder / name).stat().st_size)
        for name in names_in(folder)
        if name != MANIFEST
    }
