"""The graphs of one model: recognised at each opset, rewritten and proven for each destination."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams
from mha_export.jobs._caching import Caching
from mha_export.jobs._defaults import faster_options, opset_for, preferred_forms
from mha_export.jobs._destinations import Destination
from mha_export.jobs._loading import LoadCheck
from mha_export.jobs._phases import PREFERRED, plan_names
from mha_export.jobs._plan import Plan
from mha_export.jobs._progress import Progress
from mha_export.jobs._settings import ExportSettings, SourceSettings
from mha_export.recognise import Recognition, Site, recognise
from mha_export.rewrite import (
    Choice,
    Keep,
    RewriteSettings,
    Rewritten,
    choose_form,
    rewrite,
    with_contrib_gelus,
    with_opset,
    with_own_sines,
)
from mha_export.targets import Available, Target, evaluator_of, target_named


class Exporter:
    """Makes the variants of one model; recognises once per opset."""

    def __init__(
        self,
        model: ir.Model,
        source: SourceSettings,
        settings: ExportSettings,
        plan: Plan,
        progress: Progress,
    ) -> None:
        self._model = model
        self._source = source
        self._settings = settings
        self._plan = plan
        self._progress = progress
        self._recognitions: dict[int, Recognition] = {}
        self._notes: dict[str, str] = {}
        self.caching = Caching(settings.cache, seed=settings.seed, progress=progress)

    @property
    def _own_opset(self) -> int:
        return int(self._model.graph.opset_imports.get("", 1))

    def recognition_at(self, opset: int | None) -> Recognition:
        """The model at ``opset`` (None: its own), recognised."""
        wanted = self._own_opset if opset is None else opset
        if wanted not in self._recognitions:
            self._progress(f"recognising attention (opset {wanted})")
            model = self._model
            if wanted != self._own_opset:
                model = with_opset(model, wanted)
            self._recognitions[wanted] = self.caching.applied(
                recognise(model), _evaluators_for(None)[0]
            )
        return self._recognitions[wanted]

    def variant(self, destination: Destination, check: LoadCheck) -> Rewritten:
        """The model rewritten; at its own opset where the target does not load it at a later one.

        A runtime may have a kernel for an operator of the model at the one and not at the other.
        """
        own, opset = self._own_opset, self._opset_for(destination)
        done = self._rewritten(destination, check, opset)
        if done.refusal is None or opset == own or self._source.opset is not None:
            return done
        lower = self._rewritten(destination, check, own)
        if lower.refusal is not None:
            return done
        self._notes[destination.stem] = f"left at opset {own}: at {opset}, {done.refusal}"
        return lower

    def notes(self, destination: Destination) -> list[str]:
        """What is to be said of a variant that was made."""
        note = self._notes.get(destination.stem)
        return [] if note is None else [note]

    def _rewritten(self, destination: Destination, check: LoadCheck, opset: int) -> Rewritten:
        recognition = self.recognition_at(opset)
        evaluator, *stand_ins = _evaluators_for(destination.target)
        self._progress(f"rewriting for {destination.stem}, proofs on {evaluator.name}")
        done = rewrite(
            recognition,
            lambda site: self._choose(destination, site, opset),
            evaluator=evaluator,
            stand_ins=stand_ins,
            loads=lambda model: check.refusal(model, destination.loaders()),
            settings=RewriteSettings(seed=self._settings.seed),
        )
        model, target = done.model, destination.target
        if target is not None and target.coarse_sines:
            model, _ = with_own_sines(model)
        if target is not None and target.contrib_gelu:
            model = with_contrib_gelus(model)
        return replace(done, model=model)

    def _opset_for(self, destination: Destination) -> int:
        if self._source.opset is not None:
            return self._source.opset
        # The target's own first form decides, whatever one of two graphs would rather have.
        forms = [name for name in destination.forms if name not in PREFERRED[destination.graph]]
        return opset_for(
            destination.name,
            forms or destination.forms,
            [site.spec for site in self.recognition_at(None).sites],
            own=self._own_opset,
            most=destination.max_opset,
        )

    def _choose(self, destination: Destination, site: Site, opset: int) -> Choice | Keep:
        rows = plan_names(destination.name, destination.graph)
        planned = next(filter(None, (self._plan.of(row, site.id) for row in rows)), None)
        own = preferred_forms(destination.name, site.spec, destination.forms)
        told = {} if destination.target is None else destination.target.form_options
        free = bool(own) and planned is None and self._settings.form is None
        faster = faster_options(destination.name, own[0], site.spec) if free else None
        if faster is not None:
            params = FormParams(opset=opset, options=faster)
            choice = choose_form(
                site, preferred=(), params=params, told=told, only=own[0], veto=destination.veto
            )
            if isinstance(choice, Choice):
                return choice
        return choose_form(
            site,
            preferred=own if planned is None else (planned.form,),
            params=FormParams(opset=opset, options={} if planned is None else planned.options),
            told=told,
            only=self._settings.form if planned is None else planned.form,
            veto=destination.veto,
        )


def _evaluators_for(target: Target | None) -> list[Evaluator]:
    """The target itself where it runs here, and what stands in for it: ONNX Runtime CPU, onnx."""
    candidates = [target, target_named("cpu"), target_named("reference")]
    names = dict.fromkeys(
        candidate.name
        for candidate in candidates
        if candidate is not None and isinstance(candidate.availability().run, Available)
    )
    if not names:
        raise InputError(
            "no engine here can prove a rewrite", fix="pip install 'mha-export[cpu]', or onnx"
        )
    return [evaluator_of(name) for name in names]
