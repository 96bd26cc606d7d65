"""Where the new tokens are in the result of each op that treats every token by itself.

A rule takes a :class:`~mha_export.caches._step.Step` and returns one state for each output: the
axis of the new tokens, or None where the output is what it would be with all of them. An op that
has no rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mha_export.caches._edits import Rows
from mha_export.caches._shape_rules import SHAPE_RULES
from mha_export.caches._step import Step, aligned
from mha_export.recognise._evaluate_contents import ELEMENTWISE

States = Sequence[Rows | None]
Rule = Callable[[Step], States]


def elementwise(step: Step) -> States:
    """Broadcasting: Add, Where, Cast, activations."""
    return [aligned(step, range(len(step.node.inputs)))]


def first_elementwise(step: Step) -> States:
    """Ops whose other inputs are weights or settings of each channel: the first decides."""
    return [step.only_first()]


def _over(step: Step, default: int) -> Rows:
    """The state of an op along ``axis`` alone."""
    state = step.only_first()
    if step.axis("axis", default, step.rank(0)) == state.axis:
        step.mixed("works along the axis of the tokens")
    return state


def along_last(step: Step) -> States:
    return [_over(step, -1) for _ in step.node.outputs]


def norm(step: Step) -> States:
    """Normalisations from ``axis`` on."""
    state = step.only_first()
    if state.axis >= step.axis("axis", -1, step.rank(0)):
        step.mixed("normalises over the tokens")
    return [state, *[None for _ in step.node.outputs[1:]]]


def reduction(step: Step) -> States:
    state, rank = step.only_first(), step.rank(0)
    axes = step.numbers(1)
    if axes is None and "axes" in step.attributes:
        found = [int(axis) for axis in step.attributes["axes"]]
    elif axes is None:
        found = [] if step.attributes.get("noop_with_empty_axes", 0) else list(range(rank))
    else:
        found = [int(axis) for axis in axes.reshape(-1)]
    reduced = {axis % rank for axis in found}
    return [_reduced(step, state, reduced)]


def extreme(step: Step) -> States:
    """ArgMax and ArgMin."""
    return [_reduced(step, step.only_first(), {step.axis("axis", 0, step.rank(0))})]


def _reduced(step: Step, state: Rows, axes: set[int]) -> Rows:
    if state.axis in axes:
        step.mixed("reduces over the tokens")
    if step.attributes.get("keepdims", 1):
        return state
    return Rows(axis=state.axis - sum(axis < state.axis for axis in axes), inner=state.inner)


def matmul(step: Step) -> States:
    """[.., s, m] x [m, n]; batch axes broadcast."""
    left, right = step.states[0], step.states[1] if len(step.states) > 1 else None
    if any(state is not None for state in step.states[2:]):
        step.mixed("reads new tokens as a setting")
    ranks = step.rank(0), step.rank(1)
    if min(ranks) < 2:
        step.mixed("multiplies a vector of tokens")
    rank = max(ranks)
    if left is not None and left.axis == ranks[0] - 1:
        step.mixed("sums over the tokens")
    if right is not None and right.axis == ranks[1] - 2:
        step.mixed("sums over the tokens")
    if right is None and left is not None and left.axis == ranks[0] - 2:
        return [Rows(axis=rank - 2, inner=left.inner)]
    if left is None and right is not None and right.axis == ranks[1] - 1:
        return [Rows(axis=rank - 1, inner=right.inner)]
    return [aligned(step, [0, 1], trailing=2)]


def gemm(step: Step) -> States:
    state = step.states[0]
    if (
        state is None
        or step.states[1] is not None
        or state.axis != step.attributes.get("transA", 0)
    ):
        step.mixed("sums over the tokens")
    assert state is not None
    if step.has(2) and step.rank(2) == 2 and step.shape(2)[0] != 1:
        step.mixed("adds something else to each token")
    return [Rows(axis=0, inner=state.inner)]


def weights_first(step: Step) -> States:
    """[.., s, m] times a quantised weight: MatMulNBits."""
    state = step.only_first()
    if state.axis == step.rank(0) - 1:
        step.mixed("sums over the tokens")
    return [state]


def einsum(step: Step) -> States:
    equation = str(step.attributes["equation"]).replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation:
        step.mixed("has no explicit axes")
    letters = {
        terms[i][state.axis]: state for i, state in enumerate(step.states) if state is not None
    }
    (letter, state), *more = letters.items()
    if more or letter not in result or state.inner != 1:
        step.mixed("sums over the tokens")
    for i, term in enumerate(terms):
        if step.states[i] is None and letter in term:
            axis = term.index(letter)
            if step.shape(i)[axis] != 1:
                step.take_rows(i, axis)
    return [Rows(axis=result.index(letter))]


def quantising(step: Step) -> States:
    """QuantizeLinear and DequantizeLinear with a scale that is a weight."""
    state = step.only_first()
    if step.rank(1) > 0 and step.axis("axis", 1, step.rank(0)) == state.axis:
        step.mixed("has a scale for each token of a batch")
    return [state]


def over_all_tokens(step: Step) -> States:
    step.mixed("takes one scale from all tokens of a call")


def skip_norm(step: Step) -> States:
    """SkipLayerNormalization and its like: the first two are tokens."""
    if step.states[0] is None or step.states[0] != step.states[1]:
        step.mixed("adds something else to each token")
    return [step.states[0] if i in (0, 3) else None for i in range(len(step.node.outputs))]


def carried(step: Step) -> States:
    return [step.only_first() for _ in step.node.outputs]


EACH_ENTRY = (
    "Abs", "Acos", "Acosh", "And", "Asin", "Asinh", "Atan", "Atanh", "BiasGelu", "BitShift",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil", "Celu", "Cos", "Cosh", "Elu",
    "Erf", "Exp", "FastGelu", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Log", "Mean", "Mish", "Neg", "PRelu", "QuickGelu", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish",
    "Tan", "Tanh", "ThresholdedRelu", "Xor",
)  # fmt: skip

_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(EACH_ENTRY, elementwise),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **SHAPE_RULES,
    "ArgMax": extreme,
    "ArgMin": extreme,
    "CastLike": first_elementwise,
    "DequantizeLinear": quantising,
    "Dropout": carried,
    "DynamicQuantizeLinear": over_all_tokens,
    "Einsum": einsum,
    "Gemm": gemm,
    "LayerNormalization": norm,
    "LogSoftmax": along_last,
    "LpNormalization": along_last,
    "MatMul": matmul,
    "MatMulInteger": matmul,
    "MatMulNBits": weights_first,
    "QuantizeLinear": quantising,
    "RMSNormalization": norm,
    "SimplifiedLayerNormalization": norm,
    "SkipLayerNormalization": skip_norm,
    "SkipSimplifiedLayerNormalization": skip_norm,
    "Softmax": along_last,
    "TopK": along_last,
}
"""By op type, domains apart: no two of these share a name."""
