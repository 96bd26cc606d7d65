"""One attention at one choice of sizes: its roles, and the values that hold its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads
from mha_export.recognise._agree import agree
from mha_export.recognise._axes import Axis, View, axis_size, coalesced
from mha_export.recognise._bind import Pattern, bound
from mha_export.recognise._downstream import (
    Landing,
    averaged,
    graph_outputs,
    landings,
    merged_with_channels,
)
from mha_export.recognise._lift import Stage, Way, channels_of, lifted
from mha_export.recognise._probabilities import Use, Weighted, read_weighted
from mha_export.recognise._roles import Atom, Roles, along, atoms_of, roles_of
from mha_export.recognise._scene import Scene
from mha_export.recognise._score_steps import Scores
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
class Tensor:
    """A query, key or value: the value that holds it and what lies between it and the product.

    ``heads`` is None where no value of the graph holds it in a layout a form reads.
    """

    heads: Heads | None
    stage: Stage
    past: Heads | None = None
    present: Heads | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """Everything about one attention that sizes decide."""

    anchor: Anchor
    scores: Scores
    weighted: Weighted
    roles: Roles
    kv_shared: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Heads | None
    mean: bool
    prefix: bool
    """The value is the first channels of the key as it is cached."""
    stages: Mapping[str, Sequence[Stage]]
    landings: Sequence[Landing]

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
    def kv_heads(self) -> int:
        return self.roles.q_heads // self.roles.size(self.kv_shared)

    @property
    def kv_atoms(self) -> tuple[Atom, ...]:
        """The head atoms that key and value have."""
        return self.roles.heads[: len(self.roles.heads) - self.kv_shared]

    @property
    def head_dim(self) -> int:
        return width_of(self.scores.query.axes[-self.scores.summed :])

    @property
    def v_head_dim(self) -> int:
        return width_of(self.weighted.value.axes[-1:])

    def tensor(self, name: str) -> Tensor:
        return {"query": self.query, "key": self.key, "value": self.value}[name]

    def own(self, name: str) -> int:
        """How many axes of the tensor's view are its channels."""
        return 1 if name == "value" else self.scores.summed


def read_draft(anchor: Anchor, scene: Scene) -> Draft | tuple[Use, ...] | Reason:
    """The attention around one softmax; its uses where P·V is missing; or what failed first."""
    scores = read_scores(anchor.logits, anchor.axis, scene)
    if isinstance(scores, Reason):
        return scores
    weighted = read_weighted(anchor.probabilities, scores, scene)
    if not isinstance(weighted, Weighted):
        return weighted
    return _Drafting(anchor, scores, weighted, scene).draft()


