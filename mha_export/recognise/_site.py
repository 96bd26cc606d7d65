"""What recognition returns: a verdict for every softmax and every fused attention node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir

from mha_export.operands import Heads, Operands
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a softmax is not an attention, was refused, or may not be replaced.

    Attributes:
        code: stable, for scripts: ``scores-not-a-product``, ``probabilities-used-elsewhere``, ...
        message: in words a user can act on.
        value: name of the value that shows it. nodes: names of the nodes that show it.
    """

    code: str
    message: str
    value: str | None = None
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "value": self.value,
            "nodes": list(self.nodes),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One recognised attention of a graph.

    Attributes:
        id: derived from structure and order (``layer.0.self``, ``attn.3``).
        graph: the graph (or subgraph, or function body) that owns the nodes.
        operands: the values the attention reads.
        output: the context, where the graph goes on reading it (after head merging, if any).
        qk_output: the score tensor others read, when the spec states one.
        present_key, present_value: cache outputs, when the spec has a concat cache.
        nodes: every node the attention covers, in graph order; mask construction that other sites
            share is *not* covered.
        fused_as: op type when the source graph already had one fused node.
        stated_as: the form an earlier rewrite says these nodes are, in several softmaxes; what
            they compute is not read off them, and shown only by a proof.
        cannot_replace: None when replaceable.
    """

    id: str
    spec: AttentionSpec
    graph: ir.Graph | ir.Function
    operands: Operands
    output: Heads
    anchor: ir.Node
    nodes: tuple[ir.Node, ...]
    qk_output: ir.Value | None = None
    present_key: Heads | None = None
    present_value: Heads | None = None
    fused_as: str | None = None
    stated_as: str | None = None
    cannot_replace: Reason | None = None
    verdict: Literal["attention"] = "attention"

    @property
    def replaceable(self) -> bool:
        return self.cannot_replace is None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "verdict": self.verdict,
            "fused_as": self.fused_as or self.stated_as,
            "replaceable": self.replaceable,
            "spec": self.spec.to_json(),
            "nodes": [node.name for node in self.nodes],
            "reason": None if self.cannot_replace is None else self.cannot_replace.to_json(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class _Other:
    id: str
    anchor: ir.Node
    reason: Reason
    fused_as: str | None = None

    def _json(self, verdict: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "verdict": verdict,
            "fused_as": self.fused_as,
            "replaceable": False,
            "spec": None,
            "nodes": [self.anchor.name],
            "reason": self.reason.to_json(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Rejection(_Other):
    """A softmax that may be an attention, with the first condition that failed."""

    verdict: Literal["rejected"] = "rejected"

    def to_json(self) -> dict[str, Any]:
        return self._json(self.verdict)


@dataclass(frozen=True, kw_only=True, eq=False)
class NotAttention(_Other):
    """A softmax that is something else: a router, a classifier, a pooling. ``reason`` names it."""

    verdict: Literal["not_attention"] = "not_attention"

    def to_json(self) -> dict[str, Any]:
        return self._json(self.verdict)


Verdict = Site | Rejection | NotAttention


@dataclass(frozen=True, kw_only=True, eq=False)
class Recognition:
    """All verdicts of one model, in graph order.

    Attributes:
        sizes: numbers for the symbols of the graph inputs (``input.axis`` for one without a name)
            that fit together: those at which the graph was read.
    """

    model: ir.Model
    verdicts: tuple[Verdict, ...] = field(default=())
    sizes: tuple[Mapping[str, int], ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(v for v in self.verdicts if isinstance(v, Site))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return tuple(v for v in self.verdicts if isinstance(v, Rejection))
