"""Which form a site gets: the first of a preference list that can say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mha_export.forms import FormParams, Supported, Unsupported, form_named
from mha_export.recognise import Site
from mha_export.rewrite._outcome import Choice, Keep
from mha_export.spec import AttentionSpec

PRIMITIVE = "primitive"
"""The form that says everything: emitted where no preferred form can."""
_PLAIN_GRAPHS = (PRIMITIVE, "grouped", "tiled")

Veto = Callable[[str, AttentionSpec], str | None]
"""Why a form must not be emitted for a spec, whatever the form itself says; None where it may."""


def choose_form(
    site: Site,
    *,
    preferred: Sequence[str],
    params: FormParams,
    told: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    only: str | None = None,
    veto: Veto | None = None,
) -> Choice | Keep:
    """The first form of ``preferred`` that supports the site's spec, else ``primitive``.

    Of fused nodes for a site with a concat cache, the first that appends to it itself, if there is
    one: a Concat outside copies the whole past at every step. Graphs of plain nodes keep their
    place in the order, which was measured with their Concat.

    Args:
        site: the recognised attention.
        preferred: names of forms, best first (a target's ``default_forms``).
        params: handed to the form; its ``opset`` is what the model will be at.
        told: options by form (a target's ``form_options``); those of ``params`` come before them.
        only: the one form that may be emitted (``--form``): a site it cannot say is left as it is,
            with the feature that stops it.
        veto: what the target was seen to get wrong, or cannot load.

    Errors:
        InputError: a name that is no form.
    """
    if site.cannot_replace is not None:
        reason = site.cannot_replace
        return Keep(reason=f"{reason.code}: {reason.message}")

    def ask(name: str) -> Choice | str:
        options = {**told.get(name, {}), **params.options}
        return _ask(site, name, dataclasses.replace(params, options=options), veto)

    if only is not None:
        answer = ask(only)
        return Keep(reason=answer) if isinstance(answer, str) else answer
    refusals: list[str] = []
    outside: Choice | None = None
    for name in dict.fromkeys(preferred):
        answer = ask(name)
        if isinstance(answer, Choice):
            if name not in _PLAIN_GRAPHS and _appends_outside(site, answer):
                outside = outside or answer
                continue
            if name == PRIMITIVE and outside is not None:
                return outside
            lowered = name == PRIMITIVE and bool(refusals)
            return dataclasses.replace(
                answer, lowered=lowered, reason="; ".join(refusals) if lowered else None
            )
        refusals.append(answer)
    if outside is not None:
        return outside
    last = ask(PRIMITIVE) if PRIMITIVE not in preferred else refusals[-1]
    if isinstance(last, str):
        return Keep(reason="; ".join(dict.fromkeys([*refusals, last])))
    return dataclasses.replace(last, lowered=bool(refusals), reason="; ".join(refusals) or None)


def _appends_outside(site: Site, choice: Choice) -> bool:
    cache = site.spec.cache
    if cache is None or cache.growth != "concat":
        return False
    answer = choice.form.supports(site.spec, choice.params)
    return isinstance(answer, Supported) and "cache" in answer.by_other_means


def _ask(site: Site, name: str, params: FormParams, veto: Veto | None) -> Choice | str:
    """The choice of the form called ``name``, or why it cannot be."""
    form = form_named(name)
    if params.opset < form.min_opset:
        return f"{name}: opset: needs {form.min_opset} or more, the model is at {params.opset}"
    answer = form.supports(site.spec, params)
    if isinstance(answer, Unsupported):
        return f"{name}: {answer}"
    refusal = None if veto is None else veto(name, site.spec)
    if refusal is not None:
        return f"{name}: {refusal}"
    return Choice(form=form, params=params)
