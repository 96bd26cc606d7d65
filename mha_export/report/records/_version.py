"""Version of the JSON this package writes, and how an older file reads today.

``major.minor``: a minor step adds names; a major step changes or removes some, and then a function
in ``STEPS`` states how a file of the major before it reads in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mha_export.errors import InputError

SCHEMA_VERSION = "1.0"

Step = Callable[[dict[str, Any], str], dict[str, Any]]


def _from_0(data: dict[str, Any], kind: str) -> dict[str, Any]:
    """Major 0 held one export, ``export``, where 1 holds a list, ``exports``."""
    if kind == "results" and "exports" not in data and data.get("export") is not None:
        data = {**data, "exports": [data["export"]]}
        del data["export"]
    return data


STEPS: Mapping[int, Step] = {0: _from_0}
"""Major version to the function that turns its files into the next major's."""


def upgraded(data: dict[str, Any], kind: str, *, where: str) -> dict[str, Any]:
    """``data`` as this version states it.

    Args:
        data: the file as read.
        kind: schema name: ``results``, ``export``, ``doctor``, ``compare``.
        where: the file, for messages.

    Errors:
        InputError: no version is stated, or a later major version wrote it.
    """
    current = int(SCHEMA_VERSION.split(".")[0])
    major, minor = _parsed(data.get("schema_version"), where)
    if major > current:
        raise InputError(
            f"{where}: schema_version {major}.{minor} is later than {SCHEMA_VERSION}",
            fix="upgrade mha-export",
        )
    for step in range(major, current):
        data = STEPS[step](data, kind)
    if major < current:
        major, minor = current, 0
    data = {**data, "schema_version": f"{major}.{minor}"}
    for export in data.get("exports") or []:
        if isinstance(export, dict):
            export.update(upgraded(export, "export", where=where))
    if isinstance(data.get("doctor"), dict):
        data["doctor"] = upgraded(data["doctor"], "doctor", where=where)
    return data


def _parsed(version: object, where: str) -> tuple[int, int]:
    if isinstance(version, (int, float)) and not isinstance(version, bool):
        version = str(version)  # some writers state 1 or 1.0
    if isinstance(version, str):
        major, _, minor = version.partition(".")
        if major.isdigit() and (minor or "0").isdigit():
            return int(major), int(minor or "0")
    raise InputError(f"{where}: schema_version is {version!r}; expected major.minor, such as 1.0")
