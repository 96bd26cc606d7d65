"""What a head is worth to a loss: by its gate's gradient, its curvature, or its absence.

Labelled losses: ``gradient``, the mean over samples of ``|dL/dgate|`` (Michel et al. 2019). Where
the loss is agreement with the model itself that gradient is zero by construction; what is left is
``fisher``, the expected squared change of the output in the loss's own metric (Gauss-Newton, the
Fisher diagonal for KL), ``hessian``, the second derivative by differences, and ``ablation``, the
loss without the head, which is exact and needs no approximation at all.

On a runtime derivatives are central differences ``(L(1 + step) - L(1 - step)) / 2 step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mha_export.errors import InputError
from mha_export.heads.gates import Head
from mha_export.heads.scoring import Scorer

Floats = NDArray[np.float64]
Method = Literal["ablation", "gradient", "fisher", "hessian"]
METHODS: tuple[str, ...] = get_args(Method)
STEP = 2.0**-5


@dataclass(frozen=True, kw_only=True)
class Importance:
    """One number a head, and how it was found."""

    method: Method
    by: str
    values: dict[Head, float]

    def ranked(self) -> list[Head]:
        """Heads from the least to the most important."""
        return sorted(self.values, key=lambda head: (self.values[head], head))


def importance(
    scorer: Scorer, method: Method | None = None, *, heads: Sequence[Head] | None = None
) -> Importance:
    """Importance of every head (or of ``heads``) by differences on the runtime.

    ``method`` None: ``ablation`` for agreement, ``gradient`` for labels.

    Errors:
        InputError: ``gradient`` of an agreement, or ``fisher`` and ``hessian`` of labels.
    """
    agreement = scorer.measure.agreement
    method = method or ("ablation" if agreement else "gradient")
    check_method(method, agreement=agreement)
    heads = scorer.gated.heads if heads is None else heads
    base = scorer.losses()
    values = {}
    for head in heads:
        if method == "ablation":
            values[head] = float((scorer.losses([head]) - base).mean())
            continue
        above = scorer.outputs(at={head: 1.0 + STEP})
        below = scorer.outputs(at={head: 1.0 - STEP})
        if method == "fisher":
            slopes = [(a - b) / (2 * STEP) for a, b in zip(above, below, strict=True)]
            values[head] = _fisher(scorer, slopes)
        else:
            high, low = scorer.losses_of(above), scorer.losses_of(below)
            if method == "gradient":
                values[head] = float(np.abs((high - low) / (2 * STEP)).mean())
            else:
                values[head] = float(((high + low - 2 * base) / STEP**2).mean())
    by = "exact" if method == "ablation" else f"central differences of {STEP:g}"
    return Importance(method=method, by=by, values=values)


def check_method(method: Method, *, agreement: bool) -> None:
    """Whether the method says anything about such a loss.

    Errors:
        InputError: it does not.
    """
    if method == "gradient" and agreement:
        raise InputError(
            "the gradient of agreement with the model itself is zero at the model itself",
            fix="choose fisher, hessian or ablation, or a loss with labels",
        )
    if method in ("fisher", "hessian") and not agreement:
        raise InputError(
            f"{method} is for agreement with the model itself",
            fix="choose gradient or ablation for a loss with labels",
        )


def _fisher(scorer: Scorer, slopes: Sequence[Floats]) -> float:
    """``J^T M J`` with M the second derivative of the loss in the outputs, where it is zero.

    By the losses themselves: moved from the reference by a small ``t J`` the loss is
    ``t^2 / 2 J^T M J``, with no rounding of the runtime in it.
    """
    found = []
    for slope, reference, batch in zip(slopes, scorer.references, scorer.batches, strict=True):
        size = max(float(np.abs(slope).max(initial=0.0)), 1e-30)
        step = 1e-3 * max(1.0, float(np.abs(reference).max(initial=0.0))) / size
        ahead = scorer.measure.losses(np, reference + step * slope, reference, batch)
        behind = scorer.measure.losses(np, reference - step * slope, reference, batch)
        found.append((np.asarray(ahead) + np.asarray(behind)) / step**2)
    return float(np.concatenate(found).mean())
