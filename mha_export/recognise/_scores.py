"""From what softmax reads up to Q Kᵀ: the affine normal form of the scores.

``x = softcap(scale * Q Kᵀ) + sum of terms``, with keep masks where a Where puts a constant, found
by one law per op (:mod:`._score_laws`). Two graphs that compute the same scores in another order of
casts, reshapes and factors get the same normal form.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from mha_export.recognise._axes import Axis, View, composed, identity
from mha_export.recognise._product import Product, product_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_laws import LAWS
from mha_export.recognise._score_steps import Scores, State, refused
from mha_export.recognise._site import Reason


def read_scores(logits: ir.Value, axis: int, scene: Scene) -> Scores | Reason:
    """The normal form of ``logits``, or the first condition that failed on the way up."""
    dims = scene.dims(logits)
    if dims is None:
        return Reason(
            code="shape-unknown",
            message=f"the shape of {logits.name!r} depends on data: its sizes are unknown",
            value=logits.name,
        )
    state = State(
        value=logits,
        outer=identity(logits, dims),
        space=dims,
        axis=axis % len(dims),
        start=logits,
    )
    return _walk(state.noted(), scene)


def _walk(state: State, scene: Scene) -> Scores | Reason:
    while True:
        view = scene.views.of(state.value)
        if view is not None and view.source is not state.value:
            outer = composed(state.outer, view)
            if outer is None:
                return refused(
                    state, "scores-rearranged", "the scores are rearranged in a way that mixes axes"
                )
            state = dataclasses.replace(state, value=view.source, outer=outer).noted()
        product = product_of(state.value, scene.views)
        if product is not None:
            return _end(state, product)
        node = state.value.producer()
        law = None if node is None else LAWS.get(node.op_type)
        if node is None or law is None:
            made = "a graph input or constant" if node is None else f"{node.op_type}"
            return refused(
                state,
                "scores-not-a-product",
                f"what softmax reads comes from {made} ({state.value.name!r}), not from a product "
                "of queries and keys",
            )
        step = law(state, node, scene, _walk)
        if not isinstance(step, State):
            return step
        state = step


def _end(state: State, product: Product) -> Scores | Reason:
    """At the product: the operand that owns the softmax axis holds the keys."""
    for oriented in (product, product.swapped()):
        queries, keys = oriented.across(oriented.left), oriented.across(oriented.right)
        if queries is None or keys is None:
            break
        query, key = composed(state.outer, queries), composed(state.outer, keys)
        if query is None or key is None:
            break
        if _moves(key.axes[state.axis]) and not any(s for _, s in query.axes[state.axis]):
            summed_query, summed_key = (
                oriented.summed(oriented.left),
                oriented.summed(oriented.right),
            )
            return Scores(
                product=oriented,
                space=state.space,
                axis=state.axis,
                query=View(query.source, query.offset, (*query.axes, *summed_query)),
                key=View(key.source, key.offset, (*key.axes, *summed_key)),
                scale=state.factor * product.factor,
                softcap=state.softcap,
                terms=state.terms[::-1],
                weightings=state.weightings,
                sink=state.sink,
                steps=state.steps,
                summed=oriented.contracted,
                start=state.start,
                levels=dict(state.levels),
            )
    return refused(
        state,
        "softmax-axis",
        f"softmax runs over an axis of {product.out.name!r} that is not one operand's own: "
        "the keys are not what is normalised over",
    )


def _moves(axis: Axis) -> bool:
    """Whether every factor of the axis moves through the source (none is a broadcast)."""
    return all(stride != 0 for _, stride in axis)
