"""Rotary embedding, read by feeding random channels and tables and comparing with its law.

However a graph spells it (rotate-half by Slice, Neg and Concat; Split; stride-2 slices; pairs by
Reshape; complex products), rotation is bilinear in the channels and the tables, so random ones
tell it from anything else::

    half:        (x[i], x[i + r/2]) -> (x[i] c - x[i + r/2] s,  x[i + r/2] c + x[i] s)
    interleaved: (x[2i], x[2i + 1]) -> (x[2i] c - x[2i + 1] s,  x[2i + 1] c + x[2i] s)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.operands import RotaryTables
from mha_export.recognise import _region
from mha_export.recognise._evaluate import Context
from mha_export.recognise._region import Region
from mha_export.recognise._rotary_tables import Table, bind, repeats, table_of
from mha_export.spec import RotarySpec, RotaryStyle

Floats = NDArray[np.float64]

OPS = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Gather", "Identity", "MatMul", "Mul", "Neg", "Pad",
        "Reshape", "RotaryEmbedding", "Slice", "Split", "Squeeze", "Sub", "Sum", "Tile",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class PeeledRotary:
    """A rotation taken off: ``rotated = rotary(before)``.

    Attributes:
        tables: with only ``cos``, ``sin`` and ``position_ids`` set (of this tensor alone).
        before: the value before rotation, of the same shape and axis order as the rotated one.
        nodes: the nodes between ``before`` and the rotated value.
        derived: nodes put into the graph for ``before``.
        sorted: the rotated channels come out with all first ones of the pairs before all second
            ones (DeepSeek): scores are the same when query and key are both sorted, and only then.
    """

    spec: RotarySpec
    tables: RotaryTables
    before: ir.Value
    nodes: tuple[ir.Node, ...]
    sorted: bool = False
    derived: tuple[ir.Node, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Law:
    style: RotaryStyle
    dim: int
    offset: int
    sorted: bool
    swapped: bool
    half_width: bool


def peel_rotary(
    rotated: ir.Value, *, context: Context, anchor: ir.Node, heads: int | None = None
) -> PeeledRotary | None:
    """Take the rotation off a query or key whose last axis is the channels of a head.

    The other axes may lie in any order; a ``RotaryEmbedding`` node over [b, s, heads * d] is taken
    off as well. None where there is no rotation, or one that the law does not cover.

    Args:
        rotated: the value that enters the score product.
        context: of the graph copy; tables without their broadcast axes are derived in it.
        anchor: a node of the attention, after the rotation; derived values come before it.
        heads: number of heads in the value, needed only for a RotaryEmbedding node over 3 axes.
    """
    node = rotated.producer()
    if node is None:
        return None
    if node.op_type == "RotaryEmbedding":
        return _peel_node(node, context=context, anchor=anchor, heads=heads)
    sizes = _region.sizes_of(context, rotated)
    if sizes is None or node.op_type not in ("Add", "Concat", "Reshape", "Sub", "Cast"):
        return None
    for region in _region.regions(context, rotated, OPS, sizes=sizes):
        found = peel_region(region, sizes, context=context, anchor=anchor)
        if found is not None:
            return found
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Within:
    """A rotation of some channels that are joined with others afterwards.

    ``given``: contents of values that enter beside channels and tables. ``part``: the channels in
    question of what comes out, in the order of the axes they had before; None: it is no such thing.
    """

    given: Mapping[ir.Value, Floats]
    part: Callable[[Floats], Floats | None]


def peel_region(
    region: Region,
    sizes: Mapping[str, int],
    *,
    context: Context,
    anchor: ir.Node,
    within: Within | None = None,
) -> PeeledRotary | None:
    """The rotation that a region is; None where it is none."""
    tables = _two_tables(region, sizes, context)
    shape = context.sized(sizes).shape(region.before)
    if tables is None or shape is None or len(shape) < 3:
        return None
    for law in _laws(region, tables, shape, sizes, context, within):
        cos, sin = (tables[1], tables[0]) if law.swapped else tables
        whole = law.style if not law.half_width else None
        if whole is not None and not all(repeats(t, whole, context, sizes) for t in (cos, sin)):
            continue
        bound = [bind(t, shape, context, sizes, anchor) for t in (cos, sin)]
        if bound[0] is None or bound[1] is None:
            return None
        return PeeledRotary(
            spec=RotarySpec(style=law.style, dim=law.dim, offset=law.offset),
            tables=RotaryTables(cos=bound[0], sin=bound[1], half_width=law.half_width),
            before=region.before,
            nodes=region.nodes,
            sorted=law.sorted,
        )
    return None


def _two_tables(
    region: Region, sizes: Mapping[str, int], context: Context
) -> tuple[Table, Table] | None:
    """The two tables that enter the region, whatever axes they are given on the way in."""
    found: dict[ir.Value, Table] = {}
    for side in region.sides:
        table = table_of(side, context, sizes)
        if table is None:
            return None
        found.setdefault(table.root, table)
        if len(found) > 2:
            return None
    if len(found) != 2:
        return None
    first, second = found.values()
    return first, second


def _laws(
    region: Region,
    tables: tuple[Table, Table],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    context: Context,
    within: Within | None,
) -> Iterator[Law]:
    """Every law that random channels and tables of its kind confirm."""
    rng = np.random.default_rng(17)
    x = rng.standard_normal(shape)
    width = tables[0].shape[-1]
    if tables[1].shape[-1] != width:
        return
    repeated: tuple[RotaryStyle | None, ...] = (None, RotaryStyle.HALF, RotaryStyle.INTERLEAVED)
    for style in repeated:
        dim = 2 * width if style is None else width
        if dim > shape[-1] or dim % 2:
            continue
        fed = [_table_content(rng, table.shape, style) for table in tables]
        contents = {region.before: x, **(within.given if within else {})}
        for table, content in zip(tables, fed, strict=True):
            contents[table.root] = content
        view, y = _region.run(context, region, contents, sizes)
        if within is not None and y is not None:
            y = within.part(y)
        if y is None or y.shape != x.shape:
            continue
        halves = [_as_seen(view.array(t.side), t, len(shape), style) for t in tables]
        if halves[0] is None or halves[1] is None:
            continue
        pair = (halves[0], halves[1])
        yield from _confirmed(x, y, pair, dim, (style,) if style else tuple(RotaryStyle), style)


def _confirmed(
    x: Floats,
    y: Floats,
    tables: tuple[Floats, Floats],
    dim: int,
    styles: tuple[RotaryStyle, ...],
    repeated: RotaryStyle | None,
) -> Iterator[Law]:
    changed = np.nonzero(np.any(x != y, axis=tuple(range(x.ndim - 1))))[0]
    if len(changed) == 0:
        return
    offset = int(changed[0])
    if offset + dim > x.shape[-1] or changed[-1] >= offset + dim:
        return
    part = slice(offset, offset + dim)
    for style in styles:
        for swapped in (False, True):
            cos, sin = tables[::-1] if swapped else tables
            try:
                turned = rotated_channels(x[..., part], cos, sin, style)
            except ValueError:  # the tables lie along other axes
                continue
            for sort in (False, True):
                expected = _sorted(turned) if sort else turned
                if sort and style is not RotaryStyle.INTERLEAVED:
                    continue
                if np.allclose(expected, y[..., part], rtol=1e-9, atol=1e-9):
                    yield Law(
                        style=style,
                        dim=dim,
                        offset=offset,
                        sorted=sort,
                        swapped=swapped,
                        half_width=repeated is None,
                    )


def rotated_channels(x: Floats, cos: Floats, sin: Floats, style: RotaryStyle) -> Floats:
    """The law over the last axis; ``cos`` and ``sin`` hold one number a pair.

    Errors:
        ValueError: the tables do not broadcast against the pairs.
    """
    half = x.shape[-1] // 2
    first, second = (
        (x[..., :half], x[..., half:]) if style is RotaryStyle.HALF else (x[..., ::2], x[..., 1::2])
    )
    turned = (first * cos - second * sin, second * cos + first * sin)
    if turned[0].shape != first.shape:
        raise ValueError("tables of more axes than the channels")
    if style is RotaryStyle.HALF:
        return np.concatenate(turned, axis=-1)
    return np.stack(turned, axis=-1).reshape(x.shape)


def _sorted(x: Floats) -> Floats:
    return np.concatenate((x[..., ::2], x[..., 1::2]), axis=-1)


def _table_content(
    rng: np.random.Generator, shape: tuple[int, ...], style: RotaryStyle | None
) -> Floats:
    content = rng.standard_normal(shape)
    if style is RotaryStyle.HALF:
        content[..., shape[-1] // 2 :] = content[..., : shape[-1] // 2]
    elif style is RotaryStyle.INTERLEAVED:
        content[..., 1::2] = content[..., ::2]
    return content


def _as_seen(
    array: np.ndarray | None, table: Table, rank: int, style: RotaryStyle | None
) -> Floats | None:
    """One number a pair, from a table as it meets the channels."""
    if array is None:
        return None
    array = array.reshape(table.met(array.shape))
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if style is RotaryStyle.HALF:
        return array[..., : array.shape[-1] // 2]
    return array[..., ::2] if style is RotaryStyle.INTERLEAVED else array


def _peel_node(
    node: ir.Node, *, context: Context, anchor: ir.Node, heads: int | None
) -> PeeledRotary | None:
    """A node of ``ai.onnx`` (x, cos, sin, ids) or of ``com.microsoft`` (x, ids, cos, sin)."""
    inputs = [*node.inputs, None, None, None, None][:4]
    contrib = node.domain == "com.microsoft"
    x, cos, sin, ids = inputs if not contrib else (inputs[0], inputs[2], inputs[3], inputs[1])
    if x is None or cos is None or sin is None or (contrib and ids is None):
        return None
    sizes = _region.sizes_of(context, x)
    view = None if sizes is None else context.sized(sizes)
    table, shape = (None, None) if view is None else (view.shape(cos), view.shape(x))
    if view is None or table is None or shape is None:
        return None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if attributes.get("scale", 1.0) != 1.0 or attributes.get("is_packed_batching", 0):
        return None
    if contrib and ids is not None and len(view.shape(ids) or ()) != 2:
        return None  # [1]: one offset for the whole batch, no position per token
    width = attributes.get("rotary_embedding_dim", 0)
    interleaved = bool(attributes.get("interleaved", 0))
    spec = RotarySpec(
        style=RotaryStyle.INTERLEAVED if interleaved else RotaryStyle.HALF,
        dim=width or 2 * table[-1],
    )
    if ids is not None:
        spec = replace(spec, positions="input")
    if 2 * table[-1] != spec.dim:
        return None
    return PeeledRotary(
        spec=spec,
        tables=RotaryTables(cos=cos, sin=sin, position_ids=ids, half_width=True),
        before=x,
        nodes=(node,),
    )
