"""Size arithmetic: numbers fold, what is known only at run time is computed once, both agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from emission import Bench

from mha_export.forms._counts import Count, Counts, Span, same

NUMBERS = (0, 1, 2, 3, 7)

BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "least": min,
    "most": max,
}


def _open(bench: Bench, **numbers: int) -> list[Count]:
    """Counts that only a run tells."""
    return [
        bench.value(name, np.array([number], np.int64), shape=[1])
        for name, number in numbers.items()
    ]


@pytest.mark.parametrize("name", BINARY)
def test_two_counts(name: str) -> None:
    """Whichever of the two is a number, the result is that of the numbers."""
    for a, b in itertools.product(NUMBERS, NUMBERS):
        bench = Bench()
        counts = Counts(bench.scope)
        open_a, open_b = _open(bench, a=a, b=b)
        emit = getattr(counts, name)
        expected = BINARY[name](a, b)
        assert emit(a, b) == expected
        mixed = [emit(open_a, b), emit(a, open_b), emit(open_a, open_b)]
        assert all(isinstance(count, int) or list(count.shape) == [1] for count in mixed)
        found = bench.run(*(counts.value(count) for count in mixed))
        assert [array.tolist() for array in found] == [[expected]] * 3


@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_a_count_in_parts(b: int) -> None:
    for a in (0, 1, 2, 3, 5, 12):
        bench = Bench()
        counts = Counts(bench.scope)
        (open_a,) = _open(bench, a=a)
        assert counts.div(a, b) == a // b
        assert bench.run(counts.value(counts.div(open_a, b)))[0].tolist() == [a // b]


def test_nothing_is_computed_that_is_known() -> None:
    bench = Bench()
    counts = Counts(bench.scope)
    (n,) = _open(bench, n=5)
    known = [
        (counts.add(n, 0), n),
        (counts.add(0, n), n),
        (counts.sub(n, 0), n),
        (counts.sub(n, n), 0),
        (counts.mul(n, 1), n),
        (counts.mul(1, n), n),
        (counts.mul(n, 0), 0),
        (counts.mul(0, n), 0),
        (counts.div(n, 1), n),
        (counts.least(n), n),
        (counts.least(n, n), n),
        (counts.most(4, 9, 2), 9),
        (counts.least(4, 9, 2), 2),
    ]
    for found, expected in known:
        assert same(found, expected)
    assert bench.types == []


def test_what_is_not_known_is_computed_once() -> None:
    bench = Bench()
    counts = Counts(bench.scope)
    n, m = _open(bench, n=5, m=6)
    for emit in (counts.add, counts.sub, counts.mul, counts.div, counts.least):
        assert emit(n, 2) is emit(n, 2)
    assert bench.types == ["Add", "Sub", "Mul", "Div", "Min"]
    assert counts.add(n, 2) is not counts.add(n, 3)
    assert counts.add(n, 2) is not counts.add(m, 2)
    assert counts.sub(n, m) is not counts.sub(m, n)
    made: list[int] = []

    def make() -> Count:
        made.append(1)
        return n

    assert counts.once(("key",), make) is counts.once(("key",), make) is n
    assert made == [1]


@pytest.mark.parametrize(
    ("name", "chosen"), [("least", 3), ("most", 8)], ids=lambda value: str(value)
)
def test_of_many_numbers_one_takes_part(name: str, chosen: int) -> None:
    """The numbers fold into one, and what is given twice is compared once."""
    bench = Bench()
    counts = Counts(bench.scope)
    n, m = _open(bench, n=4, m=7)
    found = getattr(counts, name)(8, n, 3, m, n)
    (node,) = bench.scope.nodes
    assert len(node.inputs) == 3
    assert bench.run(found)[0].tolist() == [chosen]


def test_a_constant_is_a_number() -> None:
    bench = Bench()
    counts = Counts(bench.scope)
    (n,) = _open(bench, n=5)
    assert counts.of(counts.value(6)) == 6
    assert counts.of(n) is n
    assert counts.value(n) is n


def test_two_counts_are_the_same_where_that_is_provable() -> None:
    bench = Bench()
    n, m = _open(bench, n=5, m=5)
    assert same(3, 3)
    assert not same(3, 4)
    assert same(n, n)
    for a, b in ((n, m), (n, 5), (None, n), (n, None), (None, None), (None, 3)):
        assert not same(a, b)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_cut_where_that_changes_them(axis: int) -> None:
    array = np.arange(20.0, dtype=np.float32).reshape(4, 5)
    size = array.shape[axis]
    bench = Bench()
    counts = Counts(bench.scope)
    value = bench.value("x", array)
    (n,) = _open(bench, n=size)
    assert counts.rows(value, Span(start=0, end=size), axis, of=size) is value
    assert counts.rows(value, Span(start=0, end=n), axis, of=n) is value
    assert bench.types == []
    spans = [(0, size, None), (0, n, size), (1, size, size), (0, 2, size), (1, n, n), (2, 3, n)]
    cuts = [counts.rows(value, Span(start=start, end=end), axis, of=of) for start, end, of in spans]
    assert bench.types == ["Slice"] * len(spans)
    for (start, end, _), found in zip(spans, bench.run(*cuts), strict=True):
        stop = end if isinstance(end, int) else size
        assert found.tolist() == array.take(range(start, stop), axis).tolist()
