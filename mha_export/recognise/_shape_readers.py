"""Shapes taken from inside an attention, taken from its operands instead.

An exporter sizes a bias by the shape of the scores it is added to. The bias is an operand and
outlives the scores, which must not live on only to be measured.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from mha_export.recognise._adapt import Part, partitioned
from mha_export.recognise._axes import View, identity
from mha_export.recognise._downstream import rearranged
from mha_export.recognise._draft import Draft
from mha_export.recognise._fit import Fitting, SizeUnknownError


def detach_shapes(fitting: Fitting, dead: set[ir.Node]) -> bool:
    """Give every Shape node that would keep the attention alive another source; whether any was."""
    changed = False
    for value, parts in _inside(fitting):
        for node, _ in list(value.uses()):
            if node.op_type == "Shape" and node not in dead:
                changed = _detach(node, value, parts, fitting) or changed
    return changed


def detach_caches(fitting: Fitting, dead: set[ir.Node]) -> bool:
    """The same for shapes of past and new keys together, which the attention is to make.

    A mask sized by them would be read by what makes them.
    """
    changed = False
    for name in ("key", "value"):
        past = fitting.draft.tensor(name).stage.past
        if past is None:
            continue

        def parts(name: str = name) -> list[Part] | None:
            own = fitting.draft.own(name)
            return fitting.parts(lambda d: whole_of(d, name), "bt", fitting.draft.kv_atoms, own)

        for value, view in rearranged(past.whole, fitting.scenes[0]):
            for node, _ in list(value.uses()):
                if node.op_type == "Shape" and node not in dead:
                    changed = _detach(node, value, parts, fitting, view) or changed
    return changed


def whole_of(draft: Draft, name: str) -> View:
    past = draft.tensor(name).stage.past
    assert past is not None
    return past.whole_view


def _inside(fitting: Fitting) -> list[tuple[ir.Value, Callable[[], list[Part] | None]]]:
    draft = fitting.draft
    found: list[tuple[ir.Value, Callable[[], list[Part] | None]]] = []

    def scores_at(value: ir.Value) -> Callable[[Draft], View]:
        return lambda d: d.scores.levels[value].view

    for value in draft.scores.levels:
        found.append((value, _parts(fitting, scores_at(value), "bst", 0)))
    if draft.scores.sink is None:
        start = draft.scores.start
        found.append((draft.anchor.probabilities, _parts(fitting, scores_at(start), "bst", 0)))
    weights = draft.weighted.product.left.value
    found.append((weights, _parts(fitting, lambda d: d.weighted.onto, "bst", 0)))
    output = draft.weighted.product.out
    found.append((output, _parts(fitting, lambda d: d.weighted.output, "bs", 1)))
    return found


def _parts(
    fitting: Fitting, view_of: Callable[[Draft], View], roles: str, own: int
) -> Callable[[], list[Part] | None]:
    return lambda: fitting.parts(view_of, roles, fitting.draft.roles.heads, own)


def _detach(
    node: ir.Node,
    value: ir.Value,
    parts: Callable[[], list[Part] | None],
    fitting: Fitting,
    view: View | None = None,
) -> bool:
    """``view``: of the value, over what ``parts`` move in; None: the value itself."""
    dims = fitting.scenes[0].dims(value)
    with fitting.before(node) as derive:
        known = parts()
        axes = None
        if dims is not None and known is not None:
            axes = partitioned((view or identity(value, dims)).axes, known)
        if dims is None or axes is None:
            return False
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(dims))
        try:
            shape = derive.exact_shape(axes[start:end])
        except SizeUnknownError:
            return False
        if isinstance(shape, np.ndarray):
            shape = derive("Identity", [shape])
    node.outputs[0].replace_all_uses_with(shape)
    graph = node.graph
    assert graph is not None
    graph.remove(node, safe=True)
    return True
