"""Lengths of a case: what a scenario wants, within what the spec fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mha_export.errors import InputError
from mha_export.spec import AttentionSpec, CausalAlignment, Dim

NAMES = ("batch", "q_len", "kv_len", "past_len")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Concrete lengths. ``past_len`` is the length of the cache tensor that comes in.

    With a concat cache ``kv_len = past_len + new_len``; with a static one ``kv_len = past_len``.
    """

    batch: int
    q_len: int
    new_len: int
    past_len: int
    kv_len: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def has_position_rule(spec: AttentionSpec) -> bool:
    """Whether anything in the mask reads the queries' positions."""
    mask = spec.mask
    return bool(
        mask.causal is not None
        or mask.left_window is not None
        or mask.right_window is not None
        or mask.block is not None
        or mask.documents
        or mask.alibi_slopes is not None
    )


def is_static(spec: AttentionSpec) -> bool:
    """Whether new tokens are written into a buffer of fixed length."""
    return spec.cache is not None and spec.cache.growth != "concat"


def is_square(spec: AttentionSpec) -> bool:
    """Whether there are always as many keys as queries: one sequence, no cache, and one symbol.

    Projections of one input say so too, whatever their lengths are called.
    """
    if spec.cache is not None or spec.cross:
        return False
    one_input = spec.projections is not None and spec.kv_source == "own"
    named_apart = isinstance(spec.q_len, str) and isinstance(spec.kv_len, str)
    return spec.q_len == spec.kv_len or (one_input and named_apart)


def fixed_dims(spec: AttentionSpec, dims: Mapping[str, int] | None) -> dict[str, int]:
    """What the spec's integers and the caller's ``dims`` leave no choice about.

    Errors:
        InputError: an unknown name, or a value that contradicts the spec's.
    """
    fixed: dict[str, int] = {}
    _pin(fixed, "batch", spec.batch)
    _pin(fixed, "q_len", spec.q_len)
    _pin(fixed, "kv_len", spec.kv_len)
    if is_static(spec) and spec.cache is not None and spec.cache.max_length is not None:
        _pin(fixed, "kv_len", spec.cache.max_length)
    for shape in (spec.mask.keep, spec.mask.bias):
        if shape is None:
            continue
        if len(shape) >= 2 and shape[-2] != 1:
            _pin(fixed, "q_len", shape[-2])
        if len(shape) == 4 and shape[0] != 1:
            _pin(fixed, "batch", shape[0])
        if isinstance(shape[-1], int):
            fixed.setdefault("kv_len", shape[-1])
    symbols = {spec.batch: "batch", spec.q_len: "q_len", spec.kv_len: "kv_len"}
    for given, value in (dims or {}).items():
        name = given if given in NAMES else symbols.get(given, "")
        if not name:
            raise InputError(
                f"unknown dimension {given!r}; expected one of "
                f"{sorted({*NAMES, *(s for s in symbols if isinstance(s, str))})}"
            )
        if fixed.get(name, value) != value:
            raise InputError(
                f"dimension {given} is {fixed[name]} in the spec, but {value} was asked"
            )
        fixed[name] = value
    return fixed


def _pin(fixed: dict[str, int], name: str, dim: Dim) -> None:
    if isinstance(dim, int):
        fixed.setdefault(name, dim)


def sizes_for(
    spec: AttentionSpec, fixed: Mapping[str, int], *, batch: int, queries: int, keys: int
) -> Sizes | None:
    """The lengths nearest to those wanted, or None where the spec's own leave no room for them.

    ``keys`` counts cached ones. A self-attention without a cache has as many keys as queries;
    queries never outnumber keys where a rule reads positions (but with top-left causal alone).
    """
    b = fixed.get("batch", batch)
    s = fixed.get("q_len", queries)
    if is_static(spec):
        t = fixed.get("kv_len", keys + 2)
        return None if s > t else Sizes(batch=b, q_len=s, new_len=s, past_len=t, kv_len=t)
    if spec.cache is not None:
        if "past_len" in fixed:
            p = fixed["past_len"]
        elif spec.q_len == spec.kv_len:
            p = 0
        else:
            p = max(0, fixed.get("kv_len", keys) - s)
        if "kv_len" in fixed and p + s != fixed["kv_len"]:
            if "q_len" in fixed or fixed["kv_len"] <= p:
                return None
            s = fixed["kv_len"] - p
        return Sizes(batch=b, q_len=s, new_len=s, past_len=p, kv_len=p + s)
    if fixed.get("past_len", 0):
        return None
    if not is_square(spec):
        t = fixed.get("kv_len", keys)
    else:
        s = t = fixed.get("q_len", fixed.get("kv_len", max(queries, 1)))
    own_tables = spec.rotary is not None and spec.rotary.theta is None and not spec.cross
    if own_tables and s != t:
        if "kv_len" in fixed and "q_len" in fixed:
            return None
        s = t = s if "q_len" in fixed else t
    mask = spec.mask
    top_left_alone = mask.causal is CausalAlignment.TOP_LEFT and not (
        mask.left_window is not None or mask.block is not None or mask.documents
    )
    crowded = has_position_rule(spec) and not top_left_alone
    if s > t and crowded:
        if "q_len" in fixed:
            return None
        s = t
    return Sizes(batch=b, q_len=s, new_len=t, past_len=0, kv_len=t)
