"""Rows without keys of an attention, where a Where on its output says what they get.

A form states a policy that its op does not have as ``Where(row has a key, output, other)``. Taken
for part of the attention only where the condition, evaluated beside the mask on masks of every
kind, is false in exactly the rows whose keys are all hidden, and ``other`` is zero, NaN or the mean
of all values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.operands import Heads, Layout
from mha_export.recognise._afterwards import HIDING, contents_of, is_hidden
from mha_export.recognise._axes import View, identity, reshaped
from mha_export.recognise._bind import Pattern
from mha_export.recognise._downstream import landings, readers_of
from mha_export.recognise._evaluate import SizedView
from mha_export.recognise._masks_canonical import Structure
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site
from mha_export.spec import CausalAlignment, EmptyRow

Bools = NDArray[np.bool_]

_LOOKS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A Where on the context: ``other`` in the rows where ``condition`` is false."""

    node: ir.Node
    layout: Layout
    condition: ir.Value
    other: ir.Value


def with_row_policy(site: Site, scenes: Sequence[Scene]) -> Site:
    """The site up to and with the Where that gives its empty rows their value, if there is one."""
    mask = site.spec.mask
    if not (mask.may_empty_a_row or mask.bias is not None) or mask.prefix or mask.documents:
        return site
    steps = [_step(site, scene) for scene in scenes]
    step = steps[0]
    if step is None or any(s is None or s.node is not step.node for s in steps):
        return site
    policy = _policy(site, step, scenes[0])
    if policy is None:
        return site
    output = dataclasses.replace(site.output, value=step.node.outputs[0], layout=step.layout)
    spec = site.spec.replace(mask=dataclasses.replace(mask, empty_row=policy))
    return dataclasses.replace(site, output=output, spec=spec)


def _step(site: Site, scene: Scene) -> _Step | None:
    """The Where that alone reads the context, in whatever layout it has come to."""
    places = landings(site.output.value, scene)
    if not places or places[-1].value.is_graph_output() or places[-1].cast:
        return None
    last = places[-1]
    users = readers_of(last.value)
    layout = _layout(site.output, last.view, scene)
    if len(users) != 1 or users[0].op_type != "Where" or layout in (None, Layout.BSM):
        return None
    condition, chosen, other = users[0].inputs
    if chosen is not last.value or condition is None or other is None:
        return None
    assert layout is not None
    return _Step(node=users[0], layout=layout, condition=condition, other=other)


def _layout(heads: Heads, view: View, scene: Scene) -> Layout | None:
    dims = scene.dims(heads.value)
    if dims is None:
        return None
    own: View | None = identity(heads.value, dims)
    if heads.layout is Layout.BSM:
        own = reshaped(own, (*dims[:2], heads.heads, heads.dim)) if own is not None else None
    pattern = None if own is None else Pattern.of(own, heads.layout)
    return None if pattern is None else pattern.layout(view)


def _policy(site: Site, step: _Step, scene: Scene) -> EmptyRow | None:
    number = scene.uniform(step.other)
    if number is None:
        policy = EmptyRow.UNIFORM if _is_mean(site, step, scene) else None
    elif number == 0.0:
        policy = EmptyRow.ZERO
    else:
        policy = EmptyRow.NAN if math.isnan(number) else None
    if policy is None:
        return None
    return policy if any(_is_of_empty_rows(site, step, scene, limit) for limit in HIDING) else None


def _is_of_empty_rows(site: Site, step: _Step, scene: Scene, limit: float) -> bool:
    """Whether the condition is false in the rows without keys alone, some of which were seen."""
    emptied = False
    for seed in range(_LOOKS):
        seen = _look(site, step, scene, seed, limit)
        if seen is None:
            return False
        empty, kept = seen
        if not np.array_equal(np.broadcast_to(~empty, kept.shape), kept):
            return False
        emptied = emptied or bool(empty.any())
    return emptied


