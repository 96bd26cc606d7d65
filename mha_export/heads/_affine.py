"""The affine map between two values of a graph, read off by evaluation.

Between a layer's input and its queries lie a MatMul and a bias, or a Gemm between two Reshapes, or
one packed projection and a Split, or an Einsum: many spellings of ``y = x W + b`` at every
position. Which one it is does not matter: ``b`` is what zeros give and row i of ``W`` what the
i-th unit vector gives less ``b``, evaluated in float64. That the map *is* affine and the same at
every position is then checked on random input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mha_export.operands import Heads, Layout
from mha_export.recognise._evaluate import Context
from mha_export.recognise._region import sizes_of
from mha_export.rewrite._heads import from_bhsd, to_bhsd

Floats = NDArray[np.float64]

_MOVES = frozenset(
    {"Cast", "Dropout", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
     "Transpose", "Unsqueeze"}
)  # fmt: skip
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Sub"})
_PRODUCTS = frozenset({"Conv", "Einsum", "Gemm", "MatMul"})
_AGREEMENT = 1e-9
"""Relative to the largest output: evaluation is in float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine:
    """``y[h, d] = sum_m x[m] weight[m, h, d] + bias[h, d]`` at every position.

    ``source`` is x, [b, s, m], or [s, b, m] where ``by_length``.
    """

    source: ir.Value
    weight: Floats
    bias: Floats
    by_length: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputMap:
    """``y[m] = sum_{h, e} context[h, e] weight[h, e, m] + bias[m]`` at every position.

    ``result`` is y, [b, s, m], or [s, b, m] where ``by_length``.
    """

    result: ir.Value
    weight: Floats
    bias: Floats
    by_length: bool


def projection_of(heads: Heads, context: Context) -> Affine | str:
    """What ``heads`` is projected from, or why that cannot be told."""
    sizes = sizes_of(context, heads.value)
    if sizes is None:
        return f"the shape of {heads.value.name!r} is not known"
    source = _source_of(heads.value, context, sizes)
    if isinstance(source, str):
        return source
    sizes = _roomy(source, sizes, context)
    shape = context.sized(sizes).shape(source)
    assert shape is not None

    def run(x: Floats, by_length: bool) -> Floats | None:
        fed = x.swapaxes(0, 1) if by_length else x
        y = context.sized(sizes, {source: fed}, wide=True).array(heads.value)
        if y is None:
            return None
        y = to_bhsd(y.astype(np.float64), heads).swapaxes(1, 2)
        return y.reshape(-1, heads.heads * heads.dim)

    what = f"{source.name!r} to {heads.value.name!r}"
    swapped = (shape[1], shape[0], shape[2])
    found = _in_either_order(run, {False: shape, True: swapped}, what)
    if isinstance(found, str):
        return found
    weight, bias, by_length = found
    return Affine(
        source=source,
        weight=weight.reshape(-1, heads.heads, heads.dim),
        bias=bias.reshape(heads.heads, heads.dim),
        by_length=by_length,
    )


def output_projection_of(heads: Heads, context: Context) -> OutputMap | str:
    """What the context ``heads`` is projected to, or why that cannot be told."""
    sizes = sizes_of(context, heads.value)
    if sizes is None:
        return f"the shape of {heads.value.name!r} is not known"
    result = _result_of(heads.value, context, sizes)
    if isinstance(result, str):
        return result
    sizes = _roomy(heads.value, sizes, context, axis=2 if heads.layout is Layout.BHSD else 1)
    shape = context.sized(sizes).shape(heads.value)
    if shape is None:
        return f"the shape of {heads.value.name!r} is not known"
    length = shape[2] if heads.layout is Layout.BHSD else shape[1]
    flat = (shape[0], length, heads.heads * heads.dim)

    def run(x: Floats, by_length: bool) -> Floats | None:
        split = x.reshape(shape[0], length, heads.heads, heads.dim).swapaxes(1, 2)
        fed = from_bhsd(split, heads)
        y = context.sized(sizes, {heads.value: fed}, wide=True).array(result)
        if y is None:
            return None
        y = y.astype(np.float64)
        return (y.swapaxes(0, 1) if by_length else y).reshape(-1, y.shape[-1])

    what = f"{heads.value.name!r} to {result.name!r}"
    found = _in_either_order(run, {False: flat, True: flat}, what)
    if isinstance(found, str):
        return found
    weight, bias, by_length = found
    return OutputMap(
        result=result,
        weight=weight.reshape(heads.heads, heads.dim, -1),
        bias=bias,
        by_length=by_length,
    )


def _in_either_order(
    run: Callable[[Floats, bool], Floats | None],
    shapes: Mapping[bool, tuple[int, ...]],
    what: str,
) -> tuple[Floats, Floats, bool] | str:
    """Read off with positions in batch-first order, then in length-first order."""
    words = ""
    for by_length in (False, True):
        found = _read_off(_ordered(run, by_length), shapes[by_length], what)
        if not isinstance(found, str):
            return (*found, by_length)
        words = words or found
    return words


