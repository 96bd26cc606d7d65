"""Whether an attention can be taken out of its graph: which nodes go, what else reads them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from mha_export.operands import Heads, Operands
from mha_export.recognise._axes import identity
from mha_export.recognise._draft import Draft
from mha_export.recognise._fit import Fitting
from mha_export.recognise._liveness import dying
from mha_export.recognise._mask_placing import is_natural, role_axes
from mha_export.recognise._scene import Scene
from mha_export.recognise._shape_readers import detach_caches, detach_shapes
from mha_export.recognise._site import Reason, Site
from mha_export.spec import AttentionSpec, QkOutput


def replaceable_site(fitting: Fitting, spec: AttentionSpec, operands: Operands) -> Site:
    """The site with its nodes, and the reason why it may not be replaced."""
    draft = fitting.draft
    assert draft.output is not None
    present = [h for h in (draft.key.present, draft.value.present) if h is not None]
    replaced = [draft.output.value, *(heads.value for heads in present)]
    kept = [value for _, value in operands.values()]
    nodes, dead = dying(replaced, kept)
    if not _inner(draft) <= dead and detach_shapes(fitting, dead):
        nodes, dead = dying(replaced, kept)
    fed_back = _fed_back(present, kept, dead)
    if fed_back is not None and detach_caches(fitting, dead):
        nodes, dead = dying(replaced, kept)
        fed_back = _fed_back(present, kept, dead)
    also: ir.Value | None = None
    for value, kind in () if _inner(draft) <= dead else _read_outside(fitting, spec, dead):
        more, gone = dying([*replaced, value], kept)
        if _inner(draft) <= gone and _operand_below([value], kept, gone) is None:
            nodes, dead, also = more, gone, value
            spec = spec.replace(qk_output=kind)
            break
    graph = draft.anchor.node.graph
    assert graph is not None
    return Site(
        id="",
        spec=spec,
        graph=graph,
        operands=operands,
        output=draft.output,
        anchor=draft.anchor.node,
        nodes=tuple(nodes),
        qk_output=also,
        present_key=draft.key.present,
        present_value=draft.value.present,
        cannot_replace=_hindrance(draft, dead) or fed_back,
    )


def _fed_back(present: list[Heads], kept: list[ir.Value], dead: set[ir.Node]) -> Reason | None:
    """An operand computed from the caches that the attention makes: it cannot do both."""
    value = _operand_below([heads.value for heads in present], kept, dead)
    if value is None:
        return None
    return Reason(
        code="operand-reads-cache",
        message=f"{value.name!r} is read by the attention and computed from the keys and "
        "values that the attention itself is to append",
        value=value.name,
    )


def _operand_below(
    made: list[ir.Value], kept: list[ir.Value], dead: set[ir.Node]
) -> ir.Value | None:
    """The first operand that what the attention makes is read for."""
    operands = set(kept)
    pending = list(made)
    seen = set(pending)
    while pending:
        value = pending.pop()
        if value in operands:
            return value
        for node, _ in value.uses():
            for output in () if node in dead else node.outputs:
                if output not in seen:
                    seen.add(output)
                    pending.append(output)
    return None


def _inner(draft: Draft) -> set[ir.Node]:
    return {draft.scores.product.node, draft.anchor.node, draft.weighted.product.node}


def _read_outside(
    fitting: Fitting, spec: AttentionSpec, dead: set[ir.Node]
) -> Iterator[tuple[ir.Value, QkOutput]]:
    """Score tensors [b, h, s, t] that something else reads and a form can give."""
    draft = fitting.draft
    if not is_natural(draft):
        yield from ((v, QkOutput.PROBABILITIES) for v in _taken_apart(draft, fitting.scenes[0]))
        return
    for value, kind in _inside(draft, spec):
        read = value.is_graph_output() or any(user not in dead for user, _ in value.uses())
        if read and kind is not None:
            yield value, kind


def _taken_apart(draft: Draft, scene: Scene) -> Iterator[ir.Value]:
    """Probabilities that a Reshape makes [b, h, s, t] where batch and heads are one axis."""
    weighted, probabilities = draft.weighted, draft.anchor.probabilities
    if weighted.zeroed or weighted.replaced is not None or draft.scores.sink is not None:
        return
    wanted = role_axes(identity(probabilities, draft.scores.space), draft)
    for value in dict.fromkeys(use.value for use in weighted.others):
        view = scene.views.of(value)
        if view is None or view.source is not probabilities or view.offset:
            continue
        if list(view.axes) == wanted:
            yield value


def _inside(draft: Draft, spec: AttentionSpec) -> Iterator[tuple[ir.Value, QkOutput | None]]:
    """Every value of scores and probabilities, and what a form would call it."""
    scores, weighted = draft.scores, draft.weighted
    for value, level in scores.levels.items():
        straight = level.view == identity(value, scores.space) and level.factor == 1.0
        straight = straight and not level.shifted
        over = scores.softcap is not None and not level.capped_below
        kind: QkOutput | None = None
        if straight and not scores.weightings:
            if level.terms_below == len(scores.terms):
                kind = QkOutput.CAPPED if over else QkOutput.RAW
            elif level.terms_below == 0 and not level.capped_below and spec.mask.fill == "-inf":
                kind = QkOutput.MASKED
        yield value, kind
    for value in weighted.path:
        whole = draft.scores.sink is None or value is not draft.anchor.probabilities
        last = value is weighted.product.left.value
        settled = last or not (weighted.zeroed or weighted.replaced is not None)
        straight = whole and settled and weighted.onto == identity(weighted.path[-1], scores.space)
        yield value, QkOutput.PROBABILITIES if straight else None


def _hindrance(draft: Draft, dead: set[ir.Node]) -> Reason | None:
    """The first intermediate that something else reads."""
    if _inner(draft) <= dead:
        return None
    for use in draft.weighted.others:
        reader = "it is a graph output" if use.node is None else f"{use.node.name!r} reads it too"
        return Reason(
            code="probabilities-used-elsewhere",
            message=f"the attention weights {use.value.name!r} are needed: {reader}",
            value=use.value.name,
            nodes=() if use.node is None else (use.node.name or use.node.op_type,),
        )
    for name, node in (
        ("scores", draft.scores.product.node),
        ("probabilities", draft.anchor.node),
        ("context", draft.weighted.product.node),
    ):
        if node not in dead:
            users = [user for user, _ in node.outputs[0].uses() if user not in dead]
            return Reason(
                code=f"{name}-used-elsewhere",
                message=f"the {name} {node.outputs[0].name!r} are read by something outside the "
                "attention",
                value=node.outputs[0].name,
                nodes=tuple(user.name or user.op_type for user in users),
            )
    return None
