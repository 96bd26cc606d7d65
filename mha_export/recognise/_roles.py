"""Which factors of the score space are batch, heads, queries and keys.

Heads are what shares an axis with the channels where a projection wrote them (or where the
context is merged again), never what stands at place 1. Only where no projection is in sight does
the rank decide: [batch, heads, queries, keys].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mha_export.recognise._axes import Axis, View, axis_size, coalesced, split_by_axis
from mha_export.recognise._scene import Scene


@dataclass(frozen=True, kw_only=True, eq=False)
class Atom:
    """A factor that no tensor of the attention cuts further.

    ``strides``: how each tensor (``query``, ``key``, ``value``, ``output``) moves along it.
    """

    axis: int
    size: int
    strides: dict[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """Atoms by role, outermost first; ``atoms`` holds all of them in the order of the axes.

    ``shared``: how many trailing head atoms share one key/value head.
    """

    atoms: tuple[Atom, ...]
    batch: tuple[Atom, ...]
    heads: tuple[Atom, ...]
    queries: tuple[Atom, ...]
    shared: int

    def size(self, trailing: int) -> int:
        """How many heads the last ``trailing`` head atoms make."""
        return _size(self.heads[len(self.heads) - trailing :]) if trailing else 1

    def strides(self, view: View) -> dict[Atom, int] | None:
        """How a view over the space's axes moves along each atom; None where it cuts finer."""
        found: dict[Atom, int] = {}
        for axis in dict.fromkeys(atom.axis for atom in self.atoms):
            here = [atom for atom in self.atoms if atom.axis == axis]
            chain = [1]
            for atom in reversed(here):
                chain.append(chain[-1] * atom.size)
            cut = refined([view.axes[axis], *_marks(chain)], chain[-1])
            if cut is None or len(cut[0]) != len(here):
                return None
            found.update({atom: stride for atom, (_, stride) in zip(here, cut[0], strict=True)})
        return found

    @property
    def q_heads(self) -> int:
        return _size(self.heads)

    @property
    def kv_heads(self) -> int:
        return _size(self.heads[: len(self.heads) - self.shared])


