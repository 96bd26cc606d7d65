"""How far from the exact answer a correct implementation may land, and the judgement of one.

An absolute tolerance means nothing here: two correct fp32 attentions differ by 1e-7 on small
logits and by 1e-2 on logits near 1e4. So each result is judged, row by row, against what plain
implementations *of the same precision* achieve on the same inputs::

    bound[b,h,s] = 2 * ensemble[b,h,s] + floor[b,h,s]

``ensemble`` is the worst error of several plain numpy attentions that differ only where
implementations legitimately do: the scale applied to the scores, to the queries, or split over
both; the order of accumulation; probabilities normalised before or after the product with the
values; softmax in the I/O dtype or in fp32. ``floor`` is a first-order forward error bound with
one rounding per intermediate and ``sqrt(n)`` for a sum of n; it keeps a lucky ensemble from
condemning an unlucky implementation.

The same primitive serves the proof of a rewrite and the parity of a target.
"""

from __future__ import annotations

from mha_export.bounds._bounds import (
    ErrorBounds,
    copy_floor,
    ensemble_error,
    error_bounds,
    forward_floor,
    problem_bounds,
    score_bounds,
    score_problem,
)
from mha_export.bounds._judge import IMPRECISE_FACTOR, Judgement, judge
from mha_export.bounds._plain import ScoreProblem, numpy_dtype, plain_outputs, unit_roundoff

__all__ = [
    "IMPRECISE_FACTOR",
    "ErrorBounds",
    "Judgement",
    "ScoreProblem",
    "copy_floor",
    "ensemble_error",
    "error_bounds",
    "forward_floor",
    "judge",
    "numpy_dtype",
    "plain_outputs",
    "problem_bounds",
    "score_bounds",
    "score_problem",
    "unit_roundoff",
]
