"""Members of a package that are found by their files: forms, frontends, targets, formats."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any


def members(package: str, attribute: str) -> Iterator[Any]:
    """``attribute`` of every module of ``package``, in alphabetical order of their files.

    A file whose name begins with ``_`` is the package's own and not asked.

    Errors:
        AttributeError: a module does not define it; the message names the module.
    """
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            yield getattr(importlib.import_module(f"{package}.{module.name}"), attribute)