def _marks(chain: list[int]) -> list[Axis]:
    """Factor lists that only carry the cuts of a chain."""
    return [((chain[-1] // cut, 1), (cut, 0)) for cut in chain[1:-1]]


def _size(atoms: Sequence[Atom]) -> int:
    return axis_size(tuple((atom.size, 1) for atom in atoms))


def refined(lists: Sequence[Axis], size: int) -> list[list[tuple[int, int]]] | None:
    """The same axis in several tensors, all cut at the same places; None where cuts cross."""
    cuts = {1, size}
    for factors in lists:
        reach = 1
        for count, _ in reversed(factors):
            reach *= count
            cuts.add(reach)
        if reach not in (size, 1):
            return None
    chain = sorted(cuts)
    if any(big % small for small, big in itertools.pairwise(chain)):
        return None
    return [_recut(factors, chain) for factors in lists]


def _recut(factors: Axis, chain: list[int]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    reach = 1
    pending = list(factors)
    for small, big in itertools.pairwise(chain):
        count = big // small
        if not pending:
            result.insert(0, (count, 0))
            continue
        size, stride = pending[-1]
        result.insert(0, (count, stride))
        reach *= count
        if size == count:
            pending.pop()
        else:
            pending[-1] = (size // count, stride * count)
    return result


def atoms_of(
    views: dict[str, View],
    space: tuple[int, ...],
    keys: int,
    scene: Scene,
    cuts: Sequence[Sequence[tuple[int, ...]]] = (),
) -> list[Atom] | None:
    """All atoms of the space but the keys', in the order of its axes.

    ``cuts``: sizes that each axis should be cut into besides, where that crosses nothing.
    """
    atoms: list[Atom] = []
    names = list(views)
    for axis, size in enumerate(space):
        if axis == keys or size == 1:
            continue
        own = [views[name].axes[axis] for name in names]
        marks = [mark for name in names for mark in _head_marks(views[name], name, axis, scene)]
        wanted = [tuple((n, 0) for n in row[axis]) for row in cuts]
        whole = [*own, *marks]
        cut = refined([*whole, *wanted], size) or refined(whole, size) or refined(own, size)
        if cut is None:
            return None
        cut = cut[: len(names)]
        for place in range(len(cut[0])):
            atoms.append(
                Atom(
                    axis=axis,
                    size=cut[0][place][0],
                    strides={
                        name: pieces[place][1] for name, pieces in zip(names, cut, strict=True)
                    },
                )
            )
    return atoms


def _head_marks(view: View, name: str, axis: int, scene: Scene) -> list[Axis]:
    """Where an axis leaves the source axis of the channels: heads merged into the batch end there.

    A stride alone does not show it: rows of [length, batch, heads * channels] follow each other.
    """
    dims = None if name == "output" else scene.dims(view.source)
    if dims is None:
        return []
    parts = split_by_axis(View(view.source, 0, (view.axes[axis], view.axes[-1])), dims)
    if parts is None:
        return []
    places = {place for _, place, _ in parts[1]}
    inside = [place in places for _, place, _ in parts[0]]
    if len(places) != 1 or all(inside) or not any(inside):
        return []
    return [tuple((n, index + 1) for index, (n, _, _) in enumerate(parts[0]))]


def roles_of(
    atoms: list[Atom],
    views: dict[str, View],
    merged: Axis,
    space: tuple[int, ...],
    keys: int,
    scene: Scene,
) -> Roles:
    """Roles of the atoms.

    ``merged`` are the factors of the output of P·V that are joined with its channels further down.
    """
    heads = {
        index
        for index, atom in enumerate(atoms)
        if any(_beside_channels(atom, name, view, scene) for name, view in views.items())
        or _is_merged(atom, merged)
    }
    if heads and not any(
        _beside_channels(atoms[index], "query", views["query"], scene) for index in heads
    ):
        axes = {atoms[index].axis for index in heads}
        heads |= {
            index
            for index, atom in enumerate(atoms)
            if atom.axis in axes
            and not atom.strides["key"]
            and not atom.strides["value"]
            and atom.strides["query"]
            and _inside(index, heads, atoms)
        }
    if not heads:
        heads = _by_rank(atoms, space, keys)
    rest = [index for index in range(len(atoms)) if index not in heads]
    own = [i for i in rest if not atoms[i].strides["key"] and not atoms[i].strides["value"]]
    lead = [i for i in own if atoms[i].axis == 0 and len(space) > 2]
    queries = set(own) - set(lead) if len(own) > len(lead) else set(own)
    batch = [atoms[i] for i in rest if i not in queries]
    ordered = _ordered([atoms[i] for i in sorted(heads)], "query")
    return Roles(
        atoms=tuple(atoms),
        batch=tuple(batch),
        heads=tuple(ordered),
        queries=tuple(_ordered([atoms[i] for i in sorted(queries)], "query")),
        shared=_shared(ordered),
    )


def _is_merged(atom: Atom, merged: Axis) -> bool:
    """Joined with the channels further down; an axis that only queries have is never a head."""
    stride = atom.strides["output"]
    if not stride or not (atom.strides["key"] or atom.strides["value"]):
        return False
    return any(stride % step == 0 and stride // step * atom.size <= size for size, step in merged)


def _inside(index: int, heads: set[int], atoms: list[Atom]) -> bool:
    """Whether a key/value head stands further out on the same axis: this is a head of its group."""
    return any(
        other < index
        and atoms[other].axis == atoms[index].axis
        and (atoms[other].strides["key"] or atoms[other].strides["value"])
        for other in heads
    )


def _ordered(atoms: list[Atom], name: str) -> list[Atom]:
    if all(atom.strides[name] for atom in atoms):
        return sorted(atoms, key=lambda atom: -atom.strides[name])
    return atoms


def _shared(heads: list[Atom]) -> int:
    count = 0
    for atom in reversed(heads):
        if atom.strides["key"] or atom.strides["value"]:
            break
        count += 1
    return count


def _by_rank(atoms: list[Atom], space: tuple[int, ...], keys: int) -> set[int]:
    """[batch, heads, s, t], or five axes with the K/V heads split into groups."""
    rank = len(space)
    lead = [axis for axis in range(rank) if axis != keys]
    if rank == 4:
        chosen = {lead[1]}
    elif rank >= 5:
        grouped = [
            axis
            for axis in lead[1:-1]
            if any(
                a.axis == axis and not a.strides["key"] and not a.strides["value"] for a in atoms
            )
        ]
        chosen = {lead[-2], lead[-3]} if grouped == [lead[-2]] else {lead[-2]}
    else:
        chosen = set()
    return {index for index, atom in enumerate(atoms) if atom.axis in chosen}


def _beside_channels(atom: Atom, name: str, view: View, scene: Scene) -> bool:
    """Whether the atom lies in the same axis of the tensor's source as its channels."""
    stride = atom.strides[name]
    if not stride or name == "output":
        return False
    dims = scene.dims(view.source)
    if dims is None:
        return False
    channels = split_by_axis(View(view.source, 0, (view.axes[-1],)), dims)
    own = split_by_axis(View(view.source, 0, (((atom.size, stride),),)), dims)
    if channels is None or own is None:
        return False
    places = {place for _, place, _ in channels[0]}
    return bool(places) and {place for _, place, _ in own[0]} == places and len(places) == 1


def along(atoms: Sequence[Atom], strides: dict[Atom, int]) -> Axis:
    """The factors of one role in one tensor."""
    return coalesced([(atom.size, strides[atom]) for atom in atoms])
