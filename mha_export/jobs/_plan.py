"""Which form each site of each target gets, when the caller has an opinion.

A plan is JSON: ``{"targets": {TARGET: {SITE: {"form": FORM, "params": {...}}}}}``; the site ``*``
stands for every site that is not named. ``tune`` writes one, and so can a person.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mha_export.errors import InputError
from mha_export.forms import form_named

ANY_SITE = "*"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The form chosen for a site, and what steers it."""

    form: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Choices by target and site."""

    choices: Mapping[str, Mapping[str, Planned]] = field(default_factory=dict)

    def of(self, target: str, site_id: str) -> Planned | None:
        sites = self.choices.get(target, {})
        return sites.get(site_id) or sites.get(ANY_SITE)


def read_plan(path: Path | None) -> Plan:
    """Read a plan file; no path is the empty plan.

    Errors:
        InputError: missing, not JSON, or not a plan; an unknown form.
    """
    if path is None:
        return Plan()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such plan file", fix="check the path of --plan") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}", fix="write it with tune") from None
    targets = document.get("targets") if isinstance(document, dict) else None
    if not isinstance(targets, dict):
        raise InputError(
            f"{path}: not a plan: expected an object with 'targets'",
            fix='for example {"targets": {"cpu": {"*": {"form": "onnx"}}}}',
        )
    return Plan(choices={target: _sites(path, target, sites) for target, sites in targets.items()})


def _sites(path: Path, target: str, sites: Any) -> dict[str, Planned]:
    if not isinstance(sites, dict):
        raise InputError(f"{path}: targets.{target}: expected an object of site ids")
    return {site: _planned(f"{path}: targets.{target}.{site}", row) for site, row in sites.items()}


def _planned(where: str, row: Any) -> Planned:
    if not isinstance(row, dict) or not isinstance(row.get("form"), str):
        raise InputError(f"{where}: expected an object with a 'form'")
    params = row.get("params", {})
    if not isinstance(params, dict):
        raise InputError(f"{where}.params: expected an object")
    form_named(row["form"])
    options = {name: value for name, value in params.items() if name != "opset"}
    return Planned(form=row["form"], options=options)
