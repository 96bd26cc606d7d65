"""The main jobs as plain functions: the Python API, and all that the command line calls.

Names are loaded on first use, so that one job does not pay for the imports of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.jobs._head_work import HeadOptions
    from mha_export.jobs._progress import Progress
    from mha_export.jobs._result import JobResult
    from mha_export.jobs._settings import (
        ExportSettings,
        RunSettings,
        SourceSettings,
        Workload,
        split_settings,
    )
    from mha_export.jobs.build import build_graph, list_preset_rows
    from mha_export.jobs.bundle import BundleSettings, bundle_export
    from mha_export.jobs.check import check_source
    from mha_export.jobs.compare import compare_models
    from mha_export.jobs.export import export_model
    from mha_export.jobs.heads import analyse_heads
    from mha_export.jobs.inspect import inspect_model
    from mha_export.jobs.probing import doctor
    from mha_export.jobs.prune import PruneGoal, prune_model
    from mha_export.jobs.regroup import regroup_model
    from mha_export.jobs.report import write_report
    from mha_export.jobs.run import run_models
    from mha_export.jobs.tune import TuneSettings, tune_model
    from mha_export.jobs.verify import inspect_bundle, is_bundle, verify_bundle

_HOME_OF = {
    "BundleSettings": "bundle",
    "ExportSettings": "_settings",
    "HeadOptions": "_head_work",
    "JobResult": "_result",
    "Progress": "_progress",
    "PruneGoal": "prune",
    "RunSettings": "_settings",
    "SourceSettings": "_settings",
    "TuneSettings": "tune",
    "Workload": "_settings",
    "analyse_heads": "heads",
    "build_graph": "build",
    "bundle_export": "bundle",
    "check_source": "check",
    "compare_models": "compare",
    "doctor": "probing",
    "export_model": "export",
    "inspect_bundle": "verify",
    "inspect_model": "inspect",
    "is_bundle": "verify",
    "list_preset_rows": "build",
    "prune_model": "prune",
    "regroup_model": "regroup",
    "run_models": "run",
    "split_settings": "_settings",
    "tune_model": "tune",
    "verify_bundle": "verify",
    "write_report": "report",
}

__all__ = [
    "BundleSettings",
    "ExportSettings",
    "HeadOptions",
    "JobResult",
    "Progress",
    "PruneGoal",
    "RunSettings",
    "SourceSettings",
    "TuneSettings",
    "Workload",
    "analyse_heads",
    "build_graph",
    "bundle_export",
    "check_source",
    "compare_models",
    "doctor",
    "export_model",
    "inspect_bundle",
    "inspect_model",
    "is_bundle",
    "list_preset_rows",
    "prune_model",
    "regroup_model",
    "run_models",
    "split_settings",
    "tune_model",
    "verify_bundle",
    "write_report",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
