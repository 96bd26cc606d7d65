"""Whether query and key went through the same rotation and normalisation, as one spec says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.operands import RotaryTables
from mha_export.recognise._lift import Stage
from mha_export.recognise.fused._upstream import same_value
from mha_export.spec import QkNormSpec, RotarySpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Common:
    """Rotation and normalisation of query and key in the words of a spec."""

    rotary: RotarySpec | None = None
    tables: RotaryTables | None = None
    norm: QkNormSpec | None = None


def agree(query: Stage, key: Stage) -> Common | None:
    """What both went through, or None where one spec cannot say it."""
    rotary = _rotary(query, key)
    norm = _norm(query, key)
    if rotary is None or norm is None:
        return None
    return Common(rotary=rotary[0], tables=rotary[1], norm=norm[0])


def _rotary(query: Stage, key: Stage) -> tuple[RotarySpec | None, RotaryTables | None] | None:
    if query.rotary is None:
        return (None, None) if key.rotary is None else None
    spec, tables = query.rotary.spec, query.rotary.tables
    if key.rotary is None:
        return None if query.rotary.sorted else (dataclasses.replace(spec, key=False), tables)
    if key.rotary.spec != spec or key.rotary.sorted != query.rotary.sorted:
        return None
    if key.rotary.sorted and key.past is not None:
        return None  # the cache holds keys in another order of channels
    other = key.rotary.tables
    if _same(tables, other):
        return spec, tables
    if key.past is not None or tables.position_ids or other.position_ids:
        return None
    if tables.half_width != other.half_width:
        return None
    return spec, dataclasses.replace(tables, key_cos=other.cos, key_sin=other.sin)


def _same(left: RotaryTables, right: RotaryTables) -> bool:
    pairs: list[tuple[ir.Value | None, ir.Value | None]] = [
        (left.cos, right.cos),
        (left.sin, right.sin),
        (left.position_ids, right.position_ids),
    ]
    return left.half_width == right.half_width and all(same_value(a, b) for a, b in pairs)


def _norm(query: Stage, key: Stage) -> tuple[QkNormSpec | None] | None:
    if query.norm is None:
        return (None,) if key.norm is None else None
    if key.norm is None:
        return (dataclasses.replace(query.norm.spec, key=False),)
    return (query.norm.spec,) if key.norm.spec == query.norm.spec else None
