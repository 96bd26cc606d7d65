"""Exponentials of scores that weigh values, where no division is seen that makes a softmax of them.

They want a verdict too: the sum may be made in a way that no law here knows.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_export.recognise._anchors import anchor_of, is_like_softmax
from mha_export.recognise._draft import Anchor
from mha_export.recognise._movement import moved_inputs
from mha_export.recognise._other import is_matrix
from mha_export.recognise._product import product_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Scores
from mha_export.recognise._scores import read_scores
from mha_export.recognise._site import Reason, Rejection

_FAR = 8
"""Nodes that may lie between exponentials and what they weigh, or what divides them."""


def undivided(node: ir.Node, scene: Scene) -> Rejection | None:
    """The verdict on the exponentials that ``node`` makes, or None where they are no such ones."""
    logits, powers = node.inputs[0] if node.inputs else None, node.outputs[0]
    dims = None if logits is None else scene.dims(logits)
    if node.op_type != "Exp" or node.domain not in ("", "ai.onnx") or logits is None:
        return None
    if dims is None or len(dims) < 3 or not _weighs(powers, scene) or _is_known(node, scene):
        return None
    if not any(_are_scores(logits, axis, scene) for axis in (len(dims) - 1, len(dims) - 2)):
        return None
    reason = Reason(
        code="not-normalised",
        message=f"the exponentials {powers.name!r} of queries times keys weigh values, but no "
        "division by their sum is seen: a fused attention weighs with softmax alone",
        value=powers.name,
        nodes=(node.name or node.op_type,),
    )
    return Rejection(id="", anchor=node, reason=reason)


def _are_scores(logits: ir.Value, axis: int, scene: Scene) -> bool:
    found = read_scores(logits, axis, scene)
    if not isinstance(found, Scores):
        return False
    sides = (found.product.left, found.product.right)
    return not any(is_matrix(scene.views.source(side.value)) for side in sides)


def _weighs(powers: ir.Value, scene: Scene) -> bool:
    """Whether the exponentials, moved, masked or cast at most, are multiplied with a tensor."""
    pending = [(powers, _FAR)]
    while pending:
        value, steps = pending.pop()
        for user, _ in value.uses():
            product = product_of(user.outputs[0], scene.views)
            if product is not None:
                sides = [side.value for side in (product.left, product.right)]
                others = [side for side in sides if side is not value]
                if others and not is_matrix(scene.views.source(others[0])):
                    return True
            elif steps and _goes_on(user, value):
                pending.append((user.outputs[0], steps - 1))
    return False


def _goes_on(user: ir.Node, value: ir.Value) -> bool:
    moves = value in moved_inputs(user.outputs[0])
    return moves or user.op_type in ("Cast", "Identity", "Mul", "Where")


def _is_known(node: ir.Node, scene: Scene) -> bool:
    """Whether a softmax, or what is like one, is made of the exponentials."""
    seen: set[ir.Node] = set()
    pending = [(node.outputs[0], _FAR)]
    while pending:
        value, steps = pending.pop()
        for user, _ in value.uses():
            if user in seen:
                continue
            seen.add(user)
            found: Anchor | None = anchor_of(user, scene) or is_like_softmax(user, scene)
            if found is not None and node in found.nodes:
                return True
            if steps:
                pending += [(output, steps - 1) for output in user.outputs]
    return anchor_of(node, scene) is not None
