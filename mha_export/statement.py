"""What emitted nodes say of themselves where no reader can tell: one attention in many softmaxes.

A form that cuts an attention into pieces leaves a statement in the nodes' metadata: the spec, on
the node that makes the context; which operand each input is, on the nodes that read one; which
output is what, on the nodes that make one. Nothing hangs on names, so that a file may be renamed,
inlined or wrapped. A statement is a claim: whoever replaces what it speaks of proves it first.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import onnx_ir as ir

from mha_export import spec as _spec
from mha_export.operands import Heads, Layout, Operands, RotaryTables, ScoreMask
from mha_export.spec import AttentionSpec

STATES, READS, GIVES = (f"mha_export.{key}" for key in ("states", "reads", "gives"))
SOFTMAXES = frozenset(
    {"Attention", "GroupQueryAttention", "MultiHeadAttention", "PackedMultiHeadAttention"}
    | {"Softmax"}
)
"""Operators one of which is, or holds, the softmax of an attention."""
_NEEDLESS = frozenset({"score_mask", "projection"})
"""Operands that say again what others say: a form may leave them unread."""
_TYPES: Mapping[str, Any] = {
    **{name: getattr(_spec, name) for name in _spec.__all__},
    **{kind.__name__: kind for kind in (Heads, Layout, Operands, RotaryTables, ScoreMask)},
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Statement:
    """One attention as its own nodes state it.

    Attributes:
        form: the form's name. node: makes the context.
        gives: ``output``, and ``present_key`` and ``present_value`` where there is a cache.
    """

    form: str
    node: ir.Node
    spec: AttentionSpec
    operands: Operands
    gives: Mapping[str, Heads]


def state(
    nodes: Collection[ir.Node],
    spec: AttentionSpec,
    operands: Operands,
    gives: Mapping[str, Heads],
    *,
    form: str,
    key: str,
) -> None:
    """Mark ``nodes`` with the statement, under ``key``; one softmax needs none, and gets none.

    None is made either where a form hands an operand through as an output, or reads only a part of
    what the spec speaks of.
    """
    if sum(node.op_type in SOFTMAXES for node in nodes) < 2:
        return
    read = {value for node in nodes for value in node.inputs}
    unread = {name for name, value in operands.values() if value not in read}
    fields = {name.split(".")[0] for name in unread}
    makers = {role: heads.value.producer() for role, heads in gives.items()}
    if not fields <= _NEEDLESS or not set(makers.values()) <= set(nodes):
        return
    unneeded: dict[str, Any] = dict.fromkeys(_NEEDLESS & fields)
    operands = dataclasses.replace(operands, **unneeded)
    places = {value: place for place, (_, value) in enumerate(operands.values())}
    stated = {
        "form": form,
        "spec": _encoded(spec.replace(projections=None, kv_source="own"), places),
        "operands": _encoded(operands, places),
    }
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value in places:
                _note(node, READS, key, {str(index): places[value]})
    for role, maker in makers.items():
        assert maker is not None
        heads = gives[role]
        facts = [role, heads.layout.value, heads.heads, heads.dim]
        _note(maker, GIVES, key, {str(heads.value.index()): facts})
        if role == "output":
            _note(maker, STATES, key, stated)


def is_stated(node: ir.Node) -> bool:
    """Whether a statement rests on what the node reads."""
    return READS in node.metadata_props


def share_statements(kept: ir.Node, other: ir.Node) -> None:
    """Let ``kept`` say what an equal node says, which is to go."""
    for name in (STATES, READS, GIVES):
        for key, facts in _noted(other, name).items():
            _note(kept, name, key, facts)


def statements(nodes: Iterable[ir.Node]) -> list[Statement]:
    """Every statement of a graph that is whole and does not contradict itself."""
    stated: dict[str, tuple[ir.Node, Any]] = {}
    given: dict[str, list[tuple[ir.Node, Any]]] = {}
    read: dict[str, dict[int, set[ir.Value | None]]] = {}
    for node in nodes:
        stated |= {key: (node, facts) for key, facts in _noted(node, STATES).items()}
        for key, facts in _noted(node, GIVES).items():
            given.setdefault(key, []).append((node, facts))
        for key, facts in _noted(node, READS).items():
            for index, place in facts.items():
                value = node.inputs[int(index)] if int(index) < len(node.inputs) else None
                read.setdefault(key, {}).setdefault(place, set()).add(value)
    found = []
    for key, (node, facts) in stated.items():
        values = {place: next(iter(one)) for place, one in read.get(key, {}).items()}
        if None in values.values() or any(len(one) > 1 for one in read.get(key, {}).values()):
            continue
        try:
            statement = Statement(
                form=facts["form"],
                node=node,
                spec=_decoded(facts["spec"], values),
                operands=_decoded(facts["operands"], values),
                gives=_heads_given(given.get(key, ())),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            continue  # written by something else, or half of it is gone
        if "output" in statement.gives:
            found.append(statement)
    return found


def _heads_given(given: Iterable[tuple[ir.Node, Any]]) -> dict[str, Heads]:
    return {
        role: Heads(value=node.outputs[int(index)], layout=Layout(layout), heads=heads, dim=dim)
        for node, facts in given
        for index, (role, layout, heads, dim) in facts.items()
    }


def _noted(node: ir.Node, name: str) -> dict[str, Any]:
    text = node.metadata_props.get(name)
    if text is None:
        return {}
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _note(node: ir.Node, name: str, key: str, facts: Mapping[str, Any]) -> None:
    noted = _noted(node, name)
    noted[key] = {**noted.get(key, {}), **facts}
    node.metadata_props[name] = json.dumps(noted, separators=(",", ":"), sort_keys=True)


def _encoded(part: Any, places: Mapping[ir.Value, int]) -> Any:
    if isinstance(part, ir.Value):
        return {"is": "Value", "place": places[part]}
    if isinstance(part, Enum):
        return {"is": type(part).__name__, "value": part.value}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {f.name: _encoded(getattr(part, f.name), places) for f in dataclasses.fields(part)}
        return {"is": type(part).__name__, **{k: v for k, v in fields.items() if v is not None}}
    if isinstance(part, tuple):
        return [_encoded(item, places) for item in part]
    return part


def _decoded(data: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(data, list):
        return tuple(_decoded(item, values) for item in data)
    if not isinstance(data, dict):
        return data
    if data["is"] == "Value":
        return values[data["place"]]
    kind = _TYPES[data["is"]]
    fields = {name: _decoded(item, values) for name, item in data.items() if name != "is"}
    return kind(fields["value"]) if issubclass(kind, Enum) else kind(**fields)
