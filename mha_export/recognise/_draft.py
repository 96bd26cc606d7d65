"""One attention at one choice of sizes: its roles, and the values that hold its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads
from mha_export.recognise._axes import axis_size, split_by_axis
from mha_export.recognise._binding import Bound, Meeting, Tensor, bind
from mha_export.recognise._lift import channels_of
from mha_export.recognise._probabilities import Use, Weighted, read_weighted
from mha_export.recognise._roles import Atom, Roles
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Scores, Term, Weighting
from mha_export.recognise._scores import read_scores
from mha_export.recognise._site import Reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Anchor:
    """A softmax: what it reads, what it gives, over which axis, made of which nodes."""

    node: ir.Node
    logits: ir.Value
    probabilities: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """Everything about one attention that sizes decide."""

    anchor: Anchor
    scores: Scores
    weighted: Weighted
    bound: Bound

    @property
    def roles(self) -> Roles:
        return self.bound.roles

    @property
    def query(self) -> Tensor:
        return self.bound.query

    @property
    def key(self) -> Tensor:
        return self.bound.key

    @property
    def value(self) -> Tensor:
        return self.bound.value

    @property
    def output(self) -> Heads | None:
        return self.bound.output

    @property
    def scale(self) -> float:
        return self.scores.scale * self.query.stage.scale * self.key.stage.scale

    def signature(self) -> tuple[Any, ...]:
        """What must not depend on the sizes chosen."""
        numbers = (self.roles.q_heads, self.kv_heads, self.head_dim, self.v_head_dim)
        values = [
            None if heads is None else (heads.value, heads.layout, heads.heads, heads.dim)
            for heads in (
                self.query.heads,
                self.key.heads,
                self.value.heads,
                self.output,
                self.key.past,
                self.value.past,
                self.key.present,
                self.value.present,
            )
        ]
        terms = [(term.value, term.kind, term.factor, term.fill) for term in self.scores.terms]
        atoms = [len(role) for role in (self.roles.batch, self.roles.heads, self.roles.queries)]
        stages = [
            (stage.rotary is not None, stage.norm is not None)
            for stage in (self.query.stage, self.key.stage)
        ]
        return (numbers, values, terms, atoms, stages, self.scale, self.scores.softcap)

    @property
    def is_static(self) -> bool:
        """Whether the cache is a buffer."""
        pasts = [tensor.stage.past for tensor in (self.key, self.value)]
        return any(past is not None and past.write is not None for past in pasts)

    @property
    def kv_heads(self) -> int:
        return self.roles.q_heads // self.roles.size(self.bound.kv_shared)

    @property
    def kv_atoms(self) -> tuple[Atom, ...]:
        """The head atoms that key and value have."""
        return self.roles.heads[: len(self.roles.heads) - self.bound.kv_shared]

    @property
    def head_dim(self) -> int:
        return axis_size(channels_of(self.scores.query, self.scores.summed))

    @property
    def v_head_dim(self) -> int:
        return axis_size(channels_of(self.weighted.value, 1))

    def tensor(self, name: str) -> Tensor:
        return {"query": self.query, "key": self.key, "value": self.value}[name]

    def own(self, name: str) -> int:
        """How many axes of the tensor's view are its channels."""
        return 1 if name == "value" else self.scores.summed


def read_draft(
    anchor: Anchor, scene: Scene, *, static: bool = True
) -> Draft | tuple[Use, ...] | Reason:
    """The attention around one softmax; its uses where P·V is missing; or what failed first.

    With ``static`` a buffer that new tokens are written into is taken for a cache, to be proven.
    """
    scores = read_scores(anchor.logits, anchor.axis, scene)
    if isinstance(scores, Reason):
        return scores
    weighted = read_weighted(anchor.probabilities, scores, scene)
    if not isinstance(weighted, Weighted):
        return weighted
    meeting = Meeting(
        space=scores.space,
        keys=scores.axis,
        summed=scores.summed,
        weighted=bool(scores.weightings),
        query=(scores.product.left.value, scores.query),
        key=(scores.product.right.value, scores.key),
        value=(weighted.product.right.value, weighted.value),
        output=(weighted.product.out, weighted.output),
        anchor=anchor.node,
        static=static,
        cuts=_cuts(scores, scene),
    )
    found = bind(meeting, scene)
    if found is None:
        return Reason(
            code="axes-disagree",
            message="query, key, value and output cut the batch and head axes at different places",
            value=scores.product.out.name,
        )
    return Draft(anchor=anchor, scores=scores, weighted=weighted, bound=found)


def _cuts(scores: Scores, scene: Scene) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """How what meets the scores cuts each of their axes: windows of a batch, rows of an image."""
    found = []
    steps: tuple[Term | Weighting, ...] = (*scores.terms, *scores.weightings)
    for step in steps:
        dims = scene.dims(step.level)
        pieces = None if dims is None else split_by_axis(step.level_view, dims)
        if pieces is not None:
            found.append(tuple(tuple(size for size, _, _ in axis) for axis in pieces))
    return tuple(found)
