"""Inputs for a whole model: ordinary ones, and the battery that shows a wrong mask or cache.

What an input is, is read off the graph: integers that select rows of a table stay below its rows;
positions follow the cache and the padding; masks come all ones, padded on either side, with holes,
and with a row that is all masked; lengths are consistent (``total = past + new``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.measure._input_roles import InputRole, input_roles
from mha_export.measure._input_sizes import (
    Lengths,
    buffer_length,
    concrete,
    has_past,
    sizes_of,
)
from mha_export.npz import read_npz

Arrays = dict[str, np.ndarray]
Padding = Literal["none", "left", "right", "holes", "empty"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCase:
    """One set of inputs. ``dims`` maps each symbol to its size."""

    name: str
    inputs: Arrays
    dims: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class _Scenario:
    name: str
    lengths: Lengths
    padding: Padding = "none"
    gain: float = 1.0
    ragged: bool = False
    needs: tuple[str, ...] = ()
    quick: bool = False


def _scenarios(past: bool) -> tuple[_Scenario, ...]:
    # Not more queries than keys: positions may then leave rows without a key, of which a spec
    # without a policy for them says nothing.
    cached = Lengths(past=5, seq=3)
    found = [
        _Scenario(name="ordinary", lengths=Lengths(), quick=True),
        _Scenario(name="right padded", lengths=Lengths(), padding="right", needs=("mask",)),
        _Scenario(name="left padded", lengths=Lengths(), padding="left", needs=("mask",)),
        _Scenario(name="holes", lengths=Lengths(), padding="holes", needs=("mask",), quick=True),
        _Scenario(name="empty row", lengths=Lengths(), padding="empty", needs=("mask",)),
        _Scenario(name="one token", lengths=Lengths(seq=1), needs=("length",)),
        _Scenario(name="longer", lengths=Lengths(batch=1, seq=37, other=41), needs=("length",)),
        _Scenario(name="large values", lengths=Lengths(), gain=16.0, needs=("float",)),
        _Scenario(name="extreme values", lengths=Lengths(), gain=128.0, needs=("float",)),
        _Scenario(name="small values", lengths=Lengths(), gain=2.0**-8, needs=("float",)),
        _Scenario(name="uneven lengths", lengths=Lengths(seq=3), ragged=True, needs=("lengths",)),
        _Scenario(name="no tokens", lengths=Lengths(), padding="empty", needs=("lengths",)),
    ]
    if past:
        found += [
            _Scenario(name="past", lengths=cached, quick=True),
            _Scenario(name="past, one token", lengths=Lengths(past=6, seq=1)),
            _Scenario(name="past, holes", lengths=cached, padding="holes", needs=("mask",)),
            _Scenario(name="past, left padded", lengths=cached, padding="left", needs=("mask",)),
        ]
    return tuple(found)


def model_cases(
    model: ir.Model,
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    quick: bool = False,
    reach: int = 0,
    many_queries: bool = False,
) -> tuple[ModelCase, ...]:
    """The battery, in a fixed order; the same seed gives the same bytes.

    Args:
        model: only its inputs and what reads them are looked at.
        seed: any non-negative number.
        dims: sizes of symbols (``batch``); scenarios that need another size are left out.
        shapes: whole shapes of inputs, likewise.
        quick: three scenarios at most.
        reach: tokens that one more scenario has, where the others are all shorter.
        many_queries: one more scenario has more queries than keys, where they differ.

    Errors:
        InputError: an input without type or shape, or an unknown dimension.
    """
    roles = input_roles(model)
    return tuple(_cases(roles, seed, dims or {}, shapes or {}, quick, reach, many_queries))


def cases_at_traced_sizes(model: ir.Model, *, seed: int = 0) -> tuple[ModelCase, ...]:
    """Ordinary inputs at sizes exporters are usually given, smallest first.

    For a graph whose tracing baked its own sizes in (``Reshape`` to ``[8, 8, 16]``) although its
    inputs are named as if they were free: the caller keeps the first that runs.
    """
    roles = input_roles(model)
    found = []
    for batch, seq in ((1, 8), (2, 8), (1, 16), (2, 16), (1, 32), (1, 128)):
        lengths = Lengths(batch=batch, seq=seq, other=seq)
        scenario = _Scenario(name=f"batch {batch}, {seq} tokens", lengths=lengths)
        found.append(_draw(roles, scenario, sizes_of(roles, lengths), seed))
    return tuple(found)


def ordinary_inputs(
    model: ir.Model,
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    runs: Callable[[ModelCase], bool] | None = None,
) -> ModelCase:
    """One case for timing: a batch of 1 and 128 tokens where nothing else is asked for.

    Masks are all ones: real ones, so that no implementation is timed on a degenerate case.

    Args:
        model: whose inputs are wanted.
        seed: of the numbers.
        dims: sizes of symbols.
        shapes: whole shapes of inputs.
        runs: whether the model runs on a case; shorter ones are tried where it does not (a table
            of positions may end before 128). None: the first is taken on trust.

    Errors:
        InputError: as :func:`model_cases`, or the model runs at none of the lengths.
    """
    roles = input_roles(model)
    tried: list[dict[str, int]] = []
    for seq in (128, 64, 32, 16, 8):
        lengths = Lengths(batch=1, seq=seq, past=0, other=seq)
        sizes = sizes_of(roles, lengths, dims=dims, shapes=shapes)
        if sizes in tried:
            continue
        tried.append(sizes)
        case = _draw(roles, _Scenario(name="ordinary", lengths=lengths), sizes, seed)
        if runs is None or runs(case):
            return case
    raise InputError(
        f"the model runs at none of the sizes tried: {', '.join(map(str, tried))}",
        fix="give sizes with --dim NAME=N, or real inputs with --inputs FILE.npz",
    )


def workload_sizes(
    model: ir.Model,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """A number for every symbol of the inputs: a batch of 1, 128 tokens, no past where not given.

    Errors:
        InputError: ``dims`` names no symbol, or ``shapes`` no input or another rank or size.
    """
    lengths = Lengths(batch=1, seq=128, past=0, other=128)
    return sizes_of(input_roles(model), lengths, dims=dims, shapes=shapes)


def inputs_from_file(path: Path | str, model: ir.Model) -> ModelCase:
    """The arrays of an ``.npz`` as a case, checked against the model's inputs.

    Errors:
        InputError: not an ``.npz``, a missing input, or another dtype or rank; names what it found.
    """
    path = Path(path)
    arrays = read_npz(path)
    roles = input_roles(model)
    dims: dict[str, int] = {}
    for role in roles:
        array = arrays.get(role.name)
        if array is None:
            raise InputError(
                f"{path}: no array for input '{role.name}'; it holds {sorted(arrays)}",
                fix="save it with numpy.savez(FILE, **{input name: array})",
            )
        if array.ndim != len(role.shape) or array.dtype.kind != role.dtype.kind:
            raise InputError(
                f"{path}: '{role.name}' is {array.dtype} of rank {array.ndim}; "
                f"expected {role.dtype} of rank {len(role.shape)}"
            )
        arrays[role.name] = array.astype(role.dtype, copy=False)
        dims.update(
            {d: n for d, n in zip(role.shape, array.shape, strict=True) if isinstance(d, str)}
        )
    return ModelCase(name=path.stem, inputs={r.name: arrays[r.name] for r in roles}, dims=dims)


def _cases(
    roles: Sequence[InputRole],
    seed: int,
    dims: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    quick: bool,
    reach: int,
    many_queries: bool,
) -> Iterator[ModelCase]:
    here: set[str] = {"mask" if role.role == "bias" else role.role for role in roles}
    if _free_length(roles):
        here.add("length")
    if any(role.dtype.kind not in "biu" for role in roles):
        here.add("float")
    seen: set[tuple[tuple[str, int], ...]] = set()
    scenarios = list(_scenarios(has_past(roles)))
    if reach > max(scenario.lengths.seq for scenario in scenarios):
        far = Lengths(batch=1, seq=reach, other=reach)
        scenarios.append(_Scenario(name="beyond the windows", lengths=far, needs=("length",)))
    if many_queries:
        many = Lengths(batch=1, seq=37, other=9)
        scenarios.append(_Scenario(name="more queries than keys", lengths=many, needs=("length",)))
    for scenario in scenarios:
        if (quick and not scenario.quick) or not set(scenario.needs) <= here:
            continue
        sizes = sizes_of(roles, scenario.lengths, dims=dims, shapes=shapes)
        key = tuple(sorted(sizes.items()))
        if scenario.padding == "none" and scenario.gain == 1.0 and key in seen:
            continue  # the caller fixed the sizes: nothing new to see
        seen.add(key)
        yield _draw(roles, scenario, sizes, seed)


def _free_length(roles: Sequence[InputRole]) -> bool:
    return any(isinstance(dim, str) for role in roles for dim in role.shape[1:])


def _draw(
    roles: Sequence[InputRole], scenario: _Scenario, sizes: Mapping[str, int], seed: int
) -> ModelCase:
    masks = {
        role.name: _keep(concrete(role, sizes), scenario.padding)
        for role in roles
        if role.role in ("mask", "bias")
    }
    buffer = buffer_length(roles, sizes)
    inputs = {}
    for role in roles:
        stream = np.random.default_rng([seed, zlib.crc32(f"{scenario.name}/{role.name}".encode())])
        shape = concrete(role, sizes)
        if role.role == "mask":
            inputs[role.name] = _as_mask(masks[role.name], role.dtype, scenario)
        elif role.role == "bias":
            bias = scenario.gain * stream.standard_normal(shape)
            hidden = _as_mask(masks[role.name], role.dtype, scenario)
            inputs[role.name] = np.where(masks[role.name], bias.astype(role.dtype), hidden)
        elif role.role == "lengths":
            inputs[role.name] = _lengths(role, shape, scenario, buffer)
        elif role.role == "prefix":
            rows = 1 + 2 * np.arange(shape[0] if shape else 1)
            inputs[role.name] = np.minimum(rows, scenario.lengths.total).astype(role.dtype)
        elif role.role == "positions":
            inputs[role.name] = _positions(shape, role, masks, scenario.lengths.past)
        else:
            inputs[role.name] = _values(role, shape, stream, scenario)
    if buffer is not None:
        _clear_unwritten(roles, inputs, scenario.lengths.seq, buffer)
    return ModelCase(name=scenario.name, inputs=inputs, dims=dict(sizes))


def _clear_unwritten(roles: Sequence[InputRole], inputs: Arrays, new: int, buffer: int) -> None:
    """Zeros where a cache of fixed length holds no token yet: what runtimes leave there differs."""
    counts = [
        inputs[role.name] for role in roles if role.role == "lengths" and len(role.shape) == 1
    ]
    for role in roles:
        if role.role != "past" or len(role.shape) != 4 or not counts:
            continue
        array = inputs[role.name]
        axis = next(axis for axis in (2, 1, 3) if array.shape[axis] == buffer)
        written = np.arange(buffer) < (counts[0] - new)[:, None]
        shape = [array.shape[0], 1, 1, 1]
        shape[axis] = buffer
        if len(counts[0]) == array.shape[0]:
            inputs[role.name] = np.where(written.reshape(shape), array, 0).astype(array.dtype)


def _values(
    role: InputRole, shape: tuple[int, ...], stream: np.random.Generator, scenario: _Scenario
) -> np.ndarray:
    if role.role == "bool":
        return np.ones(shape, np.bool_)
    if role.dtype.kind in "iu":
        return stream.integers(0, role.limit or 2, size=shape).astype(role.dtype)
    return (scenario.gain * stream.standard_normal(shape)).astype(role.dtype)


def _keep(shape: tuple[int, ...], padding: Padding) -> np.ndarray:
    """True where a key takes part; every row of the batch is padded differently."""
    keep = np.ones(shape, dtype=np.bool_)
    length = shape[-1] if shape else 0
    for row in range(shape[0] if len(shape) > 1 else 0):
        cut = min(1 + 2 * row, max(length - 1, 0))
        if padding == "left":
            keep[row, ..., :cut] = False
        elif padding == "right":
            keep[row, ..., length - cut :] = False
        elif padding == "holes":
            keep[row, ..., row % 2 :: 3] = False
            if keep.ndim > 2:  # a mask by query: each query misses other keys
                for query in range(keep.shape[-2]):
                    keep[row, ..., query, query % 3 :: 4] = False
            keep[row, ..., -1:] = True
        elif padding == "empty" and row == 0:
            keep[row] = False
    return keep


def _as_mask(keep: np.ndarray, dtype: np.dtype, scenario: _Scenario) -> np.ndarray:
    """A float mask is added to the scores: 0 where the key takes part, a low number elsewhere.

    Exporters write -1e4 or the minimum of the dtype, which absorbs every score: a whole row of it
    is another result than a whole row of -1e4.
    """
    if dtype.kind in "biu":
        return keep.astype(dtype)
    lowest = float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    low = lowest if scenario.padding == "empty" else -1e4
    return np.where(keep, 0.0, low).astype(dtype)


def _lengths(
    role: InputRole, shape: tuple[int, ...], scenario: _Scenario, buffer: int | None
) -> np.ndarray:
    """Tokens in all, the new ones counted; uneven ones differ by row, within the buffer."""
    total, least = scenario.lengths.total, 1
    if buffer is not None:
        least = min(scenario.lengths.seq, buffer)
        total = buffer if scenario.ragged else min(total, buffer)
    found = np.full(shape, total)
    if scenario.ragged and len(shape) == 1:
        found = np.maximum(total - np.arange(shape[0]), least)
    if scenario.padding == "empty" and buffer is None and len(shape) == 1:
        found[:1] = 0
    if role.name.lower().startswith("seqlens"):  # ONNX Runtime's count of tokens less one
        found = found - 1
    return found.astype(role.dtype)


def _positions(
    shape: tuple[int, ...], role: InputRole, masks: Mapping[str, np.ndarray], past: int
) -> np.ndarray:
    """Each token's place: after the cache, and among the tokens that take part where padded."""
    length = shape[-1] if shape else 1
    flat = [m for m in masks.values() if m.ndim == 2 and len(shape) == 2 and m.shape[0] == shape[0]]
    if flat and flat[0].shape[-1] >= length:
        counted = np.maximum(np.cumsum(flat[0], axis=-1) - 1, 0)
        positions = counted[:, -length:]
    else:
        positions = np.broadcast_to(past + np.arange(length), shape)
    if role.limit is not None:
        positions = np.minimum(positions, role.limit - 1)
    return np.ascontiguousarray(positions).astype(role.dtype)
