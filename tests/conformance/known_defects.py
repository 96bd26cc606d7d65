"""Runtimes that are known to be wrong, each with what triggers it and what it does instead.

A conformance test expects a listed defect to show: one that a newer runtime has mended fails the
test, and its line goes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One runtime's defect.

    Attributes:
        runtime: ``cpu`` (ONNX Runtime) or ``reference`` (ONNX's evaluator).
        form: the form that meets it. opsets: at which it does.
        features: names in :data:`features.FEATURES` that trigger it.
        symptom: found in what the comparison says.
        reason: what the runtime does, in words.
    """

    runtime: str
    form: str
    opsets: tuple[int, ...]
    features: tuple[str, ...]
    symptom: str
    reason: str


DEFECTS = (
    Defect(
        runtime="cpu",
        form="onnx",
        opsets=(23, 24),
        features=("scores-masked", "scores-masked-keep"),
        symptom="NaN or infinite on one side only",
        reason="ONNX Runtime 1.32 writes its dtype's minimum where the masked scores are -inf",
    ),
    Defect(
        runtime="reference",
        form="onnx",
        opsets=(23, 24, 25),
        features=("scores-raw",),
        symptom="times the bound",
        reason="onnx 1.23's evaluator returns capped scores for mode 0 when there is a softcap",
    ),
)


def known_defect(runtime: str, form: str, opset: int, feature: str) -> Defect | None:
    """The listed defect a run must show, or None."""
    for defect in DEFECTS:
        here = defect.runtime == runtime and defect.form == form and opset in defect.opsets
        if here and feature in defect.features:
            return defect
    return None
