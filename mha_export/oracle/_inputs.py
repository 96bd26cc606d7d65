"""What the oracle reads: one array per operand, under the operand's own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mha_export.errors import InputError
from mha_export.spec import AttentionSpec

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RotaryInputs:
    """Rotary tables and positions, as :class:`mha_export.operands.RotaryTables` names them.

    ``cos``, ``sin``: [b or 1, s, width] without ``position_ids``, [positions, width] with them;
    width is r/2, or r with each pair's angle twice, where the style puts the pair (``c0 c1 c0 c1``
    for half, ``c0 c0 c1 c1`` for interleaved). ``key_cos``, ``key_sin`` [b or 1, t, width] rotate
    *all* keys, after the cache. ``position_ids`` [b, s] alone go with ``rotary.theta``.
    """

    cos: Array | None = None
    sin: Array | None = None
    position_ids: Array | None = None
    key_cos: Array | None = None
    key_sin: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SideInputs:
    """Every operand but query, key and value.

    Cache tensors are [b, k, p, d] and [b, k, p, e] whatever ``cache.layout`` says (p is
    ``max_length`` for a static cache). Each array is present exactly when the spec states its part.
    """

    past_key: Array | None = None
    past_value: Array | None = None
    keep: Array | None = None
    bias: Array | None = None
    key_padding: Array | None = None
    kv_lengths: Array | None = None
    prefix_lengths: Array | None = None
    document_ids: Array | None = None
    sinks: Array | None = None
    rotary: RotaryInputs | None = None
    q_norm_weight: Array | None = None
    k_norm_weight: Array | None = None
    q_norm_bias: Array | None = None
    k_norm_bias: Array | None = None

    def replace(self, **changes: Any) -> Self:
        """A copy with some arrays changed."""
        return dataclasses.replace(self, **changes)

    def map_arrays(self, change: Callable[[Array], Array]) -> Self:
        """A copy with every array changed."""
        mapped: Self = _mapped(self, change)
        return mapped

    def named(self) -> Iterator[tuple[str, Array]]:
        """Every array with its dotted name, as ``Operands.values`` names the graph values."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, RotaryInputs):
                for inner in fields(value):
                    array = getattr(value, inner.name)
                    if array is not None:
                        yield f"{field.name}.{inner.name}", array
            elif value is not None:
                yield field.name, value


def _mapped(record: Any, change: Callable[[Array], Array]) -> Any:
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, RotaryInputs):
            changes[field.name] = _mapped(value, change)
        elif value is not None:
            changes[field.name] = change(value)
    return dataclasses.replace(record, **changes)


@dataclass(frozen=True, kw_only=True, eq=False)
class OracleInputs(SideInputs):
    """The arrays of one attention.

    ``query`` [b, h, s, d], ``key`` [b, k, n, d], ``value`` [b, k, n, e]: before qk-norm and rotary;
    with a cache the n new tokens alone. ``value`` is None for ``value_source: key_prefix``.
    """

    query: Array
    key: Array
    value: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """Lengths of one evaluation: s queries, n new keys after p cached ones, t keys in all.

    ``start`` [b or 1]: where new tokens go in the cache, and their first rotary position.
    """

    b: int
    s: int
    n: int
    p: int
    t: int
    start: NDArray[np.int64]


def geometry_of(spec: AttentionSpec, inputs: OracleInputs) -> Geometry:
    """Check every shape against the spec and measure the lengths.

    Errors:
        InputError: an operand is missing, not stated by the spec, or of the wrong shape.
    """
    _check_presence(spec, inputs)
    b, s = (
        _shape(inputs.query, "query", (None, spec.q_heads, None, spec.head_dim))[axis]
        for axis in (0, 2)
    )
    n = _shape(inputs.key, "key", (b, spec.kv_heads, None, spec.head_dim))[2]
    p = 0
    if inputs.value is not None:
        _shape(inputs.value, "value", (b, spec.kv_heads, n, spec.value_dim))
    if inputs.past_key is not None:
        p = _shape(inputs.past_key, "past_key", (b, spec.kv_heads, None, spec.head_dim))[2]
        if inputs.past_value is not None:
            _shape(inputs.past_value, "past_value", (b, spec.kv_heads, p, spec.value_dim))
    static = spec.cache is not None and spec.cache.growth != "concat"
    t = p if static else p + n
    start = np.array([p], np.int64)
    lengths = inputs.kv_lengths
    if lengths is not None:
        _shape(lengths, "kv_lengths", (b,))
        if np.any(lengths < 0) or np.any(lengths > t):
            raise InputError(f"kv_lengths {lengths.tolist()} go beyond the {t} keys there are")
        if static:
            start = lengths.astype(np.int64) - n
            if np.any(start < 0):
                raise InputError(
                    f"kv_lengths {lengths.tolist()} are below the {n} new tokens they must count",
                    fix="give lengths after the new tokens are written",
                )
    for name, shape in (
        ("key_padding", (b, t)),
        ("prefix_lengths", (b,)),
        ("document_ids", (b, t)),
        ("sinks", (spec.q_heads,)),
    ):
        array = getattr(inputs, name)
        if array is not None:
            _shape(array, name, shape)
    return Geometry(b=b, s=s, n=n, p=p, t=t, start=start)


def _check_presence(spec: AttentionSpec, inputs: OracleInputs) -> None:
    mask, norm = spec.mask, spec.qk_norm
    own = spec.value_source == "own"
    stated = {
        "value": own,
        "past_key": spec.cache is not None,
        "past_value": spec.cache is not None and own,
        "keep": mask.keep is not None,
        "bias": mask.bias is not None,
        "key_padding": mask.padding,
        "kv_lengths": spec.uses_lengths,
        "prefix_lengths": mask.prefix,
        "document_ids": mask.documents,
        "sinks": spec.sinks,
        "q_norm_weight": norm is not None and norm.weight,
        "k_norm_weight": norm is not None and norm.weight and norm.key,
        "q_norm_bias": norm is not None and norm.bias,
        "k_norm_bias": norm is not None and norm.bias and norm.key,
    }
    for name, wanted in stated.items():
        if (getattr(inputs, name) is not None) is not wanted:
            raise InputError(
                f"operand {name} is missing: the spec states its part"
                if wanted
                else f"operand {name} is given, but the spec does not state its part"
            )


def _shape(array: Array, name: str, wanted: tuple[int | None, ...]) -> tuple[int, ...]:
    found = array.shape
    if len(found) != len(wanted) or any(
        want is not None and have != want for have, want in zip(found, wanted, strict=True)
    ):
        text = ", ".join("any" if want is None else str(want) for want in wanted)
        raise InputError(f"operand {name} has shape {list(found)}; expected [{text}]")
    return found
