"""Which values of the graph hold query, key, value and output of one attention.

Works on what an attention *is* at one choice of sizes (a :class:`Meeting`), whether it was found
around a softmax or read off a fused node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_export.operands import Heads
from mha_export.recognise._agree import agree
from mha_export.recognise._axes import View, coalesced
from mha_export.recognise._bind import Pattern, bound
from mha_export.recognise._downstream import (
    Landing,
    averaged,
    graph_outputs,
    landings,
    merged_with_channels,
)
from mha_export.recognise._lift import Stage, Way, channels_of, lifted
from mha_export.recognise._roles import Atom, Roles, along, atoms_of, roles_of
from mha_export.recognise._scene import Scene


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Query, key, value and output over the axes of the scores.

    Attributes:
        space: sizes of the scores; ``keys``: which of its axes the keys are.
        summed: how many axes query and key are contracted over.
        weighted: a weighting goes onto the query, which a norm above it would undo.
        query, key, value: the value that enters, and its view over the space and its own axes.
        output: what comes out, likewise.
        anchor: a node of the attention, for what has to be derived.
    """

    space: tuple[int, ...]
    keys: int
    summed: int
    weighted: bool
    query: tuple[ir.Value, View]
    key: tuple[ir.Value, View]
    value: tuple[ir.Value, View]
    output: tuple[ir.Value, View]
    anchor: ir.Node
    static: bool = False
    """Whether a buffer that is written into may be a cache."""
    appends: bool = True
    """Whether a Concat above the keys may be a cache's; not where the node itself has a past."""
    cuts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Sizes that each axis of the space is cut into, one row for each mask or bias."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A query, key or value: the value that holds it and what lies between it and the product.

    ``heads`` is None where no value of the graph holds it in a layout a form reads; ``derivable``
    where one at this very stage holds it under more axes.
    """

    heads: Heads | None
    stage: Stage
    past: Heads | None = None
    present: Heads | None = None
    derivable: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """The tensors of a meeting.

    Attributes:
        kv_shared: how many trailing head atoms share one key/value head.
        mean: the output is the mean over heads.
        prefix: the value is the first channels of the key as it is cached.
    """

    roles: Roles
    kv_shared: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Heads | None
    mean: bool
    prefix: bool
    stages: Mapping[str, Sequence[Stage]]
    landings: Sequence[Landing]


def bind(meeting: Meeting, scene: Scene) -> Bound | None:
    """The highest values that hold the tensors; None where their axes cut at different places."""
    binder = _Binder(meeting, scene)
    found = binder.bound()
    if found is None or _one_dtype(found, scene):
        return found
    binder.without_casts()
    return binder.bound()


def _one_dtype(found: Bound, scene: Scene) -> bool:
    """Whether everything bound is of one element type (a form can't take them apart)."""
    held = [t.heads for t in (found.query, found.key, found.value)]
    held += [found.key.past, found.value.past, found.output]
    return len({scene.dtype(heads.value) for heads in held if heads is not None}) <= 1


class _Binder:
    def __init__(self, meeting: Meeting, scene: Scene) -> None:
        self.meeting = meeting
        self.scene = scene
        self.stages = {
            "query": lifted(*meeting.query, self._way(None, True), scene),
            "key": lifted(*meeting.key, self._way(self._cached_axis, True), scene),
            "value": lifted(*meeting.value, self._way(self._cached_axis, False), scene),
        }
        self._same_cache()
        self.landings = landings(meeting.output[0], scene)
        self.casts = True

    @property
    def _cached_axis(self) -> int | None:
        return self.meeting.keys if self.meeting.appends else None

    def _way(self, keys: int | None, rotates: bool) -> Way:
        own = self.meeting.summed if rotates else 1
        return Way(
            keys=keys,
            own=own,
            rotates=rotates,
            anchor=self.meeting.anchor,
            static=self.meeting.static,
        )

    def without_casts(self) -> None:
        """From now on bind below every cast."""
        self.casts = False
        self._keep(lambda stage: not stage.cast, ("query", "key", "value"))
        self._same_cache()

    def _same_cache(self) -> None:
        """A cache counts only where key and value both have one."""
        cached = [any(s.past for s in self.stages[name]) for name in ("key", "value")]
        if not all(cached):
            self._keep(lambda stage: stage.past is None, ("key", "value"))

    def _keep(self, wanted: Callable[[Stage], bool], names: Sequence[str]) -> None:
        for name in names:
            self.stages[name] = [stage for stage in self.stages[name] if wanted(stage)]

    def bound(self) -> Bound | None:
        roles = self._roles()
        if roles is None:
            return None
        best: Bound | None = None
        for shared in dict.fromkeys((roles.shared, 0)):
            made = self._with_sharing(roles, shared)
            if all(tensor.heads or tensor.derivable for tensor in (made.key, made.value)):
                return made
            best = best or made
        return best

    def _is_held(self, pattern: Pattern, stage: Stage) -> bool:
        """Whether some value holds the shared heads under more axes than a form reads."""
        if stage.past is not None:
            return False
        axes = (pattern.batch, pattern.length, pattern.heads, pattern.channels)
        wanted = sorted(factor for axis in axes for factor in axis)
        return all(stride for _, stride in wanted) and any(
            view.offset == pattern.offset
            and sorted(factor for axis in view.axes for factor in axis) == wanted
            for _, view in stage.places(self.scene)
        )

    def _with_sharing(self, roles: Roles, shared: int) -> Bound:
        heads = roles.heads[: len(roles.heads) - shared]
        query, key = self._agreeing(roles, heads)
        value = self._tensor("value", roles, heads)
        prefix = self._is_key_prefix(key)
        if prefix:
            value = Tensor(heads=key.heads, stage=key.stage)
            key = self._with_cache(key, "key", roles, heads) or key
        else:
            query, key, value = self._caches(query, key, value, roles, heads)
        output, mean = self._output(roles, query)
        return Bound(
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

    def _is_key_prefix(self, key: Tensor) -> bool:
        """Whether the value is fewer channels of the very tensor that is the key."""
        if key.heads is None:
            return False
        return any(
            _is_prefix(mine, other, len(self.meeting.space))
            for mine in self.stages["value"]
            for other in self.stages["key"]
            if (mine.past is None) == (key.stage.past is None)
        )

    def _roles(self) -> Roles | None:
        output = self.meeting.output[1]
        highest = {name: stages[-1].view for name, stages in self.stages.items()}
        lowest = {name: stages[0].view for name, stages in self.stages.items()}
        merged = merged_with_channels(self.landings, output.axes[-1])
        space, keys = self.meeting.space, self.meeting.keys
        for views in ({**highest, "output": output}, {**lowest, "output": output}):
            atoms = atoms_of(views, space, keys, self.scene, self.meeting.cuts)
            if atoms is not None:
                return roles_of(atoms, views, merged, space, keys, self.scene)
        return None

    def _output(self, roles: Roles, query: Tensor) -> tuple[Heads | None, bool]:
        """The merged context, or the mean over heads, of the element type of the query."""
        pattern = self._pattern(self.meeting.output[1], roles, roles.heads, roles.queries, 1)
        if pattern is None:
            return None, False
        places = [place for place in self.landings if self.casts or not place.cast]
        if query.heads is not None and self.casts:
            kind = self.scene.dtype(query.heads.value)
            places = [p for p in places if self.scene.dtype(p.value) == kind] or places
        mean = averaged(places[-1], pattern, self.scene) if places else None
        if mean is not None:
            return mean, True
        return bound(pattern, [(place.value, place.view) for place in reversed(places)]), False

    def _pattern(
        self,
        view: View,
        roles: Roles,
        heads: tuple[Atom, ...],
        length: tuple[Atom, ...] | None,
        own: int,
    ) -> Pattern | None:
        """The roles in one view; ``length`` None: the key axis."""
        strides = roles.strides(view)
        if strides is None:
            return None
        along_length = (
            coalesced(view.axes[self.meeting.keys]) if length is None else along(length, strides)
        )
        unseen = [a for a in roles.atoms if a not in heads and a not in roles.batch]
        if any(strides[atom] for atom in unseen if length is None):
            return None
        return Pattern(
            batch=along(roles.batch, strides),
            length=along_length,
            heads=along(heads, strides),
            channels=channels_of(view, own),
            offset=view.offset,
        )

    def _own(self, name: str) -> int:
        return 1 if name == "value" else self.meeting.summed

    def _options(self, name: str, roles: Roles, heads: tuple[Atom, ...]) -> list[Tensor]:
        """Every stage at which the tensor can be bound, the highest first."""
        length = roles.queries if name == "query" else None
        found: list[Tensor] = []
        for stage in reversed(self.stages[name]):
            if stage.norm is not None and self.meeting.weighted:
                continue
            pattern = self._pattern(stage.view, roles, heads, length, self._own(name))
            held = None if pattern is None else bound(pattern, stage.places(self.scene))
            if held is not None:
                found.append(Tensor(heads=held, stage=stage))
                continue
            shared = len(heads) < len(roles.heads)
            if shared and pattern is not None and self._is_held(pattern, stage):
                found.append(Tensor(heads=None, stage=stage, derivable=True))
        return found

    def _tensor(self, name: str, roles: Roles, heads: tuple[Atom, ...]) -> Tensor:
        """The highest stage at which the tensor can be bound."""
        options = self._options(name, roles, heads)
        return options[0] if options else Tensor(heads=None, stage=self.stages[name][0])

    def _agreeing(self, roles: Roles, heads: tuple[Atom, ...]) -> tuple[Tensor, Tensor]:
        """The highest stages of query and key that went through the same rotation and norm."""
        options = [self._options("query", roles, roles.heads), self._options("key", roles, heads)]
        queries, keys = options
        pairs = [(q, k) for q in range(len(queries)) for k in range(len(keys))]
        for q, k in sorted(pairs, key=lambda pair: (sum(pair), pair)):
            if agree(queries[q].stage, keys[k].stage):
                return queries[q], keys[k]
        query, key = (
            next(
                (tensor for tensor in found if _is_plain(tensor.stage)),
                Tensor(heads=None, stage=self.stages[name][0]),
            )
            for name, found in zip(("query", "key"), options, strict=True)
        )
        return query, key

    def _caches(
        self, query: Tensor, key: Tensor, value: Tensor, roles: Roles, heads: tuple[Atom, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Past and present of both, or neither with a cache."""
        if key.stage.past is None and value.stage.past is None:
            return query, key, value
        full = [self._with_cache(t, n, roles, heads) for t, n in ((key, "key"), (value, "value"))]
        if full[0] is not None and full[1] is not None:
            return query, full[0], full[1]
        self._keep(lambda stage: stage.past is None, ("key", "value"))
        return (*self._agreeing(roles, heads), self._tensor("value", roles, heads))

    def _with_cache(
        self, tensor: Tensor, name: str, roles: Roles, heads: tuple[Atom, ...]
    ) -> Tensor | None:
        past = tensor.stage.past
        if past is None:
            return None
        pattern = self._pattern(past.view, roles, heads, None, self._own(name))
        whole = self._pattern(past.whole_view, roles, heads, None, self._own(name))
        if pattern is None or whole is None:
            return None
        held = bound(pattern, Stage(entry=past.value, view=past.view).places(self.scene))
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