def _ordered(
    run: Callable[[Floats, bool], Floats | None], by_length: bool
) -> Callable[[Floats], Floats | None]:
    return lambda x: run(x, by_length)


def _read_off(
    run: Callable[[Floats], Floats | None], shape: tuple[int, ...], what: str
) -> tuple[Floats, Floats] | str:
    """Weight [inputs, outputs] and bias [outputs] of ``run`` over arrays of ``shape``."""
    width, rows = shape[-1], int(np.prod(shape[:-1]))
    if rows == 0 or width == 0:
        return f"{what}: an empty tensor"
    zeros = run(np.zeros(shape))
    if zeros is None:
        return f"{what}: depends on more than this value and constants"
    if len(zeros) != rows:
        return f"{what}: {rows} positions become {len(zeros)}"
    bias: Floats = zeros[0]
    weight = np.empty((width, zeros.shape[1]))
    for start in range(0, width, rows):
        count = min(rows, width - start)
        units = np.zeros((rows, width))
        units[np.arange(count), start + np.arange(count)] = 1.0
        made = run(units.reshape(shape))
        if made is None:
            return f"{what}: depends on more than this value and constants"
        weight[start : start + count] = made[:count] - bias
    probe = np.random.default_rng(0).standard_normal((rows, width))
    expected = probe @ weight + bias
    made = run(probe.reshape(shape))
    assert made is not None
    error = float(np.max(np.abs(made - expected), initial=0.0))
    if not error <= _AGREEMENT * max(1.0, float(np.max(np.abs(expected), initial=0.0))):
        return f"{what}: not one linear layer applied at every position"
    return weight, bias


def _roomy(
    value: ir.Value, sizes: Mapping[str, int], context: Context, *, axis: int = 1
) -> Mapping[str, int]:
    """Sizes at which the sequence is long enough to try every channel at once, where it may be."""
    dim = None if value.shape is None or len(value.shape) <= axis else value.shape[axis]
    name = dim.value if isinstance(dim, ir.SymbolicDim) else None
    if name not in sizes:
        return sizes
    shape = context.sized(sizes).shape(value)
    assert shape is not None
    longer = {**sizes, str(name): int(max(shape))}
    return longer if context.sized(longer).shape(value) is not None else sizes


def _source_of(value: ir.Value, context: Context, sizes: Mapping[str, int]) -> ir.Value | str:
    """The [b, s, m] value above the first product with a constant."""
    current, projected = value, False
    for _ in range(64):
        shape = context.sized(sizes).shape(current)
        if projected and shape is not None and len(shape) == 3:
            return current
        node = current.producer()
        if node is None:
            return f"{value.name!r} is not projected from anything: it comes from outside the graph"
        moving = [item for item in node.inputs if item is not None and context.sources(item)]
        known = node.op_type in _MOVES | _ELEMENTWISE | _PRODUCTS and node.domain == ""
        if not known or len(moving) != 1 or (projected and node.op_type not in _MOVES):
            return (
                f"above {value.name!r} stands {node.op_type} {node.name!r}; expected one linear "
                "layer with stored weights"
            )
        projected = projected or node.op_type in _PRODUCTS
        current = moving[0]
    return f"no linear layer was found above {value.name!r}"


def _result_of(value: ir.Value, context: Context, sizes: Mapping[str, int]) -> ir.Value | str:
    """The value after the product with a constant that alone reads ``value``, and its bias."""
    current, projected = value, False
    for _ in range(64):
        following = _only_reader(current)
        shape = context.sized(sizes).shape(current)
        steps = following is not None and _goes_on(following, current, context)
        ranked = shape is not None and len(shape) == 3
        if projected and ranked and not (steps and following.op_type == "Add"):  # type: ignore[union-attr]
            return current
        if following is None or not steps or (projected and following.op_type in _PRODUCTS):
            return (
                f"the context {value.name!r} is not read by one linear layer with stored weights "
                "alone"
            )
        projected = projected or following.op_type in _PRODUCTS
        current = following.outputs[0]
    return f"no linear layer was found below {value.name!r}"


def _goes_on(node: ir.Node, value: ir.Value, context: Context) -> bool:
    known = node.op_type in _MOVES | _ELEMENTWISE | _PRODUCTS and node.domain == ""
    others = [item for item in node.inputs if item is not None and item is not value]
    used = sum(1 for output in node.outputs if output.uses() or output.is_graph_output())
    return known and used == 1 and not any(context.sources(item) for item in others)


def _only_reader(value: ir.Value) -> ir.Node | None:
    if value.is_graph_output():
        return None
    users = {node for node, _ in value.uses() if node.op_type not in ("Shape", "Size")}
    return next(iter(users)) if len(users) == 1 else None
