"""Where an attention may be: every Softmax, and every exponential divided by its own sum."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

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
    return None


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


def _reduced(node: ir.Node, scene: Scene) -> tuple[int, ...] | None:
    source = node.inputs[0]
    dims = None if source is None else scene.dims(source)
    if dims is None or not node.attributes.get_int("keepdims", 1):
        return None
    facts: Facts = scene.views.facts(node)
    axes = facts.steering(1, "axes")
    return None if axes is None else tuple(axis % len(dims) for axis in axes)
