"""The rewrite of a whole model: choose, prove, replace, tidy."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from mha_export.errors import CheckFailedError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams, Unsupported
from mha_export.recognise import Recognition, Site
from mha_export.recognise._collection import collection_paused
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import ClonedModel, with_values
from mha_export.rewrite._emit import already_in_form, emit_site
from mha_export.rewrite._loading import breaking_sites
from mha_export.rewrite._outcome import (
    Choice,
    Chooser,
    Keep,
    Loads,
    RewriteSettings,
    Rewritten,
    SiteOutcome,
)
from mha_export.rewrite._proof import Prover
from mha_export.rewrite._splice import (
    Names,
    remove_dead_nodes,
    restore_order,
    splice,
    state_widths,
)
from mha_export.rewrite._tidy import Sizes, tidy_layouts
from mha_export.rewrite.opset import model_opset, raise_opset


@collection_paused()
def rewrite(
    recognition: Recognition,
    choose: Chooser,
    *,
    evaluator: Evaluator,
    stand_ins: Sequence[Evaluator] = (),
    loads: Loads | None = None,
    settings: RewriteSettings | None = None,
) -> Rewritten:
    """Emit the chosen form at every site whose proof holds; leave the others as they are.

    ``recognition.model`` is not changed. Inputs and outputs of the result have the names, types,
    order and metadata of the original's; nothing unread is left in it.

    Args:
        recognition: the sites of one model.
        choose: the form of each site, or why it is kept.
        evaluator: what runs the proofs.
        stand_ins: run an original that ``evaluator`` cannot run; and its replacement too where
            that does not run either (a type without kernels). The proof says which ran what.
        loads: why a runtime does not load a whole model, or None. The sites that break one which
            loads without them are undone.
        settings: seed, battery, strictness.

    Errors:
        CheckFailedError: ``settings.strict`` and a proof failed (all sites were tried).
        InputError: a form asks for an opset the model cannot be raised to.
    """
    settings = settings or RewriteSettings()
    choices = {site.id: _permitted(site, choose(site)) for site in recognition.sites}
    restore_order(recognition.model)  # the recogniser's own copy, to which it added nodes
    opset = _final_opset(recognition.model, list(choices.values()))
    cloned = _copy(recognition, opset)
    prover = Prover(
        Context(cloned.model, evaluator=evaluator),
        [evaluator, *stand_ins],
        settings,
        known_sizes=recognition.sizes,
    )
    outcomes: dict[str, SiteOutcome] = {}
    accepted: dict[str, Choice] = {}
    sites = {site.id: cloned.site(site) for site in recognition.sites}
    for site in sites.values():
        outcome, choice = _decide(site, choices[site.id], opset, prover, settings)
        outcomes[site.id] = outcome
        if choice is not None:
            accepted[site.id] = choice
    _replace(cloned.model, [(sites[name], accepted[name]) for name in accepted], prover.sizes)
    done = Rewritten(model=cloned.model, outcomes=outcomes, fixed_lengths=prover.fixed_lengths)
    if loads is not None:
        build = _Builder(recognition, opset, accepted, prover.sizes)
        done = _loadable(done, build, loads)
    _raise_if_strict(settings, done.outcomes)
    return done


def _copy(recognition: Recognition, opset: int) -> ClonedModel:
    cloned = ClonedModel(recognition.model)
    if opset > model_opset(cloned.model):
        raise_opset(cloned.model, opset)
    return cloned


class _Builder:
    """Builds the model anew with some of the accepted sites rewritten, without proofs."""

    def __init__(
        self,
        recognition: Recognition,
        opset: int,
        accepted: Mapping[str, Choice],
        sizes: Sequence[Mapping[str, int]],
    ) -> None:
        self._recognition = recognition
        self._opset = opset
        self.accepted = accepted
        self._sizes = sizes

    def __call__(self, names: Collection[str]) -> ir.Model:
        cloned = _copy(self._recognition, self._opset)
        wanted = [site for site in self._recognition.sites if site.id in names]
        pairs = [(cloned.site(site), self.accepted[site.id]) for site in wanted]
        _replace(cloned.model, pairs, self._sizes)
        return cloned.model


def _loadable(done: Rewritten, build: _Builder, loads: Loads) -> Rewritten:
    """``done``, without the rewrites that keep the whole from loading."""
    refusal = loads(done.model)
    if refusal is None:
        return done
    if not build.accepted or loads(build(())) is not None:
        return dataclasses.replace(done, refusal=refusal)
    undone = breaking_sites(
        _equal_sites(done.outcomes, build.accepted), lambda names: loads(build(names))
    )
    outcomes = {
        name: outcome
        if name not in undone
        else dataclasses.replace(
            outcome,
            status="proof_failed",
            reason=f"with {outcome.form} here the file does not load: {undone[name]}",
        )
        for name, outcome in done.outcomes.items()
    }
    model = build(build.accepted.keys() - undone.keys())
    return dataclasses.replace(done, model=model, outcomes=outcomes)


def _equal_sites(outcomes: Mapping[str, SiteOutcome], accepted: Collection[str]) -> list[list[str]]:
    """The accepted sites, those proven by the same representative together."""
    groups: dict[str, list[str]] = {}
    for name in accepted:
        proof = outcomes[name].proof
        first = None if proof is None else proof.representative
        groups.setdefault(first or name, []).append(name)
    return list(groups.values())


def _permitted(site: Site, choice: Choice | Keep) -> Choice | Keep:
    if site.cannot_replace is not None and isinstance(choice, Choice):
        return Keep(reason=f"{site.cannot_replace.code}: {site.cannot_replace.message}")
    return choice


def _final_opset(model: ir.Model, choices: list[Choice | Keep]) -> int:
    wanted = [choice.params.opset for choice in choices if isinstance(choice, Choice)]
    return max([model_opset(model), *wanted])


def _decide(
    site: Site, choice: Choice | Keep, opset: int, prover: Prover, settings: RewriteSettings
) -> tuple[SiteOutcome, Choice | None]:
    """The outcome of one site, and its choice when it is to be emitted."""
    if isinstance(choice, Keep):
        return SiteOutcome(status="kept", reason=choice.reason), None
    choice = _at_opset(choice, opset)
    name = choice.form.name
    refusal = choice.form.supports(site.spec, choice.params)
    if isinstance(refusal, Unsupported):
        return SiteOutcome(status="kept", reason=f"{name}: {refusal}"), None
    done = SiteOutcome(
        status="lowered" if choice.lowered else "fused",
        form=name,
        params=choice.params,
        reason=choice.reason,
    )
    there = already_in_form(site, choice)
    if there and (site.stated_as is None or not settings.prove):
        return done, None
    if not settings.prove:
        return done, choice
    proof = prover.prove(site, choice)
    if proof.status == "fail":
        return (
            SiteOutcome(
                status="proof_failed",
                form=name,
                params=choice.params,
                reason=proof.reason,
                proof=proof,
            ),
            None,
        )
    reason = "; ".join(filter(None, (choice.reason, proof.reason))) or None
    return dataclasses.replace(done, proof=proof, reason=reason), None if there else choice


def _at_opset(choice: Choice, opset: int) -> Choice:
    """A model has one opset: every form is emitted for it."""
    if choice.params.opset == opset:
        return choice
    params = FormParams(opset=opset, options=choice.params.options)
    return dataclasses.replace(choice, params=params)


def _replace(
    model: ir.Model, accepted: list[tuple[Site, Choice]], numbers: Sequence[Mapping[str, int]]
) -> None:
    names = Names(model)
    moved: dict[ir.Value, ir.Value] = {}
    emitted: list[ir.Node] = []
    made: list[tuple[Site, Sequence[ir.Node]]] = []
    for site, choice in accepted:
        images = {value: moved.get(value, value) for _, value in site.operands.values()}
        operands = with_values(site.operands, images)
        emission = emit_site(site, choice, operands, prefix=names.prefix(site.id))
        splice(model, site, emission)
        moved.update(emission.replacements)
        names.add(emission.nodes)
        emitted.extend(emission.nodes)
        made.append((site, emission.nodes))
    remove_dead_nodes(model)
    if emitted:
        tidy_layouts(model, emitted, Sizes(model, numbers))
        for site, nodes in made:
            state_widths(site.spec, nodes)
        remove_dead_nodes(model)
        restore_order(model)


def _raise_if_strict(settings: RewriteSettings, outcomes: Mapping[str, SiteOutcome]) -> None:
    failed = [name for name, outcome in outcomes.items() if outcome.status == "proof_failed"]
    if settings.strict and failed:
        raise CheckFailedError(
            f"{len(failed)} of {len(outcomes)} rewrites failed their proof: "
            + "; ".join(f"{name}: {outcomes[name].reason}" for name in failed),
            fix="leave out strict to keep these sites as they were",
        )
