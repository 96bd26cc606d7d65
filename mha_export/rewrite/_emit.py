"""One site in its new form, in the axis orders that the graph around it reads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_export.forms import FormParams, Scope
from mha_export.forms._layout import as_layout, cast, lowest
from mha_export.operands import Heads, Operands, ScoreMask, ir_dtype
from mha_export.recognise import Site
from mha_export.rewrite._outcome import Choice
from mha_export.spec import AttentionSpec, EmptyRow
from mha_export.statement import SOFTMAXES, state

SITE, SPEC, FORM, ORIGIN = (f"mha_export.{key}" for key in ("site", "spec", "form", "origin"))
"""Keys of ``metadata_props`` on emitted nodes: the site's id on all of them; spec, form and the
node that was replaced on the one that computes the context and on the op that the form is of."""


_MOVING = frozenset({"Cast", "Identity", "Reshape", "Transpose"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Emission:
    """Nodes not yet in a graph, and the values that take the place of the site's.

    ``replacements`` pairs each value of the site with its new one.
    """

    nodes: tuple[ir.Node, ...]
    initializers: tuple[ir.Value, ...]
    functions: Mapping[ir.OperatorIdentifier, ir.Function]
    replacements: tuple[tuple[ir.Value, ir.Value], ...]


def emit_site(site: Site, choice: Choice, operands: Operands, *, prefix: str) -> Emission:
    """Emit ``choice`` over ``operands`` (the site's own, or their copies in another graph).

    Errors:
        ValueError: the form made fewer values than the site has.
    """
    scope = Scope(prefix, opset=choice.params.opset)
    bound = operands
    operands = _in_io_type(scope, site.spec, operands)
    emitted = choice.form.emit(scope, site.spec, choice.params, operands)
    main = _computing(scope, emitted.output.value)
    pairs = [(site.output.value, as_layout(scope, emitted.output, site.output.layout).value)]
    for old, new in (
        (site.present_key, emitted.present_key),
        (site.present_value, emitted.present_value),
    ):
        if old is not None:
            pairs.append((old.value, _present(scope, old, new, choice)))
    if site.qk_output is not None:
        if emitted.qk_output is None:
            raise ValueError(f"form {choice.form.name} made no qk_output for site {site.id}")
        pairs.append((site.qk_output, emitted.qk_output))
    _annotate(scope, site, choice, main)
    state(scope.nodes, site.spec, bound, emitted.heads, form=choice.form.name, key=prefix)
    return Emission(
        nodes=tuple(scope.nodes),
        initializers=tuple(scope.initializers),
        functions=dict(scope.functions),
        replacements=tuple(_distinct(scope, pairs)),
    )


def _in_io_type(scope: Scope, spec: AttentionSpec, operands: Operands) -> Operands:
    """The operands with masks of another floating type (fp32 beside fp16) as forms read them.

    A mask that only hides becomes boolean: fp32's minimum has no like in fp16. A bias is cast, and
    kept in range.
    """
    wanted = ir_dtype(spec.io_dtype)
    mask, bias = operands.score_mask, operands.bias
    if mask is not None and mask.kind == "additive" and (own := _other_float(mask.value, wanted)):
        limit = np.array(_hidden_at(spec, own), dtype=own.numpy())
        keeps = scope.op("Greater", [mask.value, scope.constant(limit)], dtype=ir.DataType.BOOL)
        operands = dataclasses.replace(operands, score_mask=ScoreMask(value=keeps, kind="keep"))
    if bias is not None and (own := _other_float(bias, wanted)):
        least = scope.constant(np.array(lowest(spec.io_dtype), dtype=own.numpy()))
        infinite = scope.op("IsInf", [bias], dtype=ir.DataType.BOOL)
        within = scope.op("Max", [bias, least], dtype=bias.dtype)
        bias = scope.op("Where", [infinite, bias, within], dtype=bias.dtype)
        operands = dataclasses.replace(operands, bias=cast(scope, bias, wanted))
    return operands


def _other_float(value: ir.Value, wanted: ir.DataType) -> ir.DataType | None:
    """The value's floating type where it is known and another."""
    dtype = value.dtype
    return dtype if dtype is not None and dtype.is_floating_point() and dtype != wanted else None


def _hidden_at(spec: AttentionSpec, dtype: ir.DataType) -> float:
    """What a mask that only hides holds for a hidden pair is below this (at it, for -inf)."""
    if spec.mask.fill == "-inf":
        return -math.inf
    if spec.mask.fill == "min":
        return float(ml_dtypes.finfo(dtype.numpy()).min) / 2  # type: ignore[no-untyped-call]
    return spec.mask.fill / 2


def _present(scope: Scope, old: Heads, new: Heads | None, choice: Choice) -> ir.Value:
    if new is None:
        raise ValueError(f"form {choice.form.name} made no present for {old.value.name}")
    return as_layout(scope, new, old.layout).value


def _distinct(
    scope: Scope, pairs: list[tuple[ir.Value, ir.Value]]
) -> list[tuple[ir.Value, ir.Value]]:
    """The pairs, an Identity where a new value is no fresh node's (an operand handed through)."""
    own = {id(node) for node in scope.nodes}
    taken: set[int] = set()
    result = []
    for old, new in pairs:
        if id(new.producer()) not in own or id(new) in taken:
            new = scope.op("Identity", [new], dtype=new.dtype)
        taken.add(id(new))
        result.append((old, new))
    return result


def _computing(scope: Scope, output: ir.Value) -> ir.Node | None:
    """The emitted node that computes the context: what only moves or casts it may be tidied."""
    own = set(scope.nodes)
    node = output.producer()
    while node is not None and node.domain == "" and node.op_type in _MOVING:
        above = node.inputs[0]
        maker = None if above is None else above.producer()
        if maker not in own:
            break
        node = maker
    return node


def _annotate(scope: Scope, site: Site, choice: Choice, main: ir.Node | None) -> None:
    for node in scope.nodes:
        node.metadata_props[SITE] = site.id
    anchors = [node for node in scope.nodes if node.op_type in SOFTMAXES]
    marked = {*(anchors if len(anchors) == 1 else ()), *(() if main is None else (main,))}
    for node in marked:
        node.metadata_props[SPEC] = spec_text(site)
        node.metadata_props[FORM] = form_text(choice.form.name, choice.params)
        node.metadata_props[ORIGIN] = site.anchor.metadata_props.get(ORIGIN) or (
            f"{site.anchor.op_type} {site.anchor.name}"
        )


def spec_text(site: Site) -> str:
    """The spec as compact JSON."""
    return json.dumps(site.spec.to_json(), separators=(",", ":"), sort_keys=True)


def form_text(name: str, params: FormParams) -> str:
    """Form and parameters as compact JSON."""
    return json.dumps({"form": name, **params.to_json()}, separators=(",", ":"), sort_keys=True)


def already_in_form(site: Site, choice: Choice) -> bool:
    """Whether an earlier rewrite left this very site in this very form."""
    form = form_text(choice.form.name, choice.params)
    return any(
        node.metadata_props.get(FORM) == form
        and _says(node.metadata_props.get(SPEC, ""), site.spec)
        for node in {site.anchor, *site.nodes}
    )


def _says(text: str, spec: AttentionSpec) -> bool:
    """Whether an emission that was to say ``text`` says ``spec``.

    The two fills that absorb every score are one: hidden is hidden, and what such a fill decides,
    a row without keys, ``empty_row`` says; where it says nothing, any will do. A form whose op
    hides with -inf reads back as that, whatever number the source had. What an op took as a bias,
    or together with one, is part of it. A length that was written into the graph may be free now.
    """
    try:
        stated = json.loads(text)
    except ValueError:
        return False
    if not isinstance(stated, dict):
        return False
    own = spec.to_json()
    for one in (stated, own):
        one.pop("dims", None)
        one["fill"] = "-inf" if one.get("fill") in ("min", None) else one["fill"]
    if "bias" in own["mask"]:
        own["mask"].remove("bias")
        stated["mask"] = [part for part in stated.get("mask") or () if part != "bias"]
        for name in ("mask", "causal", "left_window", "right_window"):
            stated[name] = own[name] if _is_less(own[name], stated.get(name)) else stated.get(name)
    if stated.get("empty_row") == EmptyRow.NOT_APPLICABLE.value or not spec.mask.hides_keys:
        stated["empty_row"] = own["empty_row"]
    return stated == own


def _is_less(part: object, whole: object) -> bool:
    """Whether a mask's part says nothing, or some of what ``whole`` lists."""
    if isinstance(part, list) and isinstance(whole, list):
        return set(part) <= set(whole)
    return part is None
