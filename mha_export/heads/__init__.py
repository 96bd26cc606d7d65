"""Heads one by one: what each does, what it is worth, and models without it.

Heads are independent: a layer's output is the sum over heads of ``context_i W_O,i``. That makes
analysis and surgery by head exact. Everything starts from :func:`head_model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.heads._layers import HeadModel, Layer, head_model
    from mha_export.heads.gates import GatedModel, with_gates
    from mha_export.heads.importance import Importance
    from mha_export.heads.regrouping import Regrouped, regroup
    from mha_export.heads.surgery import Pruned, prune

_HOME_OF = {
    "GatedModel": "gates",
    "HeadModel": "_layers",
    "Importance": "importance",
    "Layer": "_layers",
    "Pruned": "surgery",
    "Regrouped": "regrouping",
    "head_model": "_layers",
    "prune": "surgery",
    "regroup": "regrouping",
    "with_gates": "gates",
}

__all__ = [
    "GatedModel",
    "HeadModel",
    "Importance",
    "Layer",
    "Pruned",
    "Regrouped",
    "head_model",
    "prune",
    "regroup",
    "with_gates",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
