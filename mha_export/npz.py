"""Arrays by name from an ``.npz`` that somebody else wrote."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from mha_export.errors import InputError

_UNREADABLE = (EOFError, NotImplementedError, OSError, ValueError, zipfile.BadZipFile, zlib.error)
"""What ``numpy.load`` and reading its members raise for damaged files and for pickled objects."""


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of ``path`` by name; pickled objects are never loaded.

    Errors:
        InputError: no such file, not an ``.npz``, damaged, or with pickled objects in it.
    """
    fix = "save it with numpy.savez(FILE, **{input name: array})"
    try:
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise InputError(f"{path}: one array without a name; expected an .npz", fix=fix)
            with loaded as file:
                return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", fix="check the path") from None
    except _UNREADABLE as error:
        raise InputError(f"{path}: not an .npz of arrays ({error})", fix=fix) from error
