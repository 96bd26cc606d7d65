"""What only the whole list of verdicts decides: ids, shared keys and values, names of dimensions.

Ids come from order and structure alone, never from names, so that copies of a model as text, with
external data or wrapped in functions get the same: the n-th self-attention is ``layer.n.self``; a
cross-attention belongs to the layer of the self-attention before it (``layer.n.cross``), and opens
a layer of its own where there is none. What is no site is ``softmax.n``, n counting all verdicts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from mha_export.errors import SpecError
from mha_export.operands import Heads, Layout
from mha_export.recognise._origin import Origins, is_cross
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Site, Verdict
from mha_export.recognise.fused._node import short
from mha_export.spec import AttentionSpec, Dim, MaskSpec


def finished(verdicts: Sequence[Verdict], scenes: Sequence[Scene]) -> tuple[Verdict, ...]:
    """The verdicts with ids, cross attention, shared K/V and dimension names filled in."""
    origins = Origins()
    crossing = [
        _stated(verdict, scenes, origins) if isinstance(verdict, Site) else verdict
        for verdict in verdicts
    ]
    return _shared(_numbered(crossing))


def _stated(site: Site, scenes: Sequence[Scene], origins: Origins) -> Site:
    spec, operands = site.spec, site.operands
    cross = is_cross(
        operands.query,
        operands.key,
        cached=operands.past_key is not None,
        scenes=scenes,
        origins=origins,
    )
    batch, q_len, kv_len = _dims(site, scenes)
    mask = _with_lengths(site, scenes, q_len, kv_len)
    try:
        stated = spec.replace(
            scale=_plain_number(spec.effective_scale, spec.head_dim**-0.5),
            cross=cross,
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            mask=mask,
        )
    except SpecError:
        stated = spec
    return dataclasses.replace(site, spec=stated)


def _dims(site: Site, scenes: Sequence[Scene]) -> tuple[Dim, Dim, Dim]:
    operands, spec = site.operands, site.spec
    batch = dimension(operands.query.value, 0, scenes, _fallback(spec.batch, "batch"))
    q_len = _length(operands.query, scenes, _fallback(spec.q_len, "q_len"))
    new = _length(operands.key, scenes, _fallback(spec.kv_len, "kv_len"))
    if operands.past_key is None:
        return batch, q_len, new
    past = _length(operands.past_key, scenes, "past")
    if spec.cache is not None and spec.cache.growth != "concat":
        return batch, q_len, past
    if isinstance(past, int) and isinstance(new, int):
        return batch, q_len, past + new
    return batch, q_len, f"{past} + {new}"


def _plain_number(scale: float, default: float) -> float:
    """The scale as an op's fp32 attribute says it: the default, or the short decimal for it."""
    return default if math.isclose(scale, default, rel_tol=2.0**-23) else short(scale)


def _with_lengths(site: Site, scenes: Sequence[Scene], q_len: Dim, kv_len: Dim) -> MaskSpec:
    """The mask, its keep and bias as long as queries and keys where they are so at every size."""
    changes: dict[str, tuple[Dim, ...]] = {}
    for name in ("keep", "bias"):
        value, shape = getattr(site.operands, name), getattr(site.spec.mask, name)
        if value is None or shape is None:
            continue
        dims = list(shape)
        seen = [scene.dims(value) for scene in scenes]
        for place, lengths, dim in (
            (-2, [_queries(site, scene) for scene in scenes], q_len),
            (-1, [_keys(site, scene) for scene in scenes], kv_len),
        ):
            own = [None if d is None or len(d) < -place else d[place] for d in seen]
            if len(dims) >= -place and None not in own and own == lengths:
                dims[place] = dim
        changes[name] = tuple(dims)
    return dataclasses.replace(site.spec.mask, **changes)  # type: ignore[arg-type]


def _queries(site: Site, scene: Scene) -> int | None:
    return _length_at(site.operands.query, scene)


def _keys(site: Site, scene: Scene) -> int | None:
    """All keys: of a buffer its length, else the past and the new ones."""
    operands, cache = site.operands, site.spec.cache
    new = _length_at(operands.key, scene)
    if operands.past_key is None:
        return new
    past = _length_at(operands.past_key, scene)
    if cache is not None and cache.growth != "concat":
        return past
    return None if past is None or new is None else past + new


def _length_at(heads: Heads, scene: Scene) -> int | None:
    dims = scene.dims(heads.value)
    return None if dims is None else dims[2 if heads.layout is Layout.BHSD else 1]


def _fallback(dim: Dim, default: str) -> str:
    return dim if isinstance(dim, str) else default


def _length(heads: Heads, scenes: Sequence[Scene], default: str) -> Dim:
    return dimension(heads.value, 2 if heads.layout is Layout.BHSD else 1, scenes, default)


def dimension(value: ir.Value, axis: int, scenes: Sequence[Scene], default: str) -> Dim:
    """A number where it is the same at all sizes, else the graph's name for it."""
    sizes = []
    for scene in scenes:
        shape = scene.shapes.shape(value)
        sizes.append(None if shape is None or axis >= len(shape) else shape[axis])
    first = sizes[0]
    if first is not None and all(size == first for size in sizes):
        return first
    for name in scenes[0].shapes.sizes:
        if all(scene.shapes.sizes[name] == size for scene, size in zip(scenes, sizes, strict=True)):
            return name
    declared = None if value.shape is None or axis >= len(value.shape) else value.shape[axis]
    symbol = getattr(declared, "value", None)
    return str(symbol) if symbol else default


def _numbered(verdicts: Sequence[Verdict]) -> list[Verdict]:
    layer = -1
    taken: dict[str, int] = {}
    result: list[Verdict] = []
    for index, verdict in enumerate(verdicts):
        if not isinstance(verdict, Site):
            result.append(dataclasses.replace(verdict, id=f"softmax.{index}"))
            continue
        if not verdict.spec.cross:
            layer += 1
        kind = "cross" if verdict.spec.cross else "self"
        stem = f"layer.{max(layer, 0)}.{kind}"
        count = taken.get(stem, 0)
        taken[stem] = count + 1
        result.append(dataclasses.replace(verdict, id=f"{stem}.{count}" if count else stem))
    return result


def _shared(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Sites that read the same keys and values as an earlier one."""
    first: dict[tuple[object, ...], str] = {}
    result: list[Verdict] = []
    for verdict in verdicts:
        if not isinstance(verdict, Site):
            result.append(verdict)
            continue
        operands = verdict.operands
        if operands.key.value is operands.value.value:
            result.append(verdict)
            continue
        key = (
            operands.key.value,
            operands.key.layout,
            operands.value.value,
            operands.value.layout,
            None if operands.past_key is None else operands.past_key.value,
        )
        owner = first.setdefault(key, verdict.id)
        spec: AttentionSpec = verdict.spec
        if owner != verdict.id:
            spec = spec.replace(kv_source=owner)
        result.append(dataclasses.replace(verdict, spec=spec))
    return tuple(result)
