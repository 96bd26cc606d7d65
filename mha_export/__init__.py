"""Attention that runs fast, and provably the same, on every kind of hardware.

The package is imported in well under a second: names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.errors import MhaExportError
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
    "MaskSpec": "mha_export.spec",
    "MhaExportError": "mha_export.errors",
    "ProjectionSpec": "mha_export.spec",
    "RotarySpec": "mha_export.spec",
}

__all__ = [
    "AttentionSpec",
    "CacheSpec",
    "CausalAlignment",
    "MaskSpec",
    "MhaExportError",
    "ProjectionSpec",
    "RotarySpec",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
