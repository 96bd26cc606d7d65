"""The variants an export makes: one file for each target, or two for a decoder in two graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mha_export.forms import form_named
from mha_export.jobs._phases import Graph, forms_for, phases, stem
from mha_export.jobs._settings import ExportSettings
from mha_export.jobs._store import PORTABLE
from mha_export.spec import AttentionSpec
from mha_export.targets import (
    Available,
    Target,
    TargetRequest,
    capabilities_for,
    parse_target,
    parse_targets,
    target_named,
)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """One variant to make: its name, the forms to try and the opset ceiling.

    One file serves every precision that was asked of its target.
    """

    name: str
    forms: tuple[str, ...]
    max_opset: int
    target: Target | None
    precisions: tuple[str | None, ...] = (None,)
    graph: Graph = "main"

    @property
    def stem(self) -> str:
        return stem(self.name, self.graph)

    def loaders(self) -> list[tuple[Target, str | None]]:
        """The targets here, with precisions, that must load the file."""
        wanted = [self.target] if self.target else [target_named(n) for n in ("cpu", "reference")]
        return [
            (target, precision)
            for target in wanted
            for precision in self.precisions
            if not target.builds_slowly and isinstance(target.availability().run, Available)
        ]

    def veto(self, form: str, spec: AttentionSpec) -> str | None:
        """Why the target cannot be given ``form``: what it was seen to do, here or elsewhere."""
        if self.target is None:
            return None
        refusals = (
            capabilities_for(self.target, precision).refusal(form, spec)
            for precision in self.precisions
        )
        return next((refusal for refusal in refusals if refusal is not None), None)


def destinations_of(names: Sequence[str], settings: ExportSettings) -> list[Destination]:
    """One for each target (two where it is split), in the order they were named.

    Errors:
        InputError: an unknown target, precision or form.
    """
    form = settings.form
    if form is not None:
        form_named(form)
    wanted: dict[str, Destination] = {}
    for name in names or ("all",):
        for destination in _named(name, form):
            earlier = wanted.get(destination.name)
            if earlier is not None:
                precisions = dict.fromkeys((*earlier.precisions, *destination.precisions))
                destination = replace(earlier, precisions=tuple(precisions))
            wanted[destination.name] = destination
    return [
        replace(each, graph=graph, forms=forms_for(graph, each.forms, only=form))
        for each in wanted.values()
        for graph in phases(settings.split)
    ]


def _named(name: str, form: str | None) -> list[Destination]:
    if name == PORTABLE:
        forms = (PORTABLE,) if form is None else (form,)
        return [Destination(name=PORTABLE, forms=forms, max_opset=26, target=None)]
    if name == "all":
        return [_of_target(request, form) for request in parse_targets(["all"])]
    return [_of_target(parse_target(name, besides=("all", PORTABLE)), form)]


def _of_target(request: TargetRequest, form: str | None) -> Destination:
    target = request.target
    return Destination(
        name=target.name,
        forms=target.default_forms if form is None else (form,),
        max_opset=target.max_opset,
        target=target,
        precisions=(request.precision,),
    )
