"""Runtimes that are known to be wrong, each with what triggers it and what it does instead.

A conformance test expects a listed defect to show: one that a newer runtime has mended fails the
test, and its line goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mha_export.spec import AttentionSpec, QkOutput


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One runtime's defect.

    Attributes:
        runtime: ``cpu`` (ONNX Runtime) or ``reference`` (ONNX's evaluator).
        form: the form that meets it. opsets: at which it does.
        triggers: whether a spec meets it.
        example: a name in :data:`features.FEATURES` that does.
        symptom: found in what the comparison says.
        reason: what the runtime does, in words.
    """

    runtime: str
    form: str
    opsets: tuple[int, ...]
    triggers: Callable[[AttentionSpec], bool]
    example: str
    symptom: str
    reason: str


DEFECTS = (
    Defect(
        runtime="cpu",
        form="onnx",
        opsets=(23, 24),
        triggers=lambda spec: (
            spec.qk_output is QkOutput.MASKED and spec.mask.hides_keys and spec.mask.fill == "-inf"
        ),
        example="scores-masked",
        symptom="NaN or infinite on one side only",
        reason="ONNX Runtime 1.32 writes its dtype's minimum where the masked scores are -inf",
    ),
    Defect(
        runtime="reference",
        form="onnx",
        opsets=(23, 24, 25),
        triggers=lambda spec: spec.qk_output is QkOutput.RAW and spec.softcap is not None,
        example="scores-raw",
        symptom="times the bound",
        reason="onnx 1.23's evaluator returns capped scores for mode 0 when there is a softcap",
    ),
)


def known_defect(runtime: str, form: str, opset: int, spec: AttentionSpec) -> Defect | None:
    """The listed defect that a spec meets there, or None."""
    for defect in DEFECTS:
        here = defect.runtime == runtime and defect.form == form and opset in defect.opsets
        if here and defect.triggers(spec):
            return defect
    return None
