"""Where the new tokens are after ops that move, join and select: the axes keep their order in
memory, so a token axis is known by how many entries lie behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mha_export.caches._edits import FirstRows, FromEnd, Rows, SetEntry, WholeShape
from mha_export.caches._step import Step, aligned

States = Sequence[Rows | None]

_LARGE = 1 << 30
"""An end of a Slice at or above this means "to the end"."""


def reshaped(step: Step) -> States:
    """Reshape, Flatten, Squeeze, Unsqueeze: entries stay in order."""
    state = step.only_first()
    found = _refolded(step, state)
    if step.node.op_type == "Reshape":
        _free_entry(step, state, found)
    return [found]


def _refolded(step: Step, state: Rows) -> Rows:
    answers = set()
    ins, outs = step.look.shapes(step.value(0)), step.look.shapes(step.node.outputs[0])
    for before, after, length in zip(ins, outs, step.look.lengths, strict=True):
        behind = state.inner * math.prod(before[state.axis + 1 :])
        for axis, size in enumerate(after):
            right = math.prod(after[axis + 1 :])
            holds = behind % right == 0 and (right * size) % (behind * length) == 0
            if holds and right <= behind and right * size >= behind * length:
                answers.add(Rows(axis=axis, inner=behind // right))
    if len(answers) != 1:
        step.mixed("cuts the axis of the tokens")
    return answers.pop()


def _free_entry(step: Step, state: Rows, found: Rows) -> None:
    """Let the target shape leave open how many tokens there are."""
    shapes = step.look.arrays(step.value(1))
    if shapes is None:
        step.mixed("has a shape that depends on the tokens")
    assert shapes is not None
    first, second = (array.reshape(-1) for array in shapes)
    entry = found.axis
    copies = first[entry] == 0 and not step.attributes.get("allowzero", 0)
    if first[entry] == -1 or (copies and entry == state.axis):
        return
    if first[entry] == second[entry]:
        step.mixed("has a number of tokens written into its shape")
    open_entry = None if -1 in first else -1
    step.edits.append(SetEntry(node=step.node, index=1, entry=entry, number=open_entry))


def expand(step: Step) -> States:
    state, rank = step.only_first(), step.look.rank(step.node.outputs[0])
    found = Rows(axis=state.axis + rank - step.rank(0), inner=state.inner)
    shapes = step.look.arrays(step.value(1))
    if shapes is None:
        step.mixed("has a shape that depends on the tokens")
    assert shapes is not None
    entry = found.axis - (rank - shapes[0].size)
    if entry >= 0 and shapes[0].reshape(-1)[entry] != 1:
        step.edits.append(SetEntry(node=step.node, index=1, entry=entry, number=1))
    return [found]


def tile(step: Step) -> States:
    state, repeats = step.only_first(), step.numbers(1)
    if repeats is None or repeats.reshape(-1)[state.axis] != 1:
        step.mixed("repeats the tokens")
    return [state]


def transpose(step: Step) -> States:
    state, rank = step.only_first(), step.rank(0)
    perm = list(step.attributes.get("perm", range(rank - 1, -1, -1)))
    return [Rows(axis=perm.index(state.axis), inner=state.inner)]


def concat(step: Step) -> States:
    axis = step.axis("axis", 0, step.look.rank(step.node.outputs[0]))
    held = next(state for state in step.states if state is not None)
    if held.axis == axis:
        step.mixed("joins other tokens to them")
    found = aligned(step, range(len(step.node.inputs)))
    for index, state in enumerate(step.states):
        if state is None and step.shape(index)[found.axis] == 1:
            step.mixed("joins other tokens to them")
    return [found]


def split(step: Step) -> States:
    state = step.only_first()
    if step.axis("axis", 0, step.rank(0)) == state.axis:
        step.mixed("cuts the axis of the tokens")
    return [state for _ in step.node.outputs]


def slice_(step: Step) -> States:
    state, rank = step.only_first(), step.rank(0)
    starts = step.look.arrays(step.value(1))
    ends = step.look.arrays(step.value(2))
    axes, steps = step.numbers(3), step.numbers(4)
    if starts is None or ends is None or (step.has(3) and axes is None):
        step.mixed("cuts where the tokens say")
    assert starts is not None
    assert ends is not None
    listed = range(starts[0].size) if axes is None else axes.reshape(-1).tolist()
    places = [place for place, axis in enumerate(listed) if axis % rank == state.axis]
    if not places:
        return [state]
    place = places[0]
    begin = [int(array.reshape(-1)[place]) for array in starts]
    end = [int(array.reshape(-1)[place]) for array in ends]
    stride = 1 if steps is None else int(steps.reshape(-1)[place])
    lengths = step.look.lengths
    to_end = all(e >= min(n, _LARGE) for e, n in zip(end, lengths, strict=True))
    if state.inner != 1 or stride != 1 or not to_end:
        step.mixed("selects tokens by their place")
    if begin == [0, 0]:
        return [state]
    if begin == [-1, -1]:
        return [None]
    if begin == [n - 1 for n in lengths]:
        step.edits.append(FromEnd(node=step.node, index=1, entry=place))
        return [None]
    return step.mixed("selects tokens by their place")


def gather(step: Step) -> States:
    data, indices = step.states
    axis = step.axis("axis", 0, step.rank(0))
    if data is None:
        assert indices is not None
        return [Rows(axis=axis + indices.axis, inner=indices.inner)]
    if indices is not None:
        step.mixed("selects tokens by tokens")
    if data.axis == axis:
        _check_last(step, data)
        return [None]
    moved = data.axis if data.axis < axis else data.axis + step.rank(1) - 1
    return [Rows(axis=moved, inner=data.inner)]


def _check_last(step: Step, data: Rows) -> None:
    """The last of all tokens is the last of the new ones; any other may be in the cache."""
    value = step.value(1)
    if data.inner == 1 and step.look.is_constant(value, -1):
        return
    if data.inner == 1 and step.look.is_length(value, less=1):
        step.edits.append(FromEnd(node=step.node, index=1, entry=None))
        return
    step.mixed("selects tokens by their place")


def gather_nd(step: Step) -> States:
    data, indices = step.states
    if data is not None or indices is None or indices.axis == step.rank(1) - 1:
        step.mixed("selects tokens by tokens")
    assert indices is not None
    return [indices]


def along_another(step: Step) -> States:
    """GatherElements, ScatterElements: every entry stays in its row of tokens."""
    found = aligned(step, range(len(step.node.inputs)))
    if step.axis("axis", 0, step.rank(0)) == found.axis:
        step.mixed("moves entries between tokens")
    return [found]


def scatter_nd(step: Step) -> States:
    """Whole slices behind the indexed axes go to places that are the same for every token."""
    data, indices, updates = step.states
    depth = step.shape(1)[-1]
    shift = step.rank(1) - 1 - depth
    found = step.look.arrays(step.value(1))
    if indices is not None or found is None:
        step.mixed("writes where the tokens say")
    assert found is not None
    at = data if data is not None else updates and Rows(axis=updates.axis - shift)
    assert at is not None
    if at.axis < depth and shift == -1 and all(_stays(array, at.axis) for array in found):
        # One place an entry, each in its own row of tokens: the new ones' rows start at 0.
        step.edits.append(FirstRows(node=step.node, index=1, axis=at.axis))
        shift = 0
    elif at.axis < depth or at.inner != 1 or not np.array_equal(*found):
        step.mixed("moves entries between tokens")
    for index, state, axis in ((0, data, at.axis), (2, updates, at.axis + shift)):
        if state is None:
            step.take_rows(index, axis)
        elif state != Rows(axis=axis):
            step.mixed("moves entries between tokens")
    return [at]


def _stays(indices: np.ndarray, axis: int) -> bool:
    """Whether place [.., i, ..] speaks of row i of ``axis``, and else the same for every i."""
    own = np.moveaxis(indices[..., axis], axis, 0)
    count = own.shape[0]
    rows = np.arange(count).reshape(count, *[1] * (own.ndim - 1))
    rest = np.moveaxis(np.delete(indices, axis, axis=-1), axis, 0)
    return bool(np.all(own == rows) and np.all(rest == rest[:1]))


def one_hot(step: Step) -> States:
    state, rank = step.only_first(), step.rank(0) + 1
    axis = step.axis("axis", -1, rank)
    return [Rows(axis=state.axis + (axis <= state.axis), inner=state.inner)]


def cumulative_sum(step: Step) -> States:
    state, axis = step.only_first(), step.numbers(1)
    if axis is None or int(axis.reshape(-1)[0]) % step.rank(0) == state.axis:
        step.mixed("adds up the tokens")
    return [state]


def pad(step: Step) -> States:
    state, pads, axes = step.only_first(), step.numbers(1), step.numbers(3)
    if pads is None or (step.has(3) and axes is None):
        step.mixed("pads by a computed number")
    assert pads is not None
    rank = step.rank(0)
    listed = list(range(rank)) if axes is None else [int(a) % rank for a in axes.reshape(-1)]
    amounts = pads.reshape(2, -1)
    if any(axis == state.axis and np.any(amounts[:, i]) for i, axis in enumerate(listed)):
        step.mixed("adds padding tokens")
    return [state]


def shape_of(step: Step) -> States:
    """Readers of a shape want the length of all tokens: what is cut to the new ones says so."""
    state = step.only_first()
    rank = step.rank(0)
    start = step.attributes.get("start", 0)
    end = step.attributes.get("end", rank)
    first, last = (max(0, n + rank if n < 0 else min(n, rank)) for n in (start, end))
    if first <= state.axis < last:
        whole = step.shape(0)[state.axis] == step.look.lengths[0] and state.inner == 1
        step.edits.append(WholeShape(node=step.node, entry=state.axis - first, whole=whole))
    return [None]


SHAPE_RULES: dict[str, Callable[[Step], States]] = {
    "Concat": concat,
    "CumSum": cumulative_sum,
    "Expand": expand,
    "Flatten": reshaped,
    "Gather": gather,
    "GatherElements": along_another,
    "GatherND": gather_nd,
    "OneHot": one_hot,
    "Pad": pad,
    "Reshape": reshaped,
    "ScatterElements": along_another,
    "ScatterND": scatter_nd,
    "Shape": shape_of,
    "Slice": slice_,
    "Split": split,
    "Squeeze": reshaped,
    "Tile": tile,
    "Transpose": transpose,
    "Unsqueeze": reshaped,
}
