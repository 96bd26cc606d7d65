"""Where two models first part: the site, and in it the stage.

Both models are run on one failing input by copies that also give the values of each attention
(:mod:`mha_export.measure._watch`). Site by site, in graph order, each value is judged like a model
output. Within a site the order of stages is projection, rotary, scores, mask, softmax, output.
What both state as a spec is compared as well: it says *what* differs (``scale 0.25, not 0.125``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from mha_export.measure._plain_ort import PlainOrt
from mha_export.measure._watch import Watched, in_layout_of, watched_values, with_watched
from mha_export.measure.model_inputs import ModelCase
from mha_export.measure.parity import compare_output
from mha_export.measure.reference_run import Expected, ModelReference
from mha_export.recognise import Recognition, Site, Verdict
from mha_export.report.records import CaseRecord, DifferenceRecord, SitePairRecord

STAGES = ("projection", "rotary", "scores", "mask", "softmax", "output")

_STAGE_OF = {
    "rotary": "rotary",
    "qk_norm": "rotary",
    "scale": "scores",
    "softcap": "scores",
    "q_heads": "projection",
    "kv_heads": "projection",
    "head_dim": "projection",
    "v_head_dim": "output",
    "causal": "mask",
    "left_window": "mask",
    "right_window": "mask",
    "mask": "mask",
    "fill": "mask",
    "empty_row": "mask",
    "sinks": "softmax",
    "cross": "projection",
    "kv_source": "projection",
    "combine": "output",
}
"""Stage that each field of a spec belongs to; precision and dimensions are no difference."""


def pair_sites(a: Recognition, b: Recognition) -> tuple[tuple[Verdict | None, Verdict | None], ...]:
    """Verdicts that stand for each other: by id where both use the same ids, else by order."""
    left = {v.id: v for v in a.verdicts}
    right = {v.id: v for v in b.verdicts}
    if left.keys() == right.keys():
        return tuple((left[key], right[key]) for key in left)
    ours = [v for v in a.verdicts if v.verdict != "not_attention"]
    theirs = [v for v in b.verdicts if v.verdict != "not_attention"]
    return tuple(zip_longest(ours, theirs))


def first_difference(
    a: Recognition, b: Recognition, case: ModelCase
) -> tuple[DifferenceRecord | None, tuple[SitePairRecord, ...]]:
    """The first site and stage where ``b`` departs from ``a`` on ``case``, and every pair.

    None where every site agrees: the difference then lies outside the attentions, or in the
    runtime rather than in the graphs.
    """
    seen = watched_values(a), watched_values(b)
    reference = ModelReference(with_watched(a, seen[0]))
    expected = reference.expected(case)
    actual = _values(with_watched(b, seen[1]), case)
    if expected.problem is not None or actual is None:
        return None, ()
    first: DifferenceRecord | None = None
    pairs = []
    for left, right in pair_sites(a, b):
        pair = _pair(left, right, seen, expected, actual)
        pairs.append(pair)
        if first is None and pair.status in ("different", "unmatched"):
            first = DifferenceRecord(
                site=pair.a or pair.b or "",
                stage=pair.stage or "output",
                message=pair.message or "the values differ",
                max_abs=pair.max_abs,
                bound=pair.bound,
                case=case.name,
            )
    return first, tuple(pairs)


def _values(model: Any, case: ModelCase) -> Mapping[str, np.ndarray] | None:
    """Watched values of the other model: in float64, else unoptimised; None where neither runs."""
    found = ModelReference(model, seeds=()).expected(case)
    if found.problem is None:
        return {name: bounds.exact for name, bounds in found.outputs.items()}
    plain = PlainOrt.of(model)
    return None if plain is None else plain.run(case.inputs)


def _pair(
    left: Verdict | None,
    right: Verdict | None,
    seen: tuple[Mapping[str, tuple[Watched, ...]], Mapping[str, tuple[Watched, ...]]],
    expected: Expected,
    actual: Mapping[str, np.ndarray],
) -> SitePairRecord:
    if left is None or right is None:
        here, there = (left, "second") if left is not None else (right, "first")
        assert here is not None
        return SitePairRecord(
            a=None if left is None else left.id,
            b=None if right is None else right.id,
            status="unmatched",
            message=f"the {there} model has no attention that stands for it",
        )
    ours = {w.label: w for w in seen[0].get(left.id, ())}
    theirs = {w.label: w for w in seen[1].get(right.id, ())}
    labels = [label for label in ours if label in theirs]
    compared = False
    for label in labels:
        record = _judged(ours[label], theirs[label], expected, actual)
        if record is None:
            continue
        compared = True
        if record.status not in ("pass", "imprecise") and not _made_up(label, left, right, record):
            stage, message = _explained(ours[label].stage, label, left, right, record)
            return SitePairRecord(
                a=left.id,
                b=right.id,
                status="different",
                stage=stage,
                max_abs=record.max_abs,
                bound=record.bound,
                message=message,
            )
    if compared:
        return SitePairRecord(a=left.id, b=right.id, status="equal")
    message = "no value of it can be computed apart"
    return SitePairRecord(a=left.id, b=right.id, status="not_compared", message=message)


def _judged(
    ours: Watched, theirs: Watched, expected: Expected, actual: Mapping[str, np.ndarray]
) -> CaseRecord | None:
    bounds, array = expected.outputs.get(ours.value), actual.get(theirs.value)
    if bounds is None or array is None:
        return None
    try:
        array = in_layout_of(array, theirs.heads, ours.heads)
    except ValueError:  # other heads: the spec says so, and the shapes differ
        return CaseRecord(name="", status="fail", message="the shapes differ")
    if array.shape != bounds.exact.shape and array.size == bounds.exact.size:
        array = array.reshape(bounds.exact.shape)
    if array.shape != bounds.exact.shape and ours.stage in ("rotary", "mask", "softmax"):
        return None  # another way to lay out a table or a group of heads is no difference
    return compare_output("", ours.label, bounds, array)


def _made_up(label: str, left: Verdict, right: Verdict, record: CaseRecord) -> bool:
    """Queries or keys off by a factor that the other scale makes up for are no difference."""
    if label not in ("query", "key") or not (isinstance(left, Site) and isinstance(right, Site)):
        return False
    return left.spec.effective_scale != right.spec.effective_scale and (
        record.cosine is not None and record.cosine > 1.0 - 1e-6
    )


def _explained(
    stage: str, label: str, left: Verdict, right: Verdict, record: CaseRecord
) -> tuple[str, str]:
    """The stage, moved forward to the first that the specs say differs, and the reason in words."""
    differences = list(spec_differences(left, right))
    earlier = [d for d in differences if STAGES.index(d[0]) <= STAGES.index(stage)]
    detail = record.message or "the values differ"
    if earlier:
        first = min(earlier, key=lambda found: STAGES.index(found[0]))
        return first[0], f"{first[1]}; {label}: {detail}"
    if stage == "mask" and not differences:
        return "scores", f"{label}: {detail}"
    return stage, f"{label}: {detail}"


def spec_differences(left: Verdict, right: Verdict) -> Iterator[tuple[str, str]]:
    """(stage, words) for each field in which two sites' specs differ."""
    if not (isinstance(left, Site) and isinstance(right, Site)):
        if right.verdict != left.verdict:
            other = right if not isinstance(right, Site) else left
            reason = getattr(other, "reason", None)
            words = reason.message if reason is not None else other.verdict
            yield "scores", f"one is an attention, the other is not: {words}"
        return
    a, b = left.spec.to_json(), right.spec.to_json()
    for name, stage in _STAGE_OF.items():
        if not _same(a[name], b[name]):
            yield stage, f"{name.replace('_', ' ')} is {_text(b[name])}, not {_text(a[name])}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-5 * max(abs(a), abs(b))
    return bool(a == b)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(map(str, value.values()))
    if isinstance(value, list):
        return " and ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
