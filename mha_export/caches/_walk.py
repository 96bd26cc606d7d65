"""What each value of a decoder becomes when only the new tokens are fed.

A decoder without a cache sees T tokens. With one it is fed the last s of them, and every value is
one of two things: what it was with all T (a mask, a table, a shape), or the part of it that belongs
to the new tokens, along one axis. The walk goes through the graph once and decides; ops that mix
tokens are refused, and attentions, which do mix them, read the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.caches._counts import Counts
from mha_export.caches._edits import Edit, Rows
from mha_export.caches._look import Look
from mha_export.caches._refusal import Refused
from mha_export.caches._rules import RULES
from mha_export.caches._step import Step
from mha_export.forms._layout import LENGTH_AXIS
from mha_export.measure._input_roles import input_roles
from mha_export.operands import Heads, Operands
from mha_export.recognise import Site
from mha_export.rewrite._clone import subgraphs_of
from mha_export.rewrite._slice import reads_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """What was found.

    Attributes:
        states: every value that holds the new tokens alone.
        tokens: inputs of the new tokens, with the axis they are along.
        whole: inputs that speak of all tokens, with that axis.
        edits: what has to change outside the attentions.
    """

    look: Look
    states: Mapping[ir.Value, Rows]
    tokens: Mapping[ir.Value, int]
    whole: Mapping[ir.Value, int]
    edits: tuple[Edit, ...]


def walk(model: ir.Model, sites: Sequence[Site]) -> Walk:
    """Go through ``model``, whose attentions are ``sites``.

    Raises Refused with the first thing that keeps a step from seeing the new tokens alone.
    """
    look = Look(model, sites)
    growing = _growing_inputs(look)
    whole = _whole_inputs(look, sites, growing)
    tokens = {value: axis for value, axis in growing.items() if value not in whole}
    if not tokens:
        raise Refused(
            "mask-from-tokens",
            "the mask is computed from the tokens themselves: a step would need all of them; "
            "export the model with an attention_mask input",
            value=next(iter(whole), None),
        )
    states: dict[ir.Value, Rows] = {value: Rows(axis=axis) for value, axis in tokens.items()}
    edits: list[Edit] = []
    owners = {site.output.value: site for site in sites}
    covered = {node for site in sites for node in site.nodes}
    needed = _needed(model, sites, covered)
    Counts(look).check((node for node in model.graph if node in needed), sites)
    for node in model.graph:
        made = [owners[value] for value in node.outputs if value in owners]
        for site in made:
            _check_operands(site, states, look)
            states[site.output.value] = Rows(axis=LENGTH_AXIS[site.output.layout])
            if site.qk_output is not None:
                states[site.qk_output] = Rows(axis=2)
        if node in covered or node not in needed:
            continue
        _pass(node, states, look, edits)
    return Walk(look=look, states=states, tokens=tokens, whole=whole, edits=tuple(edits))


def _pass(node: ir.Node, states: dict[ir.Value, Rows], look: Look, edits: list[Edit]) -> None:
    inside = [value for value in reads_of(node) if value in states]
    if not inside:
        return
    name = node.name or node.op_type
    if any(True for _ in subgraphs_of(node)):
        raise Refused(
            "control-flow",
            f"{node.op_type} {name!r} runs a body on the tokens",
            value=node.outputs[0],
            nodes=[node],
        )
    rule = RULES.get(node.op_type)
    if rule is None:
        raise Refused(
            "token-mixing",
            f"{node.op_type} {name!r} is no op that is known to treat every token by itself",
            value=node.outputs[0],
            nodes=[node],
        )
    found = rule(Step.of(node, states, look, edits))
    states |= {
        value: state for value, state in zip(node.outputs, found, strict=False) if state is not None
    }


def _growing_inputs(look: Look) -> dict[ir.Value, int]:
    """Inputs as long as the tokens, with that axis."""
    found: dict[ir.Value, int] = {}
    for value in look.model.graph.inputs:
        if value.const_value is not None:
            continue
        axes = look.growing(value)
        if len(axes) > 1:
            raise Refused(
                "mask-is-an-input",
                f"the input {value.name!r} says for each pair of tokens whether one sees the "
                "other: whether a token sees later ones is up to the caller",
                value=value,
            )
        if axes:
            found[value] = axes[0]
    return found


def _whole_inputs(
    look: Look, sites: Sequence[Site], growing: Mapping[ir.Value, int]
) -> dict[ir.Value, int]:
    """The inputs that an attention needs for all keys: a padding mask."""
    roles = {role.name: role.role for role in input_roles(look.model)}
    found: dict[ir.Value, int] = {}
    for site in sites:
        for operand in _key_side(site.operands):
            if not look.growing(operand):
                continue
            for source in look.context.sources(operand):
                if source in growing and roles.get(source.name or "") not in ("ids", "positions"):
                    found[source] = growing[source]
                elif source in growing or source.producer() is not None:
                    raise Refused(
                        "mask-from-tokens",
                        f"the mask is computed from {source.name!r}: a step would need that of all "
                        "tokens; export the model with an attention_mask input",
                        value=source,
                        nodes=[site.anchor],
                    )
    return found


def _key_side(operands: Operands) -> list[ir.Value]:
    sided = (operands.key_padding, operands.document_ids, operands.keep, operands.bias)
    return [value for value in sided if value is not None]


def _needed(model: ir.Model, sites: Sequence[Site], covered: set[ir.Node]) -> set[ir.Node]:
    """Nodes that outputs or operands depend on, once the attentions are replaced."""
    operands = {
        output: site
        for site in sites
        for output in (site.output.value, site.qk_output)
        if output is not None
    }
    caches = {
        heads.value
        for site in sites
        for heads in (site.present_key, site.present_value)
        if heads is not None
    }
    pending = [value for value in model.graph.outputs if value not in caches]
    seen: set[ir.Value] = set()
    found: set[ir.Node] = set()
    while pending:
        value = pending.pop()
        if value in seen or value in caches:
            continue
        seen.add(value)
        site = operands.get(value)
        if site is not None:
            pending += [item for name, item in site.operands.values() if _is_read(name)]
            continue
        node = value.producer()
        if node is None or node in found:
            continue
        if node not in covered:
            found.add(node)
        pending += reads_of(node)
    return found


def _is_read(name: str) -> bool:
    """A cached attention states its mask by its parts, and has a cache of its own."""
    return not name.startswith(("score_mask", "past_", "projection", "kv_lengths"))


def _check_operands(site: Site, states: Mapping[ir.Value, Rows], look: Look) -> None:
    operands = site.operands
    for name in ("query", "key", "value"):
        heads: Heads = getattr(operands, name)
        if states.get(heads.value) != Rows(axis=LENGTH_AXIS[heads.layout]):
            raise Refused(
                "cross-attention",
                f"the {name} {heads.value.name!r} does not follow the tokens",
                value=heads.value,
                nodes=[site.anchor],
            )
    for value in (operands.key_padding, operands.document_ids):
        if value is not None and value in states:
            raise Refused(
                "mask-from-tokens",
                f"the mask {value.name!r} is computed from the new tokens alone",
                value=value,
                nodes=[site.anchor],
            )
    for value in (operands.keep, operands.bias):
        if value is not None and value in states:
            state, rank = states[value], look.rank(value)
            if state != Rows(axis=rank - 2) or rank < 2:
                raise Refused(
                    "mask-from-tokens",
                    f"the mask {value.name!r} is computed from the tokens that are the keys",
                    value=value,
                    nodes=[site.anchor],
                )
