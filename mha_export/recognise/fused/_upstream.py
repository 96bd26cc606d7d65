"""From a fused node's inputs up to the projections: what the node's operands went through before.

Passed, where it is plainly there: head transposition and splitting, repetition of key/value heads,
the Concat of a past, rotary embedding, qk-norm. Each is read by its meaning (a repetition is fed
distinct numbers), so that tiled heads never pass for repeated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from mha_export.operands import Heads, Layout, RotaryTables
from mha_export.recognise import _region
from mha_export.recognise._evaluate import Context
from mha_export.recognise.norms import PeeledNorm, peel_norm
from mha_export.recognise.rotary import PeeledRotary, peel_rotary
from mha_export.spec import QkNormSpec, RotarySpec

_REPEATING = frozenset(
    {
        "Concat", "Expand", "Gather", "Identity", "Reshape", "Squeeze", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Lineage:
    """One operand and what it went through, nearest to the node last.

    Attributes:
        heads: before everything below.
        past, present: the two ends of a Concat that appends new tokens to a cache.
    """

    heads: Heads
    norm: PeeledNorm | None = None
    rotary: PeeledRotary | None = None
    past: Heads | None = None
    present: Heads | None = None
    nodes: tuple[ir.Node, ...] = ()
    scale: float = 1.0
    """What the heads were multiplied by on the way (after a normalisation only)."""


def query_lineage(heads: Heads, context: Context, anchor: ir.Node) -> Lineage:
    """The query before rotary and qk-norm, in the plainest layout."""
    return _channels(Lineage(heads=heads), context, anchor)


def key_lineage(heads: Heads, context: Context, anchor: ir.Node, *, cache: bool) -> Lineage:
    """The key before repetition, cache, rotary and qk-norm; ``cache``: a Concat may be one."""
    return _channels(value_lineage(heads, context, cache=cache), context, anchor)


def value_lineage(heads: Heads, context: Context, *, cache: bool) -> Lineage:
    """The value before repetition and cache."""
    found = _unrepeated(Lineage(heads=heads), context)
    if cache:
        found = _uncached(found)
    return replace(found, heads=lowered(found.heads, context))


def _channels(line: Lineage, context: Context, anchor: ir.Node) -> Lineage:
    """Take scale, rotary and norm off as they are met; nothing but layout lies above a norm."""
    for _ in range(4):
        heads = lowered(line.heads, context)
        line = replace(line, heads=heads)
        if line.norm is not None:
            break
        scaled = _scaled(heads, context)
        if scaled is not None:
            node, inner, factor = scaled
            line = replace(
                line,
                heads=replace(heads, value=inner),
                scale=line.scale * factor,
                nodes=(node, *line.nodes),
            )
            continue
        rotary = None if line.rotary else _own_rotary(heads, context, anchor)
        if rotary is not None:
            line = replace(
                line,
                heads=replace(heads, value=rotary.before),
                rotary=rotary,
                nodes=(*rotary.nodes, *line.nodes),
            )
            continue
        norm = peel_norm(heads.value, head_dim=heads.dim, context=context, anchor=anchor)
        if norm is None or (heads.layout is Layout.BSM) != (norm.spec.over == "hidden"):
            break
        line = replace(
            line,
            heads=replace(heads, value=norm.before),
            norm=norm,
            nodes=(*norm.nodes, *line.nodes),
        )
    return replace(line, heads=lowered(line.heads, context))


def _scaled(heads: Heads, context: Context) -> tuple[ir.Node, ir.Value, float] | None:
    """A multiplication of all heads by one constant number."""
    node = heads.value.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return None
    left, right = node.inputs
    pairs = [(left, right)] if node.op_type == "Div" else [(left, right), (right, left)]
    for inner, other in pairs:
        number = context.constant(other)
        if inner is None or number is None or number.size != 1 or not float(number.item()):
            continue
        factor = float(number.item())
        return node, inner, 1.0 / factor if node.op_type == "Div" else factor
    return None


def _own_rotary(heads: Heads, context: Context, anchor: ir.Node) -> PeeledRotary | None:
    found = peel_rotary(heads.value, context=context, anchor=anchor, heads=heads.heads)
    if found is None or found.spec.offset or found.sorted or found.spec.dim > heads.dim:
        return None
    node = heads.value.producer()
    whole = node is not None and node.op_type == "RotaryEmbedding"
    if heads.layout is Layout.BSM and not whole:
        return None
    if whole and node is not None:
        counted = node.attributes.get("num_heads")
        if heads.layout is Layout.BSM and (counted is None or counted.as_int() != heads.heads):
            return None
        if heads.layout is Layout.BSHD:
            return None  # the node reads axis 1 as heads
    return found


def lowered(heads: Heads, context: Context) -> Heads:
    """The same heads before a transposition and a split, as the projection wrote them."""
    sizes = _region.sizes_of(context, heads.value)
    while (node := heads.value.producer()) is not None and sizes is not None:
        inner = node.inputs[0] if node.inputs else None
        if inner is None:
            break
        if node.op_type == "Identity":
            heads = replace(heads, value=inner)
            continue
        if node.op_type == "Transpose" and heads.layout is Layout.BHSD:
            perm = node.attributes.get("perm")
            if perm is None or list(perm.as_ints()) != [0, 2, 1, 3]:
                break
            heads = replace(heads, value=inner, layout=Layout.BSHD)
            continue
        if node.op_type == "Reshape" and heads.layout is Layout.BSHD:
            view = context.sized(sizes)
            below, above = view.shape(inner), view.shape(heads.value)
            width = heads.heads * heads.dim
            if below is None or above is None or below != (*above[:2], width):
                break
            heads = replace(heads, value=inner, layout=Layout.BSM)
            continue
        break
    return heads


def raised(heads: Heads, context: Context) -> tuple[Heads, tuple[ir.Node, ...]]:
    """The output after the transposition and the merge that alone read it."""
    nodes: list[ir.Node] = []
    while (node := _only_reader(heads.value)) is not None:
        after = node.outputs[0]
        if node.op_type == "Transpose" and heads.layout is Layout.BHSD:
            perm = node.attributes.get("perm")
            if perm is None or list(perm.as_ints()) != [0, 2, 1, 3]:
                break
            heads = replace(heads, value=after, layout=Layout.BSHD)
        elif node.op_type == "Reshape" and heads.layout is Layout.BSHD:
            sizes = _region.sizes_of(context, after)
            if sizes is None or node.inputs[0] is not heads.value:
                break
            view = context.sized(sizes)
            before, merged = view.shape(heads.value), view.shape(after)
            if before is None or merged != (*before[:2], heads.heads * heads.dim):
                break
            heads = replace(heads, value=after, layout=Layout.BSM)
        else:
            break
        nodes.append(node)
    return heads, tuple(nodes)


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = tuple(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    return (
        node if node.graph is (producer.graph if (producer := value.producer()) else None) else None
    )


def _unrepeated(line: Lineage, context: Context) -> Lineage:
    """Take a repetition of each key/value head g times in a row off."""
    heads = line.heads
    if heads.layout is not Layout.BHSD:
        return line
    sizes = _region.sizes_of(context, heads.value)
    shape = None if sizes is None else context.sized(sizes).shape(heads.value)
    if sizes is None or shape is None:
        return line
    found: Lineage = line
    for before, nodes in _region.upward(heads.value, _REPEATING):
        below = context.sized(sizes).shape(before)
        if below is None or len(below) != 4 or below[2:] != shape[2:] or below[0] != shape[0]:
            continue
        group = heads.heads // max(1, below[1])
        if below[1] >= heads.heads or below[1] * group != heads.heads:
            continue
        content = np.arange(int(np.prod(below)), dtype=np.float64).reshape(below)
        repeated = context.sized(sizes, {before: content}, wide=True).array(heads.value)
        if repeated is None or not np.array_equal(repeated, np.repeat(content, group, axis=1)):
            continue
        found = replace(
            line,
            heads=replace(heads, value=before, heads=below[1]),
            nodes=(*reversed(nodes), *line.nodes),
        )
    return found


def _uncached(line: Lineage) -> Lineage:
    """Take the Concat of a cache off: the past is an input, the whole goes on to an output."""
    heads = line.heads
    node = heads.value.producer()
    if node is None or node.op_type != "Concat" or heads.layout is not Layout.BHSD:
        return line
    past, new = (*node.inputs, None, None)[:2]
    axis = node.attributes["axis"].as_int()
    if len(node.inputs) != 2 or past is None or new is None or axis not in (2, -2):
        return line
    source = past
    while (above := source.producer()) is not None and above.op_type in ("Identity", "Concat"):
        if len(above.inputs) != 1 or above.inputs[0] is None:
            break
        source = above.inputs[0]
    if not source.is_graph_input():
        return line
    return replace(
        line,
        heads=replace(heads, value=new),
        past=replace(heads, value=source),
        present=replace(heads, value=heads.value) if heads.value.is_graph_output() else None,
        nodes=(node, *line.nodes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreed:
    """Rotary and qk-norm as query and key have them in common."""

    rotary: RotarySpec | None
    tables: RotaryTables | None
    norm: QkNormSpec | None


def turns_queries_alone(agreed: Agreed) -> bool:
    """Whether only the queries are seen to be rotated: keys may be, beyond a cache or a repetition.

    The whole graph shows that, see :mod:`mha_export.recognise._fused_depth`.
    """
    return agreed.rotary is not None and not agreed.rotary.key


def agree(query: Lineage, key: Lineage) -> Agreed | None:
    """The common statement, or None where query and key went through different things."""
    rotary: RotarySpec | None = None
    tables: RotaryTables | None = None
    if query.rotary is not None:
        rotary, tables = query.rotary.spec, query.rotary.tables
        if key.rotary is None:
            rotary = replace(rotary, key=False)
        elif key.rotary.spec != rotary or not _same_tables(tables, key.rotary.tables):
            return None
    elif key.rotary is not None:
        return None
    norm: QkNormSpec | None = None
    if query.norm is not None:
        norm = query.norm.spec
        if key.norm is None:
            norm = replace(norm, key=False)
        elif key.norm.spec != norm:
            return None
    elif key.norm is not None:
        return None
    return Agreed(rotary=rotary, tables=tables, norm=norm)


def joint(
    query: Heads, key: Heads, context: Context, anchor: ir.Node, *, cache: bool
) -> tuple[Lineage, Lineage, Agreed]:
    """Both lineages and what they share; the node's own inputs where they went different ways."""
    lines = (
        query_lineage(query, context, anchor),
        key_lineage(key, context, anchor, cache=cache),
    )
    agreed = agree(*lines)
    if agreed is None:
        nothing = Agreed(rotary=None, tables=None, norm=None)
        return Lineage(heads=query), Lineage(heads=key), nothing
    return (*lines, agreed)


def _same_tables(left: RotaryTables, right: RotaryTables) -> bool:
    pairs = [
        (left.cos, right.cos),
        (left.sin, right.sin),
        (left.position_ids, right.position_ids),
    ]
    return left.half_width == right.half_width and all(same_value(a, b) for a, b in pairs)


def same_value(left: ir.Value | None, right: ir.Value | None, depth: int = 8) -> bool:
    """Whether two values are one, or computed alike from the same inputs."""
    if left is right:
        return True
    if left is None or right is None or depth == 0:
        return False
    above, other = left.producer(), right.producer()
    if above is None or other is None:
        return False
    if above.op_identifier() != other.op_identifier() or left.index() != right.index():
        return False
    if len(above.inputs) != len(other.inputs):
        return False
    if _plain(above.attributes) != _plain(other.attributes):
        return False
    return all(same_value(a, b, depth - 1) for a, b in zip(above.inputs, other.inputs, strict=True))


def _plain(attributes: Mapping[str, ir.Attr]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, attribute in attributes.items():
        value = attribute.value
        plain[name] = (
            value.numpy().tolist()
            if attribute.type is ir.AttributeType.TENSOR
            else tuple(value)
            if isinstance(value, (list, tuple))
            else value
        )
    return plain
