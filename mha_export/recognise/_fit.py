"""Completes a draft: what no value of the graph holds is derived."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from mha_export.operands import Heads, Layout
from mha_export.recognise._adapt import Deriver, Part, Size, arranged, partitioned
from mha_export.recognise._axes import (
    Axis,
    View,
    axis_size,
    coalesced,
    row_major,
    split_by_axis,
)
from mha_export.recognise._binding import Tensor
from mha_export.recognise._downstream import Landing
from mha_export.recognise._draft import Draft
from mha_export.recognise._lift import Stage
from mha_export.recognise._roles import Atom
from mha_export.recognise._scene import Scene
from mha_export.recognise._site import Reason
from mha_export.spec import EmptyRow


class SizeUnknownError(Exception):
    """No operand shows a size that a derived value needs."""


class Fitting:
    """One attention at all choices of sizes, being completed.

    Args:
        drafts: one for each scene, of one structure.
        empty_row: what the graph gives a row without keys after softmax, where it does.
    """

    def __init__(
        self,
        drafts: Sequence[Draft],
        scenes: Sequence[Scene],
        *,
        empty_row: EmptyRow | None = None,
    ) -> None:
        self.empty_row = empty_row
        self.drafts = drafts
        self.scenes = scenes
        self.derive = Deriver(scenes, drafts[0].weighted.product.node)

    @property
    def draft(self) -> Draft:
        return self.drafts[0]

    @contextlib.contextmanager
    def before(self, node: ir.Node) -> Iterator[Deriver]:
        """Derive before another node than the softmax for a while."""
        kept, self.derive = self.derive, Deriver(self.scenes, node)
        try:
            yield self.derive
        finally:
            self.derive = kept

    def completed(self) -> Draft | Reason:
        """The first draft with every tensor bound, or the one that can't be."""
        try:
            return self._completed()
        except SizeUnknownError:
            return _unbound("context", self.draft.weighted.product.out)

    def _completed(self) -> Draft | Reason:
        tensors: dict[str, Tensor] = {}
        for name in ("query", "key", "value"):
            tensor = self.draft.tensor(name)
            if tensor.heads is None:
                found = self._fitted(name)
                if found is None:
                    return _unbound(name, tensor.stage.entry)
                tensor = found
            tensors[name] = tensor
        full = self.replaced(**tensors)
        if full.output is not None:
            return full
        output = self._landed()
        if output is None:
            return _unbound("output", full.weighted.product.out)
        return self.replaced(output=output)

    def replaced(self, **changes: Any) -> Draft:
        """The first draft with some fields changed, from now on."""
        full = dataclasses.replace(
            self.draft, bound=dataclasses.replace(self.draft.bound, **changes)
        )
        self.drafts = (full, *self.drafts[1:])
        return full

    def role_sizes(self) -> dict[str, Callable[[], Size]]:
        """Batch, queries and keys, as the bound operands give them."""
        sizes: dict[str, Callable[[], Size]] = {}
        for role, name in (("s", "query"), ("t", "key"), ("t", "value")):
            heads = self.draft.tensor(name).heads
            if heads is None:
                continue
            place = 2 if heads.layout is Layout.BHSD else 1
            sizes.setdefault("b", _sized(self.derive, heads.value, 0))
            if role == "t" and self.draft.tensor(name).past is not None:
                sizes.setdefault(role, self._with_past(heads, place, name))
            else:
                sizes.setdefault(role, _sized(self.derive, heads.value, place))
        return sizes

    def _with_past(self, heads: Heads, place: int, name: str) -> Callable[[], Size]:
        past = self.draft.tensor(name).past
        assert past is not None
        length = 2 if past.layout is Layout.BHSD else 1

        if self.draft.is_static:
            return _sized(self.derive, past.value, length)

        def total() -> Size:
            sizes = [
                self.derive.size(heads.value, place),
                self.derive.size(past.value, length),
            ]
            return self.derive.total(sizes)

        return total

    def parts(
        self,
        view_of: Callable[[Draft], View],
        roles: str,
        heads: Sequence[Atom],
        own: int,
        *,
        cut: bool = False,
    ) -> list[Part] | None:
        """The roles of a view over the score space, with sizes that the graph can state.

        ``roles`` says which of batch, queries and keys (``b``, ``s``, ``t``) the view has, ``own``
        how many of its trailing axes are channels; with ``cut`` keys are parted as its source is.
        """
        draft = self.draft
        views = [view_of(other) for other in self.drafts]
        strides = [d.roles.strides(view) for d, view in zip(self.drafts, views, strict=True)]
        if strides[0] is None or any(found is None for found in strides):
            return None
        parts: list[Part] = []
        known = self.role_sizes()
        atoms_by_role = [("b", draft.roles.batch), ("h", tuple(heads))]
        if "s" in roles:
            atoms_by_role.append(("s", draft.roles.queries))
        for role, atoms in atoms_by_role:
            for atom in atoms:
                sizes = {
                    other.roles.atoms[draft.roles.atoms.index(atom)].size for other in self.drafts
                }
                parts.append(self._part(role, sizes, strides[0][atom], atom, atoms, known))
        if "t" in roles:
            lists = [coalesced(view.axes[draft.scores.axis]) for view in views]
            if cut:
                pairs = zip(views, self.scenes, strict=True)
                lists = [_parted(v.axes[draft.scores.axis], v.source, s) for v, s in pairs]
            parts.extend(self._factors("t", lists, known))
        if own:
            lists = [coalesced(f for axis in view.axes[-own:] for f in axis) for view in views]
            parts.extend(self._factors("d", lists, known))
        return parts

    def _factors(
        self,
        role: str,
        lists: list[tuple[tuple[int, int], ...]],
        known: dict[str, Callable[[], Size]],
    ) -> Iterator[Part]:
        for place, (size, stride) in enumerate(lists[0]):
            sizes = {axis[place][0] if place < len(axis) else -1 for axis in lists}
            dim: int | Callable[[], Size]
            if len(sizes) == 1:
                dim = size
            else:
                rest = axis_size(lists[0]) // size
                if any(axis_size(axis) != rest * axis[place][0] for axis in lists):
                    raise SizeUnknownError
                dim = _divided(self.derive, known.get(role), rest)
            yield Part(role=role, size=size, stride=stride, dim=dim)

    def _part(
        self,
        role: str,
        sizes: set[int],
        stride: int,
        atom: Atom,
        atoms: Sequence[Atom],
        known: dict[str, Callable[[], Size]],
    ) -> Part:
        if len(sizes) == 1:
            return Part(role=role, size=atom.size, stride=stride, dim=atom.size)
        dim = self._shown(atom) if self._varying(atoms) > 1 else None
        if dim is None:
            rest = axis_size(tuple((other.size, 1) for other in atoms)) // atom.size
            dim = _divided(self.derive, known.get(role), rest)
        return Part(role=role, size=atom.size, stride=stride, dim=dim)

    def _varying(self, atoms: Sequence[Atom]) -> int:
        """How many of the atoms differ in size between the scenes."""
        own = self.draft.roles.atoms
        places = [own.index(atom) for atom in atoms]
        return sum(len({d.roles.atoms[place].size for d in self.drafts}) > 1 for place in places)

    def _shown(self, atom: Atom) -> Callable[[], Size] | None:
        """The size of an atom that is an axis of its own on the way to an operand.

        Of a batch of image and row, neither is the whole divided by a number.
        """
        for stages in self.draft.bound.stages.values():
            for stage in reversed(stages):
                strides = self.draft.roles.strides(stage.view)
                if strides is None or not strides[atom]:
                    continue
                for value, view in stage.places(self.scenes[0]):
                    for place, axis in enumerate(view.axes):
                        if axis == ((atom.size, strides[atom]),):
                            return _sized(self.derive, value, place)
        return None

    def _fitted(self, name: str) -> Tensor | None:
        """The tensor derived from the value nearest to its projection that has all its elements."""
        draft = self.draft
        heads = draft.roles.heads if name == "query" else draft.kv_atoms
        length = "s" if name == "query" else "t"
        stages = draft.bound.stages[name]
        for index in range(len(stages) - 1, -1, -1):
            stage = stages[index]
            if draft.tensor(name).derivable and stage is not draft.tensor(name).stage:
                continue
            if stage.past is not None or any(
                len(d.bound.stages[name]) <= index for d in self.drafts
            ):
                continue
            parts = self.parts(_stage_view(name, index), f"b{length}", heads, draft.own(name))
            if parts is None:
                continue
            made = self._from_stage(stage, parts, length)
            if made is not None:
                return Tensor(heads=made, stage=stage)
        return None

    def _from_stage(self, stage: Stage, parts: list[Part], length: str) -> Heads | None:
        for value, view in stage.places(self.scenes[0]):
            if view.offset != stage.view.offset:
                continue
            present = [part for part in parts if part.stride]
            axes = partitioned(view.axes, present)
            if axes is None:
                continue
            self._size_from(value, axes)
            flat = [part.role for axis in axes for part in axis]
            heads_first = (
                "h" not in flat or length not in flat or flat.index("h") < flat.index(length)
            )
            names = ["b", "h", length, "d"] if heads_first else ["b", length, "h", "d"]
            order = [[p for axis in axes for p in axis if p.role == role] for role in names]
            if any(_out_of_order(axis, parts) for axis in order):
                continue
            made = arranged(value, axes, order, self.derive)
            absent = [part for part in parts if not part.stride and part.size > 1]
            if absent:
                made = self._spread(made, order, [[p for p in parts if p.role == n] for n in names])
            counts = {
                role: axis_size(tuple((p.size, 1) for p in parts if p.role == role))
                for role in "hd"
            }
            return Heads(
                value=made,
                layout=Layout.BHSD if heads_first else Layout.BSHD,
                heads=counts["h"],
                dim=counts["d"],
            )
        return None

    def _size_from(self, value: ir.Value, axes: list[list[Part]]) -> None:
        """Unknown sizes that the value itself shows."""
        for place, axis in enumerate(axes):
            unknown = [part for part in axis if not isinstance(part.dim, int)]
            if len(unknown) == 1:
                rest = axis_size(tuple((p.size, 1) for p in axis if p is not unknown[0]))
                dim = _divided(self.derive, _sized(self.derive, value, place), rest)
                object.__setattr__(unknown[0], "dim", dim)

    def _spread(self, value: ir.Value, axes: list[list[Part]], whole: list[list[Part]]) -> ir.Value:
        """Repeat along parts that the value lacks: a key without a batch, heads told over again."""
        joined = any(len(axis) > 1 and not all(part.stride for part in axis) for axis in whole)
        if not joined:
            return self.derive("Expand", [value, self.derive.exact_shape(whole)])
        apart = [[part] for axis in whole for part in axis]
        unit = [[p if p.stride else dataclasses.replace(p, size=1, dim=1)] for [p] in apart]
        value = self.derive.reshape(value, axes, unit)
        value = self.derive("Expand", [value, self.derive.exact_shape(apart)])
        return self.derive.reshape(value, apart, whole)

    def _landed(self) -> Heads | None:
        """A merged context derived from, and put back into, what the graph goes on with."""
        draft = self.draft
        for index in range(len(draft.bound.landings) - 1, -1, -1):
            landing = draft.bound.landings[index]
            if landing.cast:
                continue
            parts = self.parts(lambda d: d.weighted.output, "bs", draft.roles.heads, 1)
            axes = None if parts is None else partitioned(landing.view.axes, parts)
            if parts is None or axes is None:
                continue
            order = [
                [part for part in parts if part.role in roles and part.size > 1]
                for roles in ("b", "s", "hd")
            ]
            value = self._round_trip(landing, axes, order)
            if value is None:
                continue
            return Heads(
                value=value,
                layout=Layout.BSM,
                heads=draft.roles.q_heads,
                dim=draft.v_head_dim,
            )
        return None

    def _round_trip(
        self, landing: Landing, axes: list[list[Part]], order: list[list[Part]]
    ) -> ir.Value | None:
        """``landing`` to ``order`` and back; its readers read what comes back.

        None where the shape that comes back is another at some choice of sizes.
        """
        readers = list(landing.value.uses())
        mark = _mark_after(landing.value)
        derive = Deriver(self.scenes, mark)
        merged = arranged(landing.value, axes, order, derive)
        back = arranged(merged, order, axes, derive)
        assert mark.graph is not None
        mark.graph.remove(mark, safe=True)
        if any(scene.dims(back) != scene.dims(landing.value) for scene in self.scenes):
            return None
        dtype = back.dtype or self.scenes[0].dtype(landing.value)
        if dtype is not None:
            back.dtype = dtype
        for node, place in readers:
            node.replace_input_with(place, back)
        if landing.value.is_graph_output():
            _stand_in(landing.value, back)
        return merged