class _Drafting:
    def __init__(self, anchor: Anchor, scores: Scores, weighted: Weighted, scene: Scene) -> None:
        self.anchor = anchor
        self.scores = scores
        self.weighted = weighted
        self.scene = scene
        left, right = scores.product.left.value, scores.product.right.value
        self.stages = {
            "query": lifted(left, scores.query, self._way(None, True), scene),
            "key": lifted(right, scores.key, self._way(scores.axis, True), scene),
            "value": lifted(
                weighted.product.right.value,
                weighted.value,
                self._way(scores.axis, False),
                scene,
            ),
        }
        self._same_cache()
        self.landings = landings(weighted.product.out, scene)

    def _way(self, keys: int | None, rotates: bool) -> Way:
        own = self.scores.summed if rotates else 1
        return Way(keys=keys, own=own, rotates=rotates, anchor=self.anchor.node)

    def _same_cache(self) -> None:
        """A cache counts only where key and value both have one."""
        cached = [any(s.past for s in self.stages[name]) for name in ("key", "value")]
        if all(cached):
            return
        for name in ("key", "value"):
            self.stages[name] = [stage for stage in self.stages[name] if stage.past is None]

    def draft(self) -> Draft | Reason:
        roles = self._roles()
        if isinstance(roles, Reason):
            return roles
        output, mean = self._output(roles)
        best: Draft | None = None
        for shared in dict.fromkeys((roles.shared, 0)):
            heads = roles.heads[: len(roles.heads) - shared]
            query, key = self._agreeing(roles, heads)
            value = self._tensor("value", roles, heads)
            prefix = self._is_key_prefix(key)
            if prefix:
                value = Tensor(heads=key.heads, stage=key.stage)
                cached = self._with_cache(key, "key", roles, heads)
                key = key if cached is None else cached
            else:
                query, key, value = self._caches(query, key, value, roles, heads)
            made = Draft(
                anchor=self.anchor,
                scores=self.scores,
                weighted=self.weighted,
                roles=roles,
                kv_shared=shared,
                query=query,
                key=key,
                value=value,
                output=output,
                mean=mean,
                prefix=prefix,
                stages=self.stages,
                landings=self.landings,
            )
            if key.heads is not None and value.heads is not None:
                return made
            best = best or made
        assert best is not None
        return best

    def _is_key_prefix(self, key: Tensor) -> bool:
        """Whether the value is fewer channels of the very tensor that is the key."""
        if key.heads is None:
            return False
        for mine in self.stages["value"]:
            for other in self.stages["key"]:
                if (mine.past is None) != (key.stage.past is None):
                    continue
                if _is_prefix(mine, other, len(self.scores.space)):
                    return True
        return False

    def _roles(self) -> Roles | Reason:
        views = {name: stages[-1].view for name, stages in self.stages.items()}
        views["output"] = self.weighted.output
        lowest = {name: stages[0].view for name, stages in self.stages.items()}
        for trial in (views, {**lowest, "output": self.weighted.output}):
            atoms = atoms_of(trial, self.scores.space, self.scores.axis, self.scene)
            if atoms is None:
                continue
            merged = merged_with_channels(self.landings, self.weighted.output.axes[-1])
            return roles_of(atoms, trial, merged, self.scores.space, self.scores.axis, self.scene)
        return Reason(
            code="axes-disagree",
            message="query, key, value and output cut the batch and head axes at different places",
            value=self.scores.product.out.name,
        )

    def _output(self, roles: Roles) -> tuple[Heads | None, bool]:
        """The merged context, or the mean over heads."""
        pattern = self._pattern(self.weighted.output, roles, roles.heads, roles.queries, 1)
        if pattern is None:
            return None, False
        casts = any(stage.cast for stage in self.stages["query"])
        places = [place for place in self.landings if casts or not place.cast]
        mean = averaged(places[-1], pattern, self.scene) if places else None
        if mean is not None:
            return mean, True
        return bound(pattern, [(place.value, place.view) for place in reversed(places)]), False

    def _pattern(
        self,
        view: View,
        roles: Roles,
        heads: tuple[Any, ...],
        length: tuple[Any, ...] | None,
        own: int,
    ) -> Pattern | None:
        """The roles in one view; ``length`` None: the key axis."""
        strides = roles.strides(view)
        if strides is None:
            return None
        channels: Axis = coalesced(factor for axis in view.axes[-own:] for factor in axis)
        along_length = (
            coalesced(view.axes[self.scores.axis]) if length is None else along(length, strides)
        )
        unseen = [a for a in roles.atoms if a not in heads and a not in roles.batch]
        if any(strides[atom] for atom in unseen if length is None):
            return None
        return Pattern(
            batch=along(roles.batch, strides),
            length=along_length,
            heads=along(heads, strides),
            channels=channels,
            offset=view.offset,
        )

    def _own(self, name: str) -> int:
        return 1 if name == "value" else self.scores.summed

    def _options(self, name: str, roles: Roles, heads: tuple[Any, ...]) -> list[Tensor]:
        """Every stage at which the tensor can be bound, the highest first."""
        length = roles.queries if name == "query" else None
        found: list[Tensor] = []
        for stage in reversed(self.stages[name]):
            if stage.norm is not None and self.scores.weightings:
                continue  # a weighting goes onto the query, which a norm above it would undo
            pattern = self._pattern(stage.view, roles, heads, length, self._own(name))
            held = None if pattern is None else bound(pattern, stage.places(self.scene))
            if held is not None:
                found.append(Tensor(heads=held, stage=stage))
        return found

    def _tensor(self, name: str, roles: Roles, heads: tuple[Any, ...]) -> Tensor:
        """The highest stage at which the tensor can be bound."""
        options = self._options(name, roles, heads)
        return options[0] if options else Tensor(heads=None, stage=self.stages[name][0])

    def _agreeing(self, roles: Roles, heads: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The highest stages of query and key that went through the same rotation and norm."""
        queries = self._options("query", roles, roles.heads)
        keys = self._options("key", roles, heads)
        bare = (
            Tensor(heads=None, stage=self.stages["query"][0]),
            Tensor(heads=None, stage=self.stages["key"][0]),
        )
        plain = [
            [tensor for tensor in options if _is_plain(tensor.stage)] or [fallback]
            for options, fallback in zip((queries, keys), bare, strict=True)
        ]
        pairs = [(q, k) for q in range(len(queries)) for k in range(len(keys))]
        for q, k in sorted(pairs, key=lambda pair: (sum(pair), pair)):
            if agree(queries[q].stage, keys[k].stage, self.scene):
                return queries[q], keys[k]
        return plain[0][0], plain[1][0]

    def _caches(
        self, query: Tensor, key: Tensor, value: Tensor, roles: Roles, heads: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Past and present of both, or neither with a cache."""
        if key.stage.past is None and value.stage.past is None:
            return query, key, value
        full = [self._with_cache(t, n, roles, heads) for t, n in ((key, "key"), (value, "value"))]
        if full[0] is not None and full[1] is not None:
            return query, full[0], full[1]
        for name in ("key", "value"):
            self.stages[name] = [stage for stage in self.stages[name] if stage.past is None]
        return (*self._agreeing(roles, heads), self._tensor("value", roles, heads))

    def _with_cache(
        self, tensor: Tensor, name: str, roles: Roles, heads: tuple[Any, ...]
    ) -> Tensor | None:
        past = tensor.stage.past
        if past is None:
            return None
        pattern = self._pattern(past.view, roles, heads, None, self._own(name))
        whole = self._pattern(past.whole_view, roles, heads, None, self._own(name))
        if pattern is None or whole is None:
            return None
        stage = Stage(entry=past.value, view=past.view)
        held = bound(pattern, stage.places(self.scene))
        if held is None:
            return None
        present = bound(whole, graph_outputs(past.whole, self.scene))
        return Tensor(heads=tensor.heads, stage=tensor.stage, past=held, present=present)


def _is_prefix(value: Stage, key: Stage, axes: int) -> bool:
    wide, narrow = channels_of(key.view, len(key.view.axes) - axes), value.view.axes[-1]
    same_past = (value.past is None and key.past is None) or (
        value.past is not None and key.past is not None and value.past.whole is key.past.whole
    )
    return (
        same_past
        and value.scale == key.scale == 1.0
        and value.view.source is key.view.source
        and value.view.offset == key.view.offset
        and value.view.axes[:axes] == key.view.axes[:axes]
        and len(wide) == len(narrow) == 1
        and wide[0][1] == narrow[0][1] == 1
        and narrow[0][0] < wide[0][0]
    )


def _is_plain(stage: Stage) -> bool:
    return stage.rotary is None and stage.norm is None


def total_keys(draft: Draft) -> int:
    """How many keys softmax normalises over."""
    return draft.scores.space[draft.scores.axis]


def width_of(axes: tuple[Axis, ...]) -> int:
    return axis_size(tuple(factor for axis in axes for factor in axis))
