"""One file per target. A file that defines ``TARGET`` is found by itself.

Nothing here imports a runtime: that happens inside a target, when it is asked to do something. The
names below are loaded on first use, so that a worker process starts in a moment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.targets._capabilities import (
        Capabilities,
        Capability,
        capabilities_for,
        capabilities_from_json,
    )
    from mha_export.targets._evaluator import EvaluationError, WorkerEvaluator, evaluator_of
    from mha_export.targets._features import FEATURES, features_of
    from mha_export.targets._probe import probe
    from mha_export.targets._registry import (
        TargetRequest,
        all_targets,
        parse_target,
        parse_targets,
        target_named,
    )
    from mha_export.targets._target import (
        Artifact,
        Availability,
        Available,
        CannotRun,
        CompileOptions,
        Placement,
        Program,
        Session,
        State,
        Target,
        Unavailable,
    )
    from mha_export.targets._target_worker import Loaded, TargetWorker
    from mha_export.targets._worker import Job, Limits, Outcome, Worker, WorkerError, isolated

_MEMBERS = {
    "_capabilities": (
        "Capabilities",
        "Capability",
        "capabilities_for",
        "capabilities_from_json",
    ),
    "_evaluator": (
        "EvaluationError",
        "WorkerEvaluator",
        "evaluator_of",
    ),
    "_features": (
        "FEATURES",
        "features_of",
    ),
    "_probe": ("probe",),
    "_registry": (
        "TargetRequest",
        "all_targets",
        "parse_target",
        "parse_targets",
        "target_named",
    ),
    "_target": (
        "Artifact",
        "Availability",
        "Available",
        "CannotRun",
        "CompileOptions",
        "Placement",
        "Program",
        "Session",
        "State",
        "Target",
        "Unavailable",
    ),
    "_target_worker": (
        "Loaded",
        "TargetWorker",
    ),
    "_worker": (
        "Job",
        "Limits",
        "Outcome",
        "Worker",
        "WorkerError",
        "isolated",
    ),
}
_HOME_OF = {name: module for module, names in _MEMBERS.items() for name in names}

__all__ = [
    "FEATURES",
    "Artifact",
    "Availability",
    "Available",
    "CannotRun",
    "Capabilities",
    "Capability",
    "CompileOptions",
    "EvaluationError",
    "Job",
    "Limits",
    "Loaded",
    "Outcome",
    "Placement",
    "Program",
    "Session",
    "State",
    "Target",
    "TargetRequest",
    "TargetWorker",
    "Unavailable",
    "Worker",
    "WorkerError",
    "WorkerEvaluator",
    "all_targets",
    "capabilities_for",
    "capabilities_from_json",
    "evaluator_of",
    "features_of",
    "isolated",
    "parse_target",
    "parse_targets",
    "probe",
    "target_named",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
