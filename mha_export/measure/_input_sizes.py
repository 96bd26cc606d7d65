"""Numbers for the symbolic dimensions of a model's inputs, consistent with one another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mha_export.errors import InputError
from mha_export.measure._input_roles import InputRole
from mha_export.spec import Dim


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Sizes to choose symbols from: batch, new tokens, cached tokens, tokens of another stream."""

    batch: int = 2
    seq: int = 7
    past: int = 0
    other: int = 9

    @property
    def total(self) -> int:
        return self.past + self.seq


def has_past(roles: Iterable[InputRole]) -> bool:
    """Whether a cache input has a symbolic length."""
    return any(
        role.role == "past" and any(isinstance(d, str) and _is_past(d) for d in role.shape)
        for role in roles
    )


def sizes_of(
    roles: Sequence[InputRole],
    lengths: Lengths,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """A number for every symbol: the caller's where given, else by the symbol's name and place.

    Errors:
        InputError: ``dims`` names no symbol, or ``shapes`` no input or another rank or size.
    """
    chosen = dict(dims or {})
    for role in roles:
        given = (shapes or {}).get(role.name)
        if given is not None:
            _take_shape(role, given, chosen)
    symbols = {s for role in roles for d in role.shape if isinstance(d, str) for s in names_in(d)}
    _check_known(dims or {}, shapes or {}, symbols, roles)
    mask_like = {"mask"}
    past = has_past(roles)
    if past:
        for symbol in sorted(symbols - chosen.keys()):
            if _is_key_length(symbol):
                chosen[symbol] = lengths.total
    for role in roles:
        for axis, dim in enumerate(role.shape):
            if isinstance(dim, str) and dim.isidentifier() and dim not in chosen:
                wide = past and role.role in mask_like and axis == len(role.shape) - 1
                chosen[dim] = _by_name(
                    dim, axis, lengths, total=wide and not _new_tokens(dim, roles)
                )
    for symbol in sorted(symbols - chosen.keys()):
        chosen[symbol] = _by_name(symbol, 1, lengths, total=False)
    for role in roles:
        for axis, dim in enumerate(role.shape):
            if isinstance(dim, str) and not dim.isidentifier() and dim not in chosen:
                chosen[dim] = _value(dim, chosen, axis, lengths)
    return chosen


def concrete(role: InputRole, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input in numbers."""
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in role.shape)


def names_in(dim: Dim) -> frozenset[str]:
    """Symbols an axis expression such as ``past + seq`` is made of."""
    if isinstance(dim, int):
        return frozenset()
    try:
        tree = ast.parse(dim, mode="eval")
    except SyntaxError:
        return frozenset()
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _take_shape(role: InputRole, given: Sequence[int], chosen: dict[str, int]) -> None:
    if len(given) != len(role.shape):
        raise InputError(
            f"--shape {role.name}={','.join(map(str, given))} has rank {len(given)}; "
            f"expected {len(role.shape)}: {list(role.shape)}"
        )
    for dim, size in zip(role.shape, given, strict=True):
        if isinstance(dim, int):
            if dim != size:
                raise InputError(f"--shape {role.name}: an axis is fixed at {dim}, got {size}")
        elif chosen.setdefault(dim, size) != size:
            raise InputError(
                f"--shape {role.name}: '{dim}' is {size} here and {chosen[dim]} elsewhere"
            )


def _check_known(
    dims: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    symbols: set[str],
    roles: Sequence[InputRole],
) -> None:
    spelled = symbols | {d for role in roles for d in role.shape if isinstance(d, str)}
    for name in dims:
        if name not in spelled:
            known = ", ".join(sorted(spelled)) or "none: every size is fixed"
            raise InputError(f"--dim {name}: no input has that dimension", fix=f"known: {known}")
    for name in shapes:
        if name not in {role.name for role in roles}:
            known = ", ".join(role.name for role in roles)
            raise InputError(f"--shape {name}: the model has no such input", fix=f"known: {known}")


def _by_name(symbol: str, axis: int, lengths: Lengths, *, total: bool) -> int:
    name = symbol.lower()
    if "batch" in name or (axis == 0 and not _looks_like_length(name)):
        return lengths.batch
    if total or "total" in name or ("past" in name and ("seq_" in name or "+" in name)):
        return lengths.total
    if _is_past(name):
        return lengths.past
    if re.search(r"enc|mem|cross|source|src", name) or _is_key_length(name):
        return lengths.other
    return lengths.seq


def _is_key_length(symbol: str) -> bool:
    """A symbol for the keys alone: all of them where there is a cache, else another sequence's."""
    return bool(re.fullmatch(r"(kv|key)_?(seq(uence)?_?)?len(gth)?", symbol.lower()))


def buffer_length(roles: Iterable[InputRole], sizes: Mapping[str, int]) -> int | None:
    """Length of a cache of fixed length that is written in place; None: there is none."""
    for role in roles:
        if role.role == "past" and len(role.shape) == 4:
            named = [dim for dim in role.shape[1:] if isinstance(dim, str)]
            if not any(_is_past(dim) for dim in named):
                axis = role.shape.index(named[0]) if named else 2
                return concrete(role, sizes)[axis]
    return None


def _looks_like_length(name: str) -> bool:
    return bool(re.search(r"seq|len|tok|past|total", name))


def _is_past(name: str) -> bool:
    return bool(re.search(r"past|cache", name.lower()))


def _new_tokens(symbol: str, roles: Sequence[InputRole]) -> bool:
    """Whether the symbol is the length of the ids: a mask of that length has no past in it."""
    return any(symbol in role.shape for role in roles if role.role in ("ids", "positions"))


def _value(expression: str, chosen: Mapping[str, int], axis: int, lengths: Lengths) -> int:
    """``past + seq`` in numbers; anything that is no sum or product is chosen by its name."""
    try:
        return _arithmetic(ast.parse(expression, mode="eval").body, chosen)
    except (SyntaxError, KeyError, ValueError):
        return _by_name(expression, axis, lengths, total=False)


def _arithmetic(node: ast.expr, chosen: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return chosen[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _arithmetic(node.left, chosen), _arithmetic(node.right, chosen)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
    raise ValueError(ast.dump(node))
