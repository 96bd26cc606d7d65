"""Normalisation of queries and keys, read by feeding random channels and comparing with its law.

The laws over the last axis, n channels wide, are those of :class:`mha_export.spec.QkNormSpec`::

    rms    x / sqrt(mean(x^2) + epsilon) * w + b
    layer  (x - mean(x)) / sqrt(var(x) + epsilon) * w + b
    l2     x / max(|x|, epsilon) * w + b

Epsilon is not looked up but solved for: small channels show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.recognise import _region
from mha_export.recognise._evaluate import Context
from mha_export.recognise._region import Region
from mha_export.spec import QkNormSpec

Floats = NDArray[np.float64]
Kind = Literal["rms", "layer", "l2"]

_WHOLE = frozenset(
    {
        "LayerNormalization", "LpNormalization", "RMSNormalization",
        "SimplifiedLayerNormalization",
    }
)  # fmt: skip
_REDUCING = _WHOLE | {"ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"}
_OPS = _REDUCING | {
    "Add", "Cast", "Clip", "Div", "Expand", "Identity", "Max", "Mul", "Pow", "Reciprocal", "Sqrt",
    "Sub",
}  # fmt: skip
_LAST = _WHOLE | {"Add", "Cast", "Div", "Mul"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PeeledNorm:
    """A normalisation taken off: ``normed = norm(before) * weight + bias``.

    Attributes:
        weight: [n], or None. bias: [n], or None.
        before: of the same shape and axis order as the normed value.
    """

    spec: QkNormSpec
    weight: ir.Value | None
    bias: ir.Value | None
    before: ir.Value
    nodes: tuple[ir.Node, ...]


def peel_norm(
    normed: ir.Value, *, head_dim: int, context: Context, anchor: ir.Node
) -> PeeledNorm | None:
    """Take the normalisation over the last axis off, or None when there is none.

    Args:
        normed: a query or key, per head or with all heads in its last axis.
        head_dim: ``over`` is ``head`` when the last axis is that wide, else ``hidden``.
        context: of the graph copy; a weight of more axes than one is flattened in it.
        anchor: a node of the attention, after the normalisation.
    """
    node = normed.producer()
    if node is None or node.op_type not in _LAST:
        return None
    sizes = _region.sizes_of(context, normed)
    shape = None if sizes is None else context.sized(sizes).shape(normed)
    if sizes is None or shape is None or len(shape) < 2 or shape[-1] < 2:
        return None
    best: tuple[Region, _Found] | None = None
    for region in _region.regions(context, normed, _OPS, sizes=sizes):
        if not any(inner.op_type in _REDUCING for inner in region.nodes):
            continue
        found = _law_of(region, shape, sizes, context)
        if found is None:
            continue
        best = (region, found) if best is None or found[0] == "layer" else best
        centred = region.before.producer()
        if found[0] == "layer" or centred is None or centred.op_type != "Sub":
            break  # rms of a difference may be a layer norm seen halfway
    if best is None:
        return None
    region, (kind, epsilon, weight, bias) = best
    return PeeledNorm(
        spec=QkNormSpec(
            kind=kind,
            epsilon=epsilon,
            over="head" if shape[-1] == head_dim else "hidden",
            weight=weight is not None,
            bias=bias is not None,
        ),
        weight=_flat(weight, shape[-1], sizes, context, anchor),
        bias=_flat(bias, shape[-1], sizes, context, anchor),
        before=region.before,
        nodes=region.nodes,
    )


_Found = tuple[Kind, float, ir.Value | None, ir.Value | None]


def _law_of(
    region: Region, shape: tuple[int, ...], sizes: Mapping[str, int], context: Context
) -> _Found | None:
    """The law, its epsilon and its weight and bias, confirmed at three magnitudes of x."""
    if len(region.sides) > 2:
        return None
    rng = np.random.default_rng(23)
    contents: dict[ir.Value, np.ndarray] = {}
    for side in region.sides:
        extent = context.sized(sizes).shape(side)
        if extent is None or int(np.prod(extent)) != shape[-1] or extent[-1] != shape[-1]:
            return None
        contents[side] = rng.uniform(0.5, 1.5, extent)
    unit = rng.standard_normal(shape) + 0.25

    def normed(x: Floats) -> Floats | None:
        _, y = _region.run(context, region, {**contents, region.before: x}, sizes)
        return y if y is not None and y.shape == x.shape else None

    for weight, bias in _roles(region.sides):
        scale = 1.0 if weight is None else contents[weight].reshape(-1)
        shift = 0.0 if bias is None else contents[bias].reshape(-1)
        for kind in _KINDS:
            epsilon = _epsilon(kind, unit, normed, scale, shift)
            if epsilon is None:
                continue
            if all(
                (y := normed(size * unit)) is not None
                and np.allclose(
                    y, _apply(kind, size * unit, epsilon) * scale + shift, rtol=1e-6, atol=1e-9
                )
                for size in (1.0, 1e-3, 30.0)
            ):
                return kind, _rounded(epsilon), weight, bias
    return None


_KINDS: tuple[Kind, ...] = ("rms", "layer", "l2")


def _roles(sides: Sequence[ir.Value]) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    if not sides:
        yield None, None
    elif len(sides) == 1:
        yield sides[0], None
        yield None, sides[0]
    else:
        yield sides[0], sides[1]
        yield sides[1], sides[0]


def _apply(kind: Kind, x: Floats, epsilon: float) -> Floats:
    if kind == "l2":
        length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
        result: Floats = x / np.maximum(length, epsilon)
        return result
    centred = x - x.mean(axis=-1, keepdims=True) if kind == "layer" else x
    scaled: Floats = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + epsilon)
    return scaled


def _epsilon(
    kind: Kind,
    unit: Floats,
    normed: Callable[[Floats], Floats | None],
    scale: Floats | float,
    shift: Floats | float,
) -> float | None:
    """Solve the law for epsilon where the channels are so small that it tells."""
    small = (1e-30 if kind == "l2" else 1e-4) * unit
    y = normed(small)
    if y is None or not np.isfinite(y).all():
        return 0.0 if kind == "l2" else None
    core = (y - shift) / scale
    if kind == "l2":
        if not core.any():
            return None
        ratio = float(np.median(np.abs(small / np.where(core == 0, np.nan, core))))
        return 0.0 if ratio < 1e-25 else ratio
    centred = small - small.mean(axis=-1, keepdims=True) if kind == "layer" else small
    place = np.unravel_index(np.argmax(np.abs(core)), core.shape)
    if core[place] == 0:
        return None
    variance = np.mean(centred * centred, axis=-1)[place[:-1]]
    epsilon = float((centred[place] / core[place]) ** 2 - variance)
    return max(epsilon, 0.0) if epsilon > -1e-14 else None


def _rounded(epsilon: float) -> float:
    """The short decimal that is the same number in fp32."""
    short = float(f"{epsilon:.4g}")
    return short if np.isclose(short, epsilon, rtol=1e-5, atol=1e-16) else epsilon


def _flat(
    value: ir.Value | None,
    width: int,
    sizes: Mapping[str, int],
    context: Context,
    anchor: ir.Node,
) -> ir.Value | None:
    """The weight as [n], flattened by a Reshape where it has more axes."""
    if value is None or context.sized(sizes).shape(value) == (width,):
        return value
    target = np.asarray([-1], np.int64)
    (flat,) = context.derive("Reshape", [value, target], before=anchor)
    flat.shape = ir.Shape([width])
    if value.dtype is not None:
        flat.type = ir.TensorType(value.dtype)
    return flat
