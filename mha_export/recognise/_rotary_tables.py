"""The tables of a rotary embedding: where they come from, and the value that can be bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.recognise._evaluate import Context
from mha_export.spec import RotaryStyle

_AXES_ONLY = frozenset({"Identity", "Squeeze", "Unsqueeze"})
_POINTWISE = frozenset({"Cast", "Cos", "Identity", "Mul", "Neg", "Sin"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """One table as it enters a region.

    Attributes:
        side: a value of the graph that meets the channels.
        root: the value it is before axes are added or removed only to broadcast.
        shape: of the root, at the sizes looked at.
        headless: it enters a RotaryEmbedding node, which adds the axis of the heads by itself.
    """

    side: ir.Value
    root: ir.Value
    shape: tuple[int, ...]
    headless: bool = False

    def met(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the side as it broadcasts against the channels."""
        return (array_shape[0], 1, *array_shape[1:]) if self.headless else array_shape


def table_of(side: ir.Value, context: Context, sizes: Mapping[str, int]) -> Table | None:
    """Strip the axes that only serve to broadcast."""
    root = side
    while (node := root.producer()) is not None and node.op_type in _AXES_ONLY:
        inner = node.inputs[0]
        if inner is None:
            return None
        root = inner
    shape = context.sized(sizes).shape(root)
    if shape is None or not shape or shape[-1] < 1:
        return None
    if shape[-1] == 1 and side is not root:  # the channels' own trailing axis was stripped too
        return None
    uses = [usage.node.op_type for usage in side.uses()]
    return Table(side=side, root=root, shape=shape, headless="RotaryEmbedding" in uses)


def repeats(table: Table, style: RotaryStyle, context: Context, sizes: Mapping[str, int]) -> bool:
    """Whether a table of full width truly holds each number twice, where the style puts it."""
    key = ("repeats", table.root, style)
    if key not in context.memo:
        shown = _by_content(table, style, context, sizes)
        if shown is None:
            shown = style is RotaryStyle.HALF and _by_structure(table.root)
        context.memo[key] = shown
    return bool(context.memo[key])


def _by_content(
    table: Table, style: RotaryStyle, context: Context, sizes: Mapping[str, int]
) -> bool | None:
    """Evaluate the table at random positions; None where it reads more and that decides.

    Numbers looked up are given at random too: what is repeated then is repeated whatever they are.
    """
    rng = np.random.default_rng(19)
    contents: dict[ir.Value, np.ndarray] = {}
    looked_up = False
    for source in context.sources(table.root):
        shape = context.sized(sizes).shape(source)
        if shape is None:
            return None
        if source.dtype is not None and source.dtype.is_integer():
            contents[source] = rng.integers(0, 7, shape).astype(source.dtype.numpy())
        else:
            looked_up = True
            contents[source] = rng.standard_normal(shape)
    array = context.sized(sizes, contents, wide=True).array(table.root)
    if array is None or array.ndim == 0:
        return None
    half = array.shape[-1] // 2
    if style is RotaryStyle.HALF:
        repeated = bool(np.array_equal(array[..., :half], array[..., half:]))
    else:
        repeated = bool(np.array_equal(array[..., ::2], array[..., 1::2]))
    return None if looked_up and not repeated else repeated


def _by_structure(root: ir.Value) -> bool:
    """A Concat of one value with itself, and after it only what treats all channels alike."""
    value: ir.Value | None = root
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Concat":
            axis = node.attributes["axis"].as_int()
            same = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return same and axis in (-1, len(value.shape or ()) - 1)
        if node.op_type not in _POINTWISE:
            return False
        if node.op_type == "Mul":
            scalars = [v for v in node.inputs if v is not None and _is_scalar(v)]
            others = [v for v in node.inputs if v is not None and not _is_scalar(v)]
            if len(scalars) != 1 or len(others) != 1:
                return False
            value = others[0]
        else:
            value = node.inputs[0]
    return False


def _is_scalar(value: ir.Value) -> bool:
    constant = value.const_value
    return constant is not None and constant.size == 1


def bind(
    table: Table,
    channels: tuple[int, ...],
    context: Context,
    sizes: Mapping[str, int],
    anchor: ir.Node,
) -> ir.Value | None:
    """The table as [b or 1, s, width]: the root itself, or derived from it.

    ``channels`` is the shape of what it rotates; None where the table runs along other axes.
    """
    view = context.sized(sizes)
    seen = view.shape(table.side)
    if seen is None:
        return None
    seen = table.met(seen)
    if len(seen) == len(channels) + 1:
        seen = seen[:-1]
    aligned = (1,) * (len(channels) - len(seen)) + seen
    lengths = [axis for axis, n in enumerate(aligned[:-1]) if n != 1 and axis > 0]
    if len(lengths) != 1 or (aligned[0] not in (1, channels[0])):
        return None
    wanted = (aligned[0], aligned[lengths[0]], aligned[-1])
    if table.shape == wanted:
        return table.root
    if len(table.shape) == 2 and table.shape == wanted[1:]:
        return _derived(context, "Unsqueeze", table.root, (0,), anchor)
    shape = table.shape
    extra = [a for a, n in enumerate(shape[:-1]) if n == 1 and a != 0]
    if len(shape) > 3 and len(extra) >= len(shape) - 3:
        axes = tuple(extra[: len(shape) - 3])
        return _derived(context, "Squeeze", table.root, axes, anchor)
    if len(shape) == 3 and shape[1] == 1 and aligned[0] == 1:
        flat = _derived(context, "Squeeze", table.root, (1,), anchor)
        return _derived(context, "Unsqueeze", flat, (0,), anchor)
    return None


def _derived(
    context: Context,
    op_type: str,
    value: ir.Value,
    axes: tuple[int, ...],
    anchor: ir.Node,
) -> ir.Value:
    if context.opset >= 13:
        inputs: list[ir.Value | np.ndarray | None] = [value, np.asarray(axes, np.int64)]
        (result,) = context.derive(op_type, inputs, before=anchor)
    else:
        (result,) = context.derive(op_type, [value], {"axes": axes}, before=anchor)
    if value.dtype is not None:
        result.type = ir.TensorType(value.dtype)
    if value.shape is not None:
        dims = list(value.shape)
        if op_type == "Unsqueeze":
            dims.insert(0, 1)
        else:
            dims = [dim for axis, dim in enumerate(dims) if axis not in axes]
        result.shape = ir.Shape(dims)
    return result
