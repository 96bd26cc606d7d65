"""The rewrite of a whole model: choose, prove, replace, tidy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from mha_export.errors import CheckFailedError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams, Unsupported
from mha_export.recognise import Recognition, Site
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import ClonedModel, with_values
from mha_export.rewrite._emit import already_in_form, emit_site
from mha_export.rewrite._outcome import (
    Choice,
    Chooser,
    Keep,
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


def rewrite(
    recognition: Recognition,
    choose: Chooser,
    *,
    evaluator: Evaluator,
    stand_ins: Sequence[Evaluator] = (),
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
        settings: seed, battery, strictness.

    Errors:
        CheckFailedError: ``settings.strict`` and a proof failed (all sites were tried).
        InputError: a form asks for an opset the model cannot be raised to.
    """
    settings = settings or RewriteSettings()
    choices = {site.id: _permitted(site, choose(site)) for site in recognition.sites}
    restore_order(recognition.model)  # the recogniser's own copy, to which it added nodes
    cloned = ClonedModel(recognition.model)
    sites = [cloned.site(site) for site in recognition.sites]
    opset = _final_opset(cloned.model, list(choices.values()))
    if opset > model_opset(cloned.model):
        raise_opset(cloned.model, opset)
    prover = Prover(Context(cloned.model, evaluator=evaluator), [evaluator, *stand_ins], settings)
    outcomes: dict[str, SiteOutcome] = {}
    accepted: list[tuple[Site, Choice]] = []
    for site in sites:
        outcome, choice = _decide(site, choices[site.id], opset, prover, settings)
        outcomes[site.id] = outcome
        if choice is not None:
            accepted.append((site, choice))
    _replace(cloned.model, accepted, prover.sizes)
    _raise_if_strict(settings, outcomes)
    return Rewritten(model=cloned.model, outcomes=outcomes)


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
    if already_in_form(site, choice):
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
    return dataclasses.replace(done, proof=proof, reason=reason), choice


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


def _raise_if_strict(settings: RewriteSettings, outcomes: dict[str, SiteOutcome]) -> None:
    failed = [name for name, outcome in outcomes.items() if outcome.status == "proof_failed"]
    if settings.strict and failed:
        raise CheckFailedError(
            f"{len(failed)} of {len(outcomes)} rewrites failed their proof: "
            + "; ".join(f"{name}: {outcomes[name].reason}" for name in failed),
            fix="leave out strict to keep these sites as they were",
        )
