"""Over a whole model: prepare, look at it at concrete sizes, give every anchor a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from mha_export.evaluator import Evaluator
from mha_export.recognise._anchors import anchor_of, is_like_softmax
from mha_export.recognise._assemble import assemble
from mha_export.recognise._assignment import assignments
from mha_export.recognise._collection import collection_paused
from mha_export.recognise._division import divide_first
from mha_export.recognise._draft import Anchor, Draft, read_draft
from mha_export.recognise._evaluate import Context
from mha_export.recognise._finish import finished
from mha_export.recognise._fused_site import settled, with_rows
from mha_export.recognise._lengths import Lengths
from mha_export.recognise._movement import Views
from mha_export.recognise._other import is_matrix, is_of_pairs, other_softmax
from mha_export.recognise._prepare import prepared
from mha_export.recognise._probabilities import Use
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import (
    NotAttention,
    Reason,
    Recognition,
    Rejection,
    Site,
    Verdict,
)
from mha_export.recognise._stated import stated_sites
from mha_export.recognise._undivided import undivided
from mha_export.recognise._unrolled import stacked
from mha_export.recognise.fused import is_fused, read_fused


@collection_paused()
def recognise(model: ir.Model, *, evaluator: Evaluator | None = None) -> Recognition:
    """A verdict for every softmax and every fused attention of ``model``, in graph order.

    The model is not changed: verdicts speak of nodes and values of ``Recognition.model``, a copy
    in which functions are inlined and which may hold a few more nodes that derive operands.

    Args:
        model: any ONNX graph, functions and subgraphs included.
        evaluator: runs ops that have no numpy rule here; None: onnx's reference.
    """
    copy = prepared(model)
    context = Context(copy, evaluator=evaluator)
    passes = assignments(copy.graph)
    lengths = Lengths(passes)
    scenes = [
        Scene(shapes=shapes, views=Views(shapes), context=context, lengths=lengths)
        for shapes in passes
    ]
    divide_first(copy, scenes)
    context.prefer(scenes[0].shapes.sizes, scenes[0].shapes.known())
    verdicts: list[Verdict] = []
    stated = stated_sites(copy, scenes)
    for node in list(_all_nodes(copy.graph)):
        if node in stated:
            if stated[node] not in verdicts:
                verdicts.append(stated[node])
        elif is_fused(node):
            found = read_fused(node, context=context)
            verdicts.append(settled(found, scenes) if isinstance(found, Site) else found)
        elif (anchor := anchor_of(node, scenes[0])) is not None:
            verdicts.append(verdict(anchor, scenes))
        elif (anchor := is_like_softmax(node, scenes[0])) is not None:
            verdicts.append(_otherwise_normalised(anchor))
        elif (rejected := undivided(node, scenes[0])) is not None:
            verdicts.append(rejected)
    complete = finished(stacked(verdicts, scenes), scenes)
    for graph in copy.graphs():
        if not _is_in_order(graph):  # an operand derived late is measured by an earlier reader
            graph.sort()
    sizes = tuple(
        {name.replace(":", "."): size for name, size in scene.shapes.sizes.items()}
        for scene in scenes
    )
    return Recognition(model=copy, verdicts=complete, sizes=sizes)


def _is_in_order(graph: ir.Graph) -> bool:
    """Whether every node comes after those it reads."""
    passed: set[ir.Node] = set()
    for node in graph:
        makers = (value.producer() for value in node.inputs if value is not None)
        if any(maker.graph is graph and maker not in passed for maker in makers if maker):
            return False
        passed.add(node)
    return True


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    yield from graph.all_nodes()


def _otherwise_normalised(anchor: Anchor) -> Rejection:
    reason = Reason(
        code="normalised-otherwise",
        message=f"the exponentials {anchor.probabilities.name!r} are summed and divided by that "
        "sum, but not as softmax does (something is added to the sum, multiplied in between, or "
        "divided after another step)",
        value=anchor.probabilities.name,
        nodes=tuple(node.name or node.op_type for node in anchor.nodes),
    )
    return Rejection(id="", anchor=anchor.node, reason=reason)


def verdict(anchor: Anchor, scenes: Sequence[Scene], *, static: bool = True) -> Verdict:
    """What one softmax is."""
    first = scenes[0]
    drafts: list[Draft] = []
    for scene in scenes:
        found = read_draft(anchor, scene, static=static)
        if isinstance(found, Draft):
            drafts.append(found)
            continue
        uses = None if isinstance(found, Reason) else found
        other = other_softmax(anchor, uses, first)
        if other is not None:
            return NotAttention(id="", anchor=anchor.node, reason=other)
        return Rejection(id="", anchor=anchor.node, reason=_reason(anchor, found))
    if _is_linear(drafts[0], first):
        other = other_softmax(anchor, None, first)
        if other is not None:
            return NotAttention(id="", anchor=anchor.node, reason=other)
        if is_of_pairs(anchor.logits, first):
            return Rejection(id="", anchor=anchor.node, reason=_mixed(anchor))
    site = assemble(drafts, scenes)
    if isinstance(site, Reason):
        if any(draft.is_static for draft in drafts):
            return verdict(anchor, scenes, static=False)
        return Rejection(id="", anchor=anchor.node, reason=site)
    return with_rows(site, scenes)


def _is_linear(draft: Draft, scene: Scene) -> bool:
    """Whether the scores are a linear layer: a stored matrix in place of queries or keys."""
    product = draft.scores.product
    return any(is_matrix(scene.views.source(side.value)) for side in (product.left, product.right))


def _mixed(anchor: Anchor) -> Reason:
    return Reason(
        code="scores-mixed",
        message="a linear layer mixes the scores of queries and keys before softmax",
        value=anchor.logits.name,
        nodes=(anchor.node.name or anchor.node.op_type,),
    )


def _reason(anchor: Anchor, found: Reason | tuple[Use, ...]) -> Reason:
    if isinstance(found, Reason):
        return found
    return Reason(
        code="no-weighted-values",
        message=f"nothing multiplies values by the output of softmax {anchor.node.name!r}",
        value=anchor.probabilities.name,
        nodes=tuple(use.node.name or use.node.op_type for use in found if use.node is not None),
    )
