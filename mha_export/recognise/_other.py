"""Softmaxes that are no attention: what each of them is."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from mha_export.recognise._draft import Anchor
from mha_export.recognise._movement import moved_inputs
from mha_export.recognise._probabilities import Use
from mha_export.recognise._product import product_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason

_STEPS = 12
_CHOOSING = frozenset({"TopK", "ArgMax", "Multinomial", "NonMaxSuppression"})
_PASSED = frozenset(
    {"Cast", "Add", "Sub", "Mul", "Div", "Clip", "Max", "Min", "Where", "Identity", "Tanh", "Log"}
)
_LAYERS = frozenset({"Gemm", "Conv", "MatMulNBits"})
_TESTS = frozenset({"IsNaN", "IsInf", "Equal", "Not", "And", "Or"})
_REDUCTIONS = frozenset({"ReduceSum", "ReduceMean"})


def other_softmax(anchor: Anchor, uses: Iterable[Use] | None, scene: Scene) -> Reason | None:
    """What the softmax is when it is plainly no attention; None when that can't be said.

    ``uses`` is where its output goes, when no product of it was found; None: not looked at.
    """
    weight = _weights_of(anchor.logits, scene)
    above = _maker(anchor.logits, scene)
    readers = _readers(anchor.probabilities, uses)
    kinds = {node.op_type for node in readers}
    if (above is not None and above.op_type in _CHOOSING) or kinds & _CHOOSING:
        return _named(
            anchor, "router", "it weighs the choices of a TopK or ArgMax", [above, *readers]
        )
    if _reaches_output(anchor.probabilities):
        what = "classifier" if weight is not None or uses is not None else None
        if what is not None and not _multiplies(readers):
            return _named(anchor, what, "its output leaves the graph, no values are weighted", [])
    if weight is None and uses is None:
        return None
    if weight is not None and _multiplies(readers):
        if any(_sums(node) for node in readers) or any(n.op_type != "Mul" for n in readers):
            return _named(
                anchor,
                "pooling",
                f"its scores are a linear layer ({weight.name}), not queries times keys",
                readers,
            )
        return _named(
            anchor, "gate", f"it scales values by a linear layer ({weight.name})", readers
        )
    if weight is not None:
        return _named(
            anchor, "classifier", f"its scores are a linear layer ({weight.name})", readers
        )
    if _weigh_later(readers):
        return None
    if any(_sums(node) for node in readers):
        return _named(
            anchor, "pooling", "its weights are summed with values, by no product", readers
        )
    if readers:
        return _named(anchor, "matching", "its output weights no values", readers)
    return None


def _named(anchor: Anchor, kind: str, why: str, nodes: Iterable[ir.Node | None]) -> Reason:
    article = "a" if kind[0] not in "aeiou" else "an"
    shown = [anchor.node, *(node for node in nodes if node is not None)]
    return Reason(
        code=kind,
        message=f"softmax {anchor.node.name!r} is {article} {kind}: {why}",
        value=anchor.probabilities.name,
        nodes=tuple(dict.fromkeys(node.name or node.op_type for node in shown)),
    )


def _maker(value: ir.Value, scene: Scene) -> ir.Node | None:
    """The op that made the logits, casts and rearrangements passed."""
    for _ in range(_STEPS):
        value = scene.views.source(value)
        node = value.producer()
        if node is None or node.op_type != "Cast" or node.inputs[0] is None:
            return node
        value = node.inputs[0]
    return None


def _weights_of(value: ir.Value, scene: Scene) -> ir.Node | None:
    """The linear layer that makes the logits: a product with a stored matrix."""
    for _ in range(_STEPS):
        value = scene.views.source(value)
        node = value.producer()
        if node is None:
            return None
        if node.op_type in _LAYERS:
            given = node.inputs[0]
            return None if given is None or is_of_pairs(given, scene) else node
        product = product_of(value, scene.views)
        if product is not None:
            sides = (product.left.view.source, product.right.view.source)
            plain = [side for side in sides if not is_matrix(side)]
            return node if len(plain) == 1 and not is_of_pairs(plain[0], scene) else None
        if node.op_type not in _PASSED:
            return None
        inner = _varying(node, scene)
        if len(inner) > 1:
            if any(is_of_pairs(v, scene) for v in inner):
                return None
            return next(filter(None, (_weights_of(v, scene) for v in inner)), None)
        if not inner:
            return None
        value = inner[0]
    return None


def _varying(node: ir.Node, scene: Scene) -> list[ir.Value]:
    """Inputs that are neither one number nor stored."""
    given = [v for v in node.inputs if v is not None and scene.number(v) is None]
    return [v for v in given if not is_stored(v)]


def is_of_pairs(value: ir.Value, scene: Scene) -> bool:
    """Whether a value is made from a product of two activations: scores, which something mixes."""
    pending = [value]
    for _ in range(_STEPS):
        if not pending:
            return False
        current = scene.views.source(pending.pop())
        node = current.producer()
        if node is None:
            continue
        product = product_of(current, scene.views)
        if product is not None:
            sides = (product.left.view.source, product.right.view.source)
            plain = [side for side in sides if not is_matrix(side)]
            if len(plain) == 2 and not any(_is_weights(side, scene) for side in plain):
                return True
            pending.extend(plain[:1] if len(plain) == 1 else [])
        elif node.op_type in _LAYERS and node.inputs[0] is not None:
            pending.append(node.inputs[0])
        elif node.op_type in _PASSED:
            pending.extend(_varying(node, scene))
    return False


def is_stored(value: ir.Value) -> bool:
    """A weight: an initializer or Constant."""
    node = value.producer()
    if node is not None:
        return node.op_type in ("Constant", "DequantizeLinear") and all(
            v is None or is_stored(v) for v in node.inputs
        )
    return value.const_value is not None


def is_matrix(value: ir.Value) -> bool:
    """A stored weight of at most two axes, as linear layers have them."""
    if not is_stored(value):
        return False
    tensor = value.const_value
    if tensor is not None:
        return len(tensor.shape) <= 2
    return value.shape is None or len(value.shape) <= 2


def _readers(value: ir.Value, uses: Iterable[Use] | None) -> list[ir.Node]:
    """Nodes that read the probabilities, casts and rearrangements passed."""
    if uses is not None:
        found = [use.node for use in uses if use.node is not None]
        if found:
            return found
    readers: list[ir.Node] = []
    pending = [value]
    for _ in range(64):
        if not pending:
            break
        current = pending.pop()
        for node, _place in current.uses():
            output = node.outputs[0]
            if node.op_type == "Cast" or moved_inputs(output) == (current,):
                pending.extend(node.outputs)
            else:
                readers.append(node)
    return readers


def _multiplies(nodes: Iterable[ir.Node]) -> bool:
    return any(node.op_type in ("Mul", "MatMul", "Einsum", "Gemm") for node in nodes)


def _sums(node: ir.Node) -> bool:
    """A Mul whose result is summed over an axis."""
    return node.op_type == "Mul" and any(
        user.op_type in _REDUCTIONS for user, _ in node.outputs[0].uses()
    )


def _is_weights(value: ir.Value, scene: Scene) -> bool:
    """Whether a value is a softmax's output, scaled or guarded: its product is a context."""
    for _ in range(_STEPS):
        value = scene.views.source(value)
        node = value.producer()
        if node is None or node.op_type in ("Softmax", "Exp"):
            return node is not None
        inner = _varying(node, scene) if node.op_type in _PASSED else []
        if not inner:
            return False
        value = inner[-1]
    return False


def _weigh_later(nodes: Iterable[ir.Node]) -> bool:
    """Whether what elementwise ops make of the probabilities is one side of a product."""
    pending = list(nodes)
    seen = set(pending)
    for _ in range(64):
        if not pending:
            return False
        node = pending.pop()
        if node.op_type in ("MatMul", "Einsum"):
            return True
        if node.op_type in _PASSED or node.op_type in _TESTS or node.op_type in _REDUCTIONS:
            following = {user for value in node.outputs for user, _ in value.uses()} - seen
            seen |= following
            pending.extend(following)
    return False


def _reaches_output(value: ir.Value) -> bool:
    pending = [value]
    for _ in range(64):
        if not pending:
            return False
        current = pending.pop()
        if current.is_graph_output():
            return True
        for node, _ in current.uses():
            if node.op_type in ("Cast", "Identity") or moved_inputs(node.outputs[0]) == (current,):
                pending.extend(node.outputs)
    return False
