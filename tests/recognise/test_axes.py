"""The axis algebra against numpy: a view must index exactly the elements that the ops move."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_export.recognise._axes import (
    View,
    broadcast_to,
    coalesced,
    composed,
    factorised,
    identity,
    indexed,
    joined,
    repeated,
    reshaped,
    sliced,
    transposed,
)

SOURCE = ir.Value(name="source")


def elements(view: View) -> np.ndarray:
    """The index into the source of every element of the view."""
    index = np.array(view.offset)
    for axis in view.axes:
        digits = np.zeros(1, np.int64)
        for size, stride in axis:
            digits = (digits[:, None] + np.arange(size) * stride).reshape(-1)
        index = index[..., None] + digits
    return index


def whole(*dims: int) -> tuple[View, np.ndarray]:
    return identity(SOURCE, dims), np.arange(int(np.prod(dims))).reshape(dims)


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[View | None, np.ndarray]:
    """A chain of moves, made by the algebra and by numpy alike."""
    view: View | None
    view, array = whole(*draw(st.sampled_from([(2, 12), (4, 6), (2, 3, 8), (6, 4, 2)])))
    for _ in range(draw(st.integers(1, 6))):
        if view is None:
            break
        move = draw(st.sampled_from(["reshape", "transpose", "slice", "expand", "tile", "gather"]))
        if move == "reshape":
            dims = draw(st.sampled_from(_regroupings(array.size)))
            view, array = reshaped(view, dims), array.reshape(dims)
        elif move == "transpose":
            perm = draw(st.permutations(range(array.ndim)))
            view, array = transposed(view, perm), array.transpose(perm)
        elif move == "slice":
            place = draw(st.integers(0, array.ndim - 1))
            size = array.shape[place]
            start = draw(st.integers(0, size - 1))
            step = draw(st.integers(1, 3))
            count = draw(st.integers(1, (size - 1 - start) // step + 1))
            view = sliced(view, place, start, step, count)
            taken = range(start, start + step * count, step)
            array = np.take(array, list(taken), axis=place)
        elif move == "expand" and array.size < 400:
            view = broadcast_to(view, (2, *array.shape))
            array = np.broadcast_to(array, (2, *array.shape))
        elif move == "tile" and array.size < 400:
            repeats = [1] * array.ndim
            repeats[draw(st.integers(0, array.ndim - 1))] = 2
            view, array = repeated(view, repeats), np.tile(array, repeats)
        elif move == "gather":
            place = draw(st.integers(0, array.ndim - 1))
            size = array.shape[place]
            chosen = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
            view, array = indexed(view, place, chosen), np.take(array, chosen, axis=place)
    return view, array


def _regroupings(size: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(size,)]
    for first in range(1, size + 1):
        if size % first == 0:
            found.append((first, size // first))
            rest = size // first
            found += [(first, k, rest // k) for k in range(1, rest + 1) if rest % k == 0]
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rearrangements())
def test_a_view_is_what_numpy_makes_or_nothing(made: tuple[View | None, np.ndarray]) -> None:
    view, array = made
    if view is not None:
        assert view.dims == array.shape
        assert np.array_equal(elements(view), array)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rearrangements(), st.data())
def test_composition_is_indexing_twice(
    made: tuple[View | None, np.ndarray], data: st.DataObject
) -> None:
    inner, array = made
    if inner is None:
        return
    middle = ir.Value(name="middle")
    outer: View | None = identity(middle, array.shape)
    dims = data.draw(st.sampled_from(_regroupings(array.size)))
    outer = reshaped(identity(middle, array.shape), dims)
    assert outer is not None
    perm = data.draw(st.permutations(range(len(dims))))
    outer = transposed(outer, perm)
    both = composed(outer, inner)
    if both is not None:
        assert both.source is SOURCE
        assert np.array_equal(elements(both), array.reshape(dims).transpose(perm))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_factorised_indices_come_back(indices: list[int]) -> None:
    found = factorised(indices)
    if found is not None:
        offset, factors = found
        view = View(SOURCE, offset, (tuple(factors),))
        assert elements(view).reshape(-1).tolist() == indices


def test_a_head_split_and_its_transposition() -> None:
    view, _ = whole(2, 5, 32)
    split = reshaped(view, (2, 5, 4, 8))
    assert split is not None
    assert transposed(split, (0, 2, 1, 3)).axes == (
        ((2, 160),),
        ((4, 8),),
        ((5, 32),),
        ((8, 1),),
    )


def test_interleaving_and_tiling_differ_by_where_the_repetition_stands() -> None:
    view, _ = whole(2, 3, 7, 8)
    wide = broadcast_to(reshaped(view, (2, 3, 1, 7, 8)), (2, 3, 2, 7, 8))  # type: ignore[arg-type]
    assert wide is not None
    interleaved = reshaped(wide, (2, 6, 7, 8))
    tiled = repeated(view, (1, 2, 1, 1))
    assert interleaved is not None
    assert interleaved.axes[1] == ((3, 56), (2, 0))
    assert tiled.axes[1] == ((2, 0), (3, 56))


def test_stacked_slices_are_the_tensor_again() -> None:
    view, _ = whole(2, 5, 32)
    parts = [sliced(view, 2, i * 8, 1, 8) for i in range(4)]
    stacked = [reshaped(part, (2, 1, 5, 8)) for part in parts if part is not None]
    back = joined([part for part in stacked if part is not None], 1)
    assert back is not None
    assert back.axes == (((2, 160),), ((4, 8),), ((5, 32),), ((8, 1),))


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([(4, 8), (8, 1)], ((32, 1),)),
        ([(1, 99), (5, 2)], ((5, 2),)),
        ([(4, 1), (8, 4)], ((4, 1), (8, 4))),
        ([(2, 0), (3, 0)], ((6, 0),)),
    ],
    ids=["contiguous", "unit", "swapped", "broadcast"],
)
def test_coalesced(factors: list[tuple[int, int]], expected: tuple[tuple[int, int], ...]) -> None:
    assert coalesced(factors) == expected
