"""A site cut out of its graph: what computes it, what a replacement reads, what both are fed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._feeds import HEADS, PLAIN, ROOT, WEIGHTS
from mha_export.rewrite._slice import Slice, backward_slice


@dataclass(frozen=True, kw_only=True, eq=False)
class Exhibit:
    """A site cut out of its graph: the original nodes, and what a replacement would read.

    Attributes:
        original: slice that computes the site's own outputs.
        operands: slice that computes the bound operands.
        stops: inputs of either. cuts: those that are operands, by name.
        outputs: the site's values by role.
    """

    site: Site
    original: Slice
    operands: Slice
    stops: tuple[ir.Value, ...]
    shape_only: frozenset[ir.Value]
    cuts: Mapping[ir.Value, str]
    outputs: Mapping[str, ir.Value]


def exhibit(site: Site, context: Context) -> Exhibit:
    """Cut ``site`` out; operands that the slices leak around are computed inside instead."""
    outputs = {"output": site.output.value}
    if site.qk_output is not None:
        outputs["qk_output"] = site.qk_output
    if site.present_key is not None:
        outputs["present_key"] = site.present_key.value
    if site.present_value is not None:
        outputs["present_value"] = site.present_value.value
    cuts = _operand_cuts(site)
    while True:
        original = backward_slice(
            tuple(outputs.values()), cuts=cuts, inside=site.nodes, context=context
        )
        bound = tuple(dict.fromkeys(value for _, value in site.operands.values()))
        operands = backward_slice(bound, cuts=cuts, inside=(), context=context)
        stops = tuple(dict.fromkeys([*original.stops, *operands.stops]))
        shape_only = (original.shape_only | operands.shape_only) - {
            value
            for part in (original, operands)
            for value in part.stops
            if value not in part.shape_only
        }
        leaking = _leaking(cuts, original, shape_only, context)
        if not leaking:
            break
        cuts = {value: name for value, name in cuts.items() if value not in leaking}
        cuts.update(_weight_roots(leaking, site, original))
    return Exhibit(
        site=site,
        original=original,
        operands=operands,
        stops=stops,
        shape_only=shape_only,
        cuts={value: name for value, name in cuts.items() if value in stops},
        outputs=outputs,
    )


def _operand_cuts(site: Site) -> dict[ir.Value, str]:
    cuts: dict[ir.Value, str] = {}
    for name in HEADS:
        heads = getattr(site.operands, name)
        if heads is not None:
            cuts.setdefault(heads.value, name)
    for name in PLAIN:
        value = getattr(site.operands, name)
        if value is not None:
            cuts.setdefault(value, name)
    return cuts


def _leaking(
    cuts: Mapping[ir.Value, str],
    original: Slice,
    shape_only: frozenset[ir.Value],
    context: Context,
) -> set[ir.Value]:
    """Cut values that the original does not read, or whose own sources it reads by another way too.

    Feeding both would be feeding two truths: such an operand is computed inside the slices.
    """
    others = {v for v in original.stops if v not in cuts and v not in shape_only}
    leaking = set()
    for value in cuts:
        sources = context.sources(value)
        derived = value.producer() is not None and value not in original.stops
        if sources != frozenset({value}) and (sources & others or derived):
            leaking.add(value)
    return leaking


def _weight_roots(leaking: set[ir.Value], site: Site, original: Slice) -> dict[ir.Value, str]:
    """The initializers that derived sinks and norm weights come from: cut there instead.

    Left in, every layer would be a structure of its own, and zero sinks would prove nothing.
    """
    roots: dict[ir.Value, str] = {}
    for name in WEIGHTS:
        value = getattr(site.operands, name)
        if value is None or value not in leaking:
            continue
        node = value.producer()
        while node is not None and node.op_type in ("Identity", "Reshape", "Squeeze", "Unsqueeze"):
            source = node.inputs[0]
            if source is not None and source in original.initializers:
                roots[source] = f"{ROOT}{name}"
            node = None if source is None else source.producer()
    return roots