def _look(
    site: Site, step: _Step, scene: Scene, seed: int, limit: float
) -> tuple[Bools, Bools] | None:
    """(no key is visible, the condition), both [b, h, s, 1 or e]."""
    asked = [value for value in _mask_values(site) if value is not None]
    contents = contents_of([*asked, step.condition], scene, seed)
    dims = scene.dims(step.node.outputs[0])
    if contents is None or dims is None:
        return None
    view = scene.context.sized(scene.shapes.sizes, contents)
    hidden, condition = _hidden(site, scene, view, limit), view.array(step.condition)
    if hidden is None or condition is None:
        return None
    kept = np.broadcast_to(condition, dims)
    if step.layout is Layout.BSHD:
        kept = np.moveaxis(kept, 1, 2)
    empty: Bools = np.all(hidden, axis=-1, keepdims=True)
    return empty, kept


def _mask_values(site: Site) -> tuple[ir.Value | None, ...]:
    operands = site.operands
    return (operands.key_padding, operands.keep, operands.bias, operands.kv_lengths)


def _hidden(site: Site, scene: Scene, view: SizedView, limit: float) -> Bools | None:
    """[b, h or 1, s, t]: what the mask of the site hides."""
    spec, operands = site.spec.mask, site.operands
    query, key = scene.dims(operands.query.value), scene.dims(operands.key.value)
    past = None if operands.past_key is None else scene.dims(operands.past_key.value)
    if query is None or key is None or (operands.past_key is not None and past is None):
        return None
    asked, met = query[_axis(operands.query)], key[_axis(operands.key)]
    kept = 0
    if past is not None and operands.past_key is not None:
        kept = past[_axis(operands.past_key)]
    keys = kept + met if site.spec.cache is None or site.spec.cache.growth == "concat" else kept
    arrays = [None if value is None else view.array(value) for value in _mask_values(site)]
    if any(a is None and v is not None for a, v in zip(arrays, _mask_values(site), strict=True)):
        return None
    padding, keep, bias, lengths = arrays
    if padding is not None and padding.shape != (query[0], keys):
        return None  # sizes at which the graph does not run
    structure = Structure(
        causal=spec.causal,
        left_window=spec.left_window,
        right_window=spec.right_window,
        block=spec.block,
    )
    starts = np.full(query[0], kept if spec.causal is not CausalAlignment.TOP_LEFT else 0)
    if spec.causal is CausalAlignment.BOTTOM_RIGHT and not kept:
        starts[:] = keys - asked
    if lengths is not None and spec.causal is not CausalAlignment.TOP_LEFT:
        starts = lengths - asked
    rules = np.stack([structure.pattern(asked, keys, int(n)) for n in starts])[:, None]
    if padding is not None:
        rules = rules & (padding != 0)[:, None, None, :]
    if lengths is not None:
        rules = rules & (np.arange(keys) < lengths[:, None])[:, None, None, :]
    hidden: Bools = ~rules
    for array in (keep, None if bias is None else ~is_hidden(bias, limit)):
        if array is not None:
            missing = keys - array.shape[-1]
            pads = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
            hidden = hidden | ~np.pad(array, pads)
    return hidden


def _axis(heads: Heads) -> int:
    return 2 if heads.layout is Layout.BHSD else 1


def _is_mean(site: Site, step: _Step, scene: Scene) -> bool:
    """Whether ``other`` is the mean of all values, of each head."""
    spec, operands = site.spec, site.operands
    random = np.random.default_rng(23)
    contents: dict[ir.Value, np.ndarray] = {}
    parts: list[np.ndarray] = []
    for heads in (operands.past_value, operands.value):
        if heads is None:
            continue
        dims = scene.dims(heads.value)
        if dims is None or (spec.cache is not None and spec.cache.growth != "concat"):
            return False
        array = random.standard_normal(dims)
        contents[heads.value] = array
        if heads.layout is Layout.BSM:
            array = array.reshape(*dims[:2], heads.heads, heads.dim)
        parts.append(array if heads.layout is Layout.BHSD else np.moveaxis(array, 1, 2))
    found = scene.context.sized(scene.shapes.sizes, contents, wide=True).array(step.other)
    mean = np.concatenate(parts, axis=2).mean(axis=2, keepdims=True)
    mean = np.repeat(mean, spec.q_heads // mean.shape[1], axis=1)
    if step.layout is Layout.BSHD:
        mean = np.moveaxis(mean, 1, 2)
    return found is not None and found.shape == mean.shape and np.allclose(found, mean)
