"""A learned scale of the scores, moved onto the queries.

``w * (q . k) = (w q) . k`` wherever ``w`` does not vary over the keys; a rotation and a number
commute with it, a normalisation does not (no stage above one is used then).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mha_export.operands import Heads, Layout
from mha_export.recognise._axes import View
from mha_export.recognise._draft import Draft
from mha_export.recognise._fit import Fitting
from mha_export.recognise._mask_placing import placed_value
from mha_export.recognise._score_steps import Weighting
from mha_export.recognise._site import Reason


def with_weightings(fitting: Fitting) -> Draft | Reason:
    """The draft with its query multiplied by every weighting of the scores."""
    draft = fitting.draft
    heads = draft.query.heads
    assert heads is not None
    heads = _by_heads(heads, fitting)
    for place, weighting in enumerate(draft.scores.weightings):
        factor = placed_value(
            weighting,
            _level_view(place),
            fitting,
            keys=False,
        )
        if factor is None:
            return _refused(weighting)
        op_type = "Div" if weighting.inverse else "Mul"
        heads = dataclasses.replace(heads, value=fitting.derive(op_type, [heads.value, factor]))
        dtype = fitting.scenes[0].dtype(weighting.level)
        if heads.value.dtype is None and dtype is not None:
            heads.value.dtype = dtype
    return fitting.replaced(query=dataclasses.replace(draft.query, heads=heads))


def _level_view(place: int) -> Callable[[Draft], View]:
    return lambda draft: draft.scores.weightings[place].level_view


def _by_heads(heads: Heads, fitting: Fitting) -> Heads:
    """The query as [b, h, s, d]."""
    value = heads.value
    if heads.layout is Layout.BSM:
        shape = np.array([0, 0, heads.heads, heads.dim], np.int64)
        value = fitting.derive("Reshape", [value, shape])
    if heads.layout is not Layout.BHSD:
        value = fitting.derive("Transpose", [value], {"perm": [0, 2, 1, 3]})
    return dataclasses.replace(heads, value=value, layout=Layout.BHSD)


def _refused(weighting: Weighting) -> Reason:
    return Reason(
        code="learned-scale",
        message=f"the scores are multiplied by {weighting.value.name!r}, which can't be laid out "
        "over the queries",
        value=weighting.value.name,
        nodes=(weighting.node.name or weighting.node.op_type,),
    )
