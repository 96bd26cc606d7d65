"""A layer written anew with other heads: projections, attention and output projection.

The attention is emitted in the ``primitive`` form with the site's own mask, rotary tables and
cache; the usual export then finds it like any other and states it as each target likes it best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.forms import FormParams, Scope, Unsupported, form_named
from mha_export.forms._layout import as_layout, dimension, ints, numpy_dtype
from mha_export.heads._affine import Affine, Floats
from mha_export.heads._layers import HeadModel, Layer
from mha_export.operands import Heads, Layout, Operands
from mha_export.recognise import Site
from mha_export.rewrite._clone import ClonedModel
from mha_export.rewrite._emit import SITE
from mha_export.rewrite._splice import (
    Names,
    remove_dead_nodes,
    restore_order,
    take_place,
)
from mha_export.rewrite.opset import model_opset, raise_opset
from mha_export.spec import AttentionSpec

FORM = "primitive"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewiring:
    """The heads a layer is to have. Arrays are as in :class:`Affine` and :class:`OutputMap`.

    Attributes:
        query, key, value: [m, heads, width]; output [h, e, m]. ``biases`` in the same order.
        origin: for each query head the old one whose mask row, sink and slope it has.
        kv_origin: for each key/value head the old one whose place in the cache it takes.
    """

    layer: Layer
    query: Floats
    key: Floats
    value: Floats
    output: Floats
    biases: tuple[Floats, Floats, Floats, Floats]
    origin: tuple[int, ...]
    kv_origin: tuple[int, ...]

    @property
    def spec(self) -> AttentionSpec:
        old = self.layer.spec
        slopes = old.mask.alibi_slopes
        mask = dataclasses.replace(
            old.mask,
            alibi_slopes=None if slopes is None else tuple(slopes[head] for head in self.origin),
            keep=_heads_in(old.mask.keep, old.q_heads, len(self.origin)),
            bias=_heads_in(old.mask.bias, old.q_heads, len(self.origin)),
        )
        heads = {"q_heads": len(self.origin), "kv_heads": len(self.kv_origin)}
        return old.replace(**heads, mask=mask)


@dataclass(frozen=True, kw_only=True, eq=False)
class Emptied:
    """A layer that loses all its heads: what remains is one vector, ``bias`` [m]."""

    layer: Layer
    bias: Floats


Change = Rewiring | Emptied


def rebuilt(heads: HeadModel, changes: Sequence[Change]) -> ir.Model:
    """A copy of the model with each changed layer written anew.

    Errors:
        InputError: a layer can't be stated, or its cache is not an input and output of its own.
    """
    restore_order(heads.model)
    cloned = ClonedModel(heads.model)
    opset = max(model_opset(cloned.model), form_named(FORM).min_opset)
    if opset > model_opset(cloned.model):
        raise_opset(cloned.model, opset)
    names = Names(cloned.model)
    for change in changes:
        site = cloned.site(change.layer.known_site)
        scope = Scope(names.prefix(change.layer.id), opset=opset)
        if isinstance(change, Rewiring):
            _check_cache(change, site)
            replaced = _emit(scope, change, site, cloned)
        else:
            replaced = _emit_constant(scope, change, site, cloned)
        for node in scope.nodes:
            node.metadata_props[SITE] = change.layer.id
        _place(cloned.model, scope, replaced)
        names.add(scope.nodes)
        if isinstance(change, Rewiring):
            _resize_cache(site, replaced, len(change.kv_origin))
    gone = [cloned.site(c.layer.known_site) for c in changes if isinstance(c, Emptied)]
    for site in gone:
        _drop_outputs(cloned.model, site)
    remove_dead_nodes(cloned.model)
    kept = [
        cloned.site(layer.known_site)
        for layer in heads.layers
        if layer.site is not None
        and layer.number not in {c.layer.number for c in changes if isinstance(c, Emptied)}
    ]
    for site in gone:
        _drop_inputs(cloned.model, site, kept)
    restore_order(cloned.model)
    return cloned.model


Pair = tuple[ir.Value, ir.Value]


def _emit(scope: Scope, change: Rewiring, site: Site, cloned: ClonedModel) -> list[Pair]:
    layer, spec = change.layer, change.spec
    form, params = form_named(FORM), FormParams(opset=scope.opset)
    refusal = form.supports(spec, params)
    if isinstance(refusal, Unsupported):
        raise InputError(f"layer {layer.number} ({layer.id}) can't be stated: {refusal}")
    assert layer.query is not None
    assert layer.key is not None
    assert layer.value is not None
    assert layer.output is not None
    operands = dataclasses.replace(
        _by_head(scope, site, change),
        query=_projected(scope, layer.query, change.query, change.biases[0], spec, cloned),
        key=_projected(scope, layer.key, change.key, change.biases[1], spec, cloned),
        value=_projected(scope, layer.value, change.value, change.biases[2], spec, cloned),
        projection=None,
    )
    emitted = form.emit(scope, spec, params, operands)
    context = as_layout(scope, emitted.output, Layout.BSM).value
    h, e, m = change.output.shape
    result = _linear(
        scope, context, change.output.reshape(h * e, m), change.biases[3], spec, "o_proj"
    )
    if layer.output.by_length:
        result = _swapped(scope, result)
    pairs = [(cloned.value(layer.output.result), result)]
    for old, new in (
        (site.present_key, emitted.present_key),
        (site.present_value, emitted.present_value),
    ):
        if old is not None:
            assert new is not None
            pairs.append((old.value, as_layout(scope, new, old.layout).value))
    return pairs


def _emit_constant(scope: Scope, change: Emptied, site: Site, cloned: ClonedModel) -> list[Pair]:
    """The bias at every position, by the shape of what the queries were projected from."""
    layer = change.layer
    assert layer.query is not None
    assert layer.output is not None
    source = cloned.value(layer.query.source)
    dtype = numpy_dtype(layer.spec.io_dtype)
    bias = scope.constant(change.bias.astype(dtype), hint="o_proj.bias")
    axes = (0, 1) if layer.query.by_length is layer.output.by_length else (1, 0)
    sizes = [dimension(scope, source, axis) for axis in axes]
    shape = scope.op(
        "Concat", [*sizes, ints(scope, len(change.bias))], {"axis": 0}, dtype=ir.DataType.INT64
    )
    result = scope.op("Expand", [bias, shape], dtype=bias.dtype)
    return [(cloned.value(layer.output.result), result)]


def _projected(
    scope: Scope,
    old: Affine,
    weight: Floats,
    bias: Floats,
    spec: AttentionSpec,
    cloned: ClonedModel,
) -> Heads:
    m, heads, width = weight.shape
    source = cloned.value(old.source)
    value = _linear(
        scope,
        _swapped(scope, source) if old.by_length else source,
        weight.reshape(m, heads * width),
        bias.reshape(-1),
        spec,
        "proj",
    )
    return Heads(value=value, layout=Layout.BSM, heads=heads, dim=width)


def _linear(
    scope: Scope, x: ir.Value, weight: Floats, bias: Floats, spec: AttentionSpec, hint: str
) -> ir.Value:
    dtype = numpy_dtype(spec.io_dtype)
    kind = ir.DataType.from_numpy(dtype)
    known = [None, None] if x.shape is None else list(x.shape[:2])
    shape = [dim.value if isinstance(dim, ir.SymbolicDim) else dim for dim in known]
    shape.append(weight.shape[1])
    stored = scope.constant(weight.astype(dtype), hint=f"{hint}.weight")
    value = scope.op("MatMul", [x, stored], dtype=kind, shape=shape)
    if np.any(bias):
        added = scope.constant(bias.astype(dtype), hint=f"{hint}.bias")
        value = scope.op("Add", [value, added], dtype=kind, shape=shape)
    return value


def _swapped(scope: Scope, value: ir.Value) -> ir.Value:
    """[s, b, m] as [b, s, m], or back."""
    return scope.op("Transpose", [value], {"perm": [1, 0, 2]}, dtype=value.dtype)


def _by_head(scope: Scope, site: Site, change: Rewiring) -> Operands:
    """The operands, those that hold a row a head with the rows of the heads there are now."""
    operands, heads = site.operands, site.spec.q_heads
    index = ints(scope, *change.origin)

    def rows(value: ir.Value | None, axis: int) -> ir.Value | None:
        if value is None or change.origin == tuple(range(heads)):
            return value
        return scope.op("Gather", [value, index], {"axis": axis}, dtype=value.dtype)

    def mask(name: str, value: ir.Value | None) -> ir.Value | None:
        axis = change.layer.by_head.get(name)
        return value if axis is None else rows(value, axis)

    def cached(part: Heads | None) -> Heads | None:
        return None if part is None else dataclasses.replace(part, heads=len(change.kv_origin))

    source = operands.score_mask
    if source is not None:
        held = mask("score_mask", source.value)
        assert held is not None
        source = dataclasses.replace(source, value=held)
    return dataclasses.replace(
        operands,
        past_key=cached(operands.past_key),
        past_value=cached(operands.past_value),
        sinks=rows(operands.sinks, 0),
        keep=mask("keep", operands.keep),
        bias=mask("bias", operands.bias),
        score_mask=source,
    )


def _heads_in(shape: tuple[int | str, ...] | None, old: int, new: int):  # type: ignore[no-untyped-def]
    if shape is None or len(shape) < 3 or shape[-3] != old or old == 1:
        return shape
    return (*shape[:-3], new, *shape[-2:])


def _place(model: ir.Model, scope: Scope, replaced: Iterable[Pair]) -> None:
    pairs = list(replaced)
    anchor = pairs[0][0].producer()
    assert anchor is not None
    for constant in scope.initializers:
        model.graph.register_initializer(constant)
    model.graph.insert_before(anchor, scope.nodes)
    for old, new in pairs:
        take_place(old, new)


def _check_cache(change: Rewiring, site: Site) -> None:
    if len(change.kv_origin) == site.spec.kv_heads or site.spec.cache is None:
        return
    pasts = [site.operands.past_key, site.operands.past_value]
    presents = [site.present_key, site.present_value]
    inputs = all(part is None or part.value.is_graph_input() for part in pasts)
    if not inputs or not all(p is None or p.value.is_graph_output() for p in presents):
        raise InputError(
            f"layer {change.layer.number} ({change.layer.id}): its cache is not an input and an "
            "output of its own, so it can't get fewer or more heads",
            fix="export the decoder with past_key_values inputs and outputs, one a layer",
        )


def _resize_cache(site: Site, replaced: Sequence[Pair], heads: int) -> None:
    """Write the new number of heads into the shapes of the cache inputs and outputs."""
    made = dict(replaced)
    for part in (
        site.operands.past_key,
        site.operands.past_value,
        site.present_key,
        site.present_value,
    ):
        if part is None:
            continue
        value = made.get(part.value, part.value)
        if value.shape is None:
            continue
        axis = {Layout.BHSD: 1, Layout.BSHD: 2, Layout.BSM: 2}[part.layout]
        dims = list(value.shape)
        dims[axis] = heads * part.dim if part.layout is Layout.BSM else heads
        value.shape = ir.Shape(dims)


def _drop_outputs(model: ir.Model, site: Site) -> None:
    for part in (site.present_key, site.present_value):
        if part is not None and part.value.is_graph_output():
            model.graph.outputs.remove(part.value)


def _drop_inputs(model: ir.Model, site: Site, kept: Sequence[Site]) -> None:
    """Remove the cache inputs of an emptied layer; who reads their shape reads another layer's."""
    for role in ("past_key", "past_value"):
        part: Heads | None = getattr(site.operands, role)
        if part is None or not part.value.is_graph_input():
            continue
        others = [getattr(other.operands, role) for other in kept]
        same = [o for o in others if o is not None and o.layout is part.layout]
        for node, index in list(part.value.uses()):
            if node.op_type != "Shape" or not same:
                raise InputError(
                    f"{site.id}: its cache input {part.value.name!r} is read by "
                    f"{node.op_type} {node.name!r} too, so the layer can't lose all its heads",
                    fix="keep one head of it",
                )
            node.replace_input_with(index, same[0].value)
        model.graph.inputs.remove(part.value)