def _parted(axis: Axis, source: ir.Value, scene: Scene) -> Axis:
    """The axis cut where it passes from one axis of its source to the next."""
    dims = scene.dims(source)
    pieces = None if dims is None else split_by_axis(View(source, 0, (axis,)), dims)
    if dims is None or pieces is None or any(place < 0 for _, place, _ in pieces[0]):
        return coalesced(axis)
    strides = row_major(dims)
    return tuple((size, step * strides[place]) for size, place, step in pieces[0])


def _stage_view(name: str, index: int) -> Callable[[Draft], View]:
    return lambda draft: draft.bound.stages[name][index].view


def _mark_after(value: ir.Value) -> ir.Node:
    """A node that stands right after the one that makes ``value``, to put others before."""
    node = value.producer()
    assert node is not None
    assert node.graph is not None
    mark = ir.Node("", "Identity", [value], name=f"{node.name}.mark")
    node.graph.insert_after(node, mark)
    return mark


def _stand_in(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` be the graph output that ``old`` was, under its name and type."""
    graph = old.graph
    assert graph is not None
    place = graph.outputs.index(old)
    name = old.name
    old.name, new.name = f"{name}.inner", name
    new.type, new.shape = old.type or new.type, old.shape
    graph.outputs[place] = new


def _out_of_order(axis: list[Part], parts: list[Part]) -> bool:
    places = [parts.index(part) for part in axis]
    return places != sorted(places)


def _sized(derive: Deriver, value: ir.Value, axis: int) -> Callable[[], Size]:
    return lambda: derive.size(value, axis)


def _divided(derive: Deriver, whole: Callable[[], Size] | None, divisor: int) -> Callable[[], Size]:
    def size() -> Size:
        if whole is None:
            raise SizeUnknownError
        return derive.quotient(whole(), divisor)

    return size


def _unbound(name: str, value: ir.Value) -> Reason:
    return Reason(
        code=f"{name}-layout",
        message=f"no value on the way to {value.name!r} holds the {name} heads, and none can be "
        "derived from it by Reshape and Transpose",
        value=value.name,
    )
