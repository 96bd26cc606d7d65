"""Attention that runs fast, and provably the same, on every kind of hardware.

The package is imported in well under a second: names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.errors import MhaExportError
    from mha_export.jobs import (
        ExportSettings,
        JobResult,
        RunSettings,
        SourceSettings,
        build_graph,
        check_source,
        compare_models,
        doctor,
        export_model,
        inspect_model,
        run_models,
        write_report,
    )
    from mha_export.spec import (
        AttentionSpec,
        CacheSpec,
        CausalAlignment,
        MaskSpec,
        ProjectionSpec,
        RotarySpec,
    )

__version__ = "0.1.0"

_HOME_OF = {
    "AttentionSpec": "mha_export.spec",
    "CacheSpec": "mha_export.spec",
    "CausalAlignment": "mha_export.spec",
    "ExportSettings": "mha_export.jobs",
    "JobResult": "mha_export.jobs",
    "MaskSpec": "mha_export.spec",
    "MhaExportError": "mha_export.errors",
    "ProjectionSpec": "mha_export.spec",
    "RotarySpec": "mha_export.spec",
    "RunSettings": "mha_export.jobs",
    "SourceSettings": "mha_export.jobs",
    "build_graph": "mha_export.jobs",
    "check_source": "mha_export.jobs",
    "compare_models": "mha_export.jobs",
    "doctor": "mha_export.jobs",
    "export_model": "mha_export.jobs",
    "inspect_model": "mha_export.jobs",
    "run_models": "mha_export.jobs",
    "write_report": "mha_export.jobs",
}

__all__ = [
    "AttentionSpec",
    "CacheSpec",
    "CausalAlignment",
    "ExportSettings",
    "JobResult",
    "MaskSpec",
    "MhaExportError",
    "ProjectionSpec",
    "RotarySpec",
    "RunSettings",
    "SourceSettings",
    "__version__",
    "build_graph",
    "check_source",
    "compare_models",
    "doctor",
    "export_model",
    "inspect_model",
    "run_models",
    "write_report",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
