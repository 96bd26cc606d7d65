"""Where an attention may be: every Softmax, and every exponential divided by its own sum.

A softmax is also ``exp(log_softmax(x))`` and ``exp(x - logsumexp(x))``. Exponentials that are
divided by their sum in any other way are no softmax, but want a verdict: :func:`is_like_softmax`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from mha_export.recognise._division import quotient
from mha_export.recognise._draft import Anchor
from mha_export.recognise._scene import Scene
from mha_export.recognise._shape_laws import Facts


def anchor_of(node: ir.Node, scene: Scene) -> Anchor | None:
    """The softmax that ``node`` is or completes, or None."""
    if node.domain not in ("", "ai.onnx", "com.microsoft"):
        return None
    if node.op_type == "Softmax":
        return _softmax(node, scene)
    if node.op_type in ("Div", "Mul"):
        return _decomposed(node, scene)
    if node.op_type == "Exp":
        return _from_logarithms(node, scene)
    return None


def is_like_softmax(node: ir.Node, scene: Scene) -> Anchor | None:
    """The exponentials that ``node`` sums, where that sum normalises them and no softmax is made.

    Or those that ``node`` divides, where they were summed by a contraction of another kind.

    ``e / (sum(e) + 1)``, ``e * m / sum(e * m)``, a product of ``e`` that is divided later, ...
    """
    found = quotient(node)
    if found is not None and found.sums.op_type != "ReduceSum":
        maker = found.powers.producer()
        assert maker is not None
        assert maker.inputs[0] is not None
        return Anchor(
            node=node,
            logits=maker.inputs[0],
            probabilities=found.powers,
            axis=-1,
            nodes=(maker, found.sums, node),
        )
    if node.op_type != "ReduceSum" or node.domain not in ("", "ai.onnx"):
        return None
    summed = node.inputs[0]
    exponential = None if summed is None else _exponential(summed)
    if exponential is None or exponential.inputs[0] is None or summed is None:
        return None
    axes = _reduced(node, scene, kept=False)
    powers = exponential.outputs[0]
    if not axes or _is_decomposed(powers, scene) or not _normalises(node):
        return None
    if all(user is node for user, _ in (*summed.uses(), *powers.uses()) if not _shapes(user)):
        return None
    return Anchor(
        node=node,
        logits=exponential.inputs[0],
        probabilities=powers,
        axis=axes[-1],
        nodes=(exponential, node),
    )


def _exponential(value: ir.Value) -> ir.Node | None:
    """The Exp that ``value`` is, perhaps masked or cast."""
    for _ in range(4):
        node = value.producer()
        if node is None or node.op_type == "Exp":
            return node
        if node.op_type not in ("Cast", "Identity", "Mul", "Where"):
            return None
        inner = [v for v in node.inputs if v is not None and _is_power(v)]
        if len(inner) != 1:
            return None
        value = inner[0]
    return None


def _is_power(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type in ("Cast", "Identity", "Mul", "Where", "Exp")


def _shapes(node: ir.Node) -> bool:
    return node.op_type in ("Shape", "Size")


def _is_decomposed(powers: ir.Value, scene: Scene) -> bool:
    """Whether a softmax is made of these exponentials already."""
    return any(
        user.op_type in ("Div", "Mul") and _decomposed(user, scene) is not None
        for user, _ in powers.uses()
    )


_ON_THE_WAY = frozenset(
    {"Add", "Cast", "Clip", "Expand", "Identity", "Max", "Mul", "Pow", "Reshape", "Squeeze", "Sub",
     "Sum", "Transpose", "Unsqueeze", "Where"}
)  # fmt: skip
"""What may be done to a sum before something is divided by it."""


def _normalises(node: ir.Node) -> bool:
    """Whether something is divided by the sum, a small number perhaps added to it."""
    pending = [(node.outputs[0], 4)]
    while pending:
        value, steps = pending.pop()
        for user, place in value.uses():
            if user.op_type == "Reciprocal" or (user.op_type == "Div" and place == 1):
                return True
            if steps and user.op_type in _ON_THE_WAY:
                pending.append((user.outputs[0], steps - 1))
    return False


def _from_logarithms(node: ir.Node, scene: Scene) -> Anchor | None:
    """``exp(log_softmax(x))``, or ``exp(x - logsumexp(x))``."""
    inner = node.inputs[0]
    maker = None if inner is None else inner.producer()
    if maker is None or maker.domain not in ("", "ai.onnx"):
        return None
    if maker.op_type == "LogSoftmax":
        found = _softmax(maker, scene)
        return None if found is None else _ending(found, node)
    if maker.op_type != "Sub" or maker.inputs[0] is None or maker.inputs[1] is None:
        return None
    summing = maker.inputs[1].producer()
    if summing is None or summing.op_type != "ReduceLogSumExp":
        return None
    axes = _reduced(summing, scene) if summing.inputs[0] is maker.inputs[0] else None
    if axes is None or len(axes) != 1:
        return None
    return Anchor(
        node=node,
        logits=maker.inputs[0],
        probabilities=node.outputs[0],
        axis=axes[0],
        nodes=(summing, maker, node),
    )


def _ending(anchor: Anchor, node: ir.Node) -> Anchor:
    """The softmax whose probabilities are the output of ``node``."""
    return dataclasses.replace(
        anchor, node=node, probabilities=node.outputs[0], nodes=(*anchor.nodes, node)
    )


def _softmax(node: ir.Node, scene: Scene) -> Anchor | None:
    logits = node.inputs[0]
    if logits is None:
        return None
    dims = scene.dims(logits)
    rank = len(dims) if dims is not None else None
    if opset_of(node) >= 13:
        axis = node.attributes.get_int("axis", -1)
    else:
        axis = node.attributes.get_int("axis", 1)
        if dims is not None and rank is not None:
            axis = _coerced_axis(axis % rank, dims)
    return Anchor(
        node=node,
        logits=logits,
        probabilities=node.outputs[0],
        axis=axis if rank is None else axis % rank,
        nodes=(node,),
    )


def _coerced_axis(axis: int, dims: tuple[int, ...]) -> int:
    """Before opset 13 Softmax ran over all axes from ``axis`` on; a lone one among units counts."""
    wide = [place for place in range(axis, len(dims)) if dims[place] != 1]
    if not wide:
        return len(dims) - 1
    return wide[0] if len(wide) == 1 else -1 - axis - len(dims)


def opset_of(node: ir.Node) -> int:
    """The version of the default domain that ``node`` is written for."""
    if node.version is not None:
        return node.version
    graph = node.graph
    version = None if graph is None else graph.opset_imports.get("")
    return 13 if version is None else version


def _decomposed(node: ir.Node, scene: Scene) -> Anchor | None:
    """``e / sum(e)`` or ``e * reciprocal(sum(e))`` with ``e = exp(x)``."""
    for exponential, total, extra in _quotients(node):
        maker = exponential.producer()
        if maker is None or maker.op_type != "Exp" or maker.inputs[0] is None:
            continue
        summing = total.producer()
        if summing is None or summing.op_type != "ReduceSum":
            continue
        if summing.inputs[0] is not exponential:
            continue
        axes = _reduced(summing, scene)
        if axes is None or len(axes) != 1:
            continue
        return Anchor(
            node=node,
            logits=maker.inputs[0],
            probabilities=node.outputs[0],
            axis=axes[0],
            nodes=(maker, summing, *extra, node),
        )
    return None


def _quotients(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]]:
    if len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return
    left, right = node.inputs
    assert left is not None
    assert right is not None
    if node.op_type == "Div":
        yield left, right, ()
        return
    for value, other in ((left, right), (right, left)):
        maker = other.producer()
        if maker is not None and maker.op_type == "Reciprocal" and maker.inputs[0] is not None:
            yield value, maker.inputs[0], (maker,)


def _reduced(node: ir.Node, scene: Scene, *, kept: bool = True) -> tuple[int, ...] | None:
    """The axes that are reduced; with ``kept`` only where they stay as axes of one."""
    source = node.inputs[0]
    dims = None if source is None else scene.dims(source)
    if dims is None or (kept and not node.attributes.get_int("keepdims", 1)):
        return None
    facts: Facts = scene.views.facts(node)
    axes = facts.steering(1, "axes")
    return None if axes is None else tuple(axis % len(dims) for axis in axes)
