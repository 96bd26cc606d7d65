"""The smallest input on which a candidate still fails, found by taking rows and tokens away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from mha_export.measure._input_roles import InputRole, input_roles
from mha_export.measure._input_sizes import names_in
from mha_export.measure.model_inputs import ModelCase

Fails = Callable[[ModelCase], bool]
MOST_TRIES = 40


def shrink(model: ir.Model, case: ModelCase, fails: Fails, *, tries: int = MOST_TRIES) -> ModelCase:
    """Halve and then decrement each symbolic size while ``fails`` still holds.

    Args:
        model: tells which axes share a symbol.
        case: one that fails.
        fails: whether a case fails; one that does not run at all must not count as failing.
        tries: how often ``fails`` may be asked.
    """
    roles = input_roles(model)
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in _smaller(roles, case):
            if left <= 0:
                break
            left -= 1
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def _smaller(roles: Sequence[InputRole], case: ModelCase) -> Iterator[ModelCase]:
    """Cases with one symbol less, the boldest cut first."""
    simple = {d for role in roles for d in role.shape if isinstance(d, str) and d.isidentifier()}
    for symbol in sorted(simple, key=lambda name: -case.dims.get(name, 0)):
        size = case.dims.get(symbol, 0)
        is_batch = any(role.shape and role.shape[0] == symbol for role in roles)
        cuts = [[i] for i in range(size)] if is_batch else _kept(size)
        if size <= 1:
            continue
        for kept in cuts:
            smaller = _take(roles, case, symbol, kept)
            if smaller is not None:
                yield smaller


def _kept(size: int) -> list[list[int]]:
    half = size // 2
    ways = [list(range(half)), list(range(half, size)), list(range(size - 1)), list(range(1, size))]
    return [way for way in ways if way]


def _take(
    roles: Sequence[InputRole], case: ModelCase, symbol: str, kept: Sequence[int]
) -> ModelCase | None:
    """``case`` with only the indices ``kept`` of every axis called ``symbol``."""
    less = case.dims[symbol] - len(kept)
    inputs = dict(case.inputs)
    for role in roles:
        array = inputs[role.name]
        for axis, dim in enumerate(role.shape):
            if dim == symbol:
                array = np.take(array, kept, axis=axis)
            elif isinstance(dim, str) and not dim.isidentifier() and symbol in names_in(dim):
                if array.shape[axis] <= less:
                    return None
                array = np.take(array, range(less, array.shape[axis]), axis=axis)
        inputs[role.name] = array
    return ModelCase(name=case.name, inputs=inputs, dims=_dims(roles, inputs))


def _dims(roles: Sequence[InputRole], inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {
        dim: size
        for role in roles
        for dim, size in zip(role.shape, inputs[role.name].shape, strict=True)
        if isinstance(dim, str)
    }
